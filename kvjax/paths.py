"""Where kvjax keeps its files: one folder for converted weights, compiled programs and downloads."""

import os
from pathlib import Path

from kvjax.errors import InputError


def cache_dir() -> Path:
    """Return the folder below which kvjax keeps everything.

    It is `KVJAX_CACHE` where that is set, else `kvjax` in the user's cache folder. The folder is not made here:
    whoever writes below it makes it.

    Returns:
        An absolute path.

    Raises:
        InputError: `KVJAX_CACHE` names something that is not a folder.
    """
    given = os.environ.get("KVJAX_CACHE")
    if given:
        path = Path(given).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise InputError(f"KVJAX_CACHE is {given!r}, which is a file; set it to a folder, or unset it")
        return path
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvjax"


def enable_compilation_cache() -> None:
    """Keep compiled XLA programs in `cache_dir()/xla`, so that a second start compiles nothing.

    Changes `jax.config` for the process, from the next compilation on. A folder that the user has chosen
    (`JAX_COMPILATION_CACHE_DIR` or `jax.config`) stays, with the user's thresholds.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
    # By default JAX keeps only what took a second to compile; a start consists of many smaller programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
