"""The error for mistakes of the user's."""


class InputError(ValueError):
    """A mistake of the user's that the user can mend: an option, a configuration, a file.

    Its message is one line that says what was given, what is allowed and what to change. It is raised at the
    border (config, command line, file), and the `kvjax` command prints it without a traceback and exits with 2.
    """
