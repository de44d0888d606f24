"""Keeping compiled programs few: each maps memory of its own, and Linux gives a process 65530 mappings."""

import gc
from pathlib import Path

import jax

_MANY = 15_000


def forget_programs_if_many() -> None:
    """Forget all compiled programs once they have made many mappings."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > _MANY:
        jax.clear_caches()
        gc.collect()
