"""The error for mistakes of the user's, and what says and finds them in one line."""

import operator


class InputError(ValueError):
    """A mistake of the user's that the user can mend: an option, a configuration, a file.

    Its message is one line that says what was given, what is allowed and what to change. It is raised at the
    border (config, command line, file), and the `kvjax` command prints it without a traceback and exits with 2.
    """


def shown(value: object) -> str:
    """Return a value as a message shows it: on one line, and not at length."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python spells no integer of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]} …"


def whole_number(name: str, value: object, least: int, most: int = 2**31 - 1) -> int:
    """Return `value`, of any integer type, as an int. Raises InputError for anything else and out of range."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InputError(f"{name} is {shown(value)}: it must be a whole number from {least} to {most}")
    return number
