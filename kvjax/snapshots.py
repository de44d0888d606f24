"""Saving a running cache, or anything that holds one, and going on from it later: arrays by Orbax, atomically."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import InputError, shown

_FACTS, _STATE = "facts.json", "state"


def save(folder: str | Path, state: Any, kind: Mapping[str, str], notes: Any = None) -> None:
    """Save a pytree of arrays (a `Cache`, a `TextState`, random keys in it) in place of what the folder holds.

    Whoever is interrupted leaves the old snapshot or the new one: it gets its name when all is written.

    Args:
        folder: is made where it is missing. What is not of a snapshot stays.
        state: is not changed, and may be donated afterwards.
        kind: what the state belongs to (model, policy, ...); `load` refuses another.
        notes: anything else that JSON can hold.

    Raises: InputError where it cannot be written; the snapshot before is still there.
    """
    import orbax.checkpoint as ocp

    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    before = _snapshots(folder)
    name = int(before[-1].name) + 1 if before else 1
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
    facts = dict(kind=dict(kind), layout=_layout(state), notes=notes)
    try:
        partial.mkdir()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(partial / _STATE, ocp.args.PyTreeSave(_named(state)))
        facts |= dict(files=_digest_of_files(partial / _STATE))
        (partial / _FACTS).write_text(json.dumps(facts | dict(sha256=_digest_of_facts(facts))), "utf-8")
        os.replace(partial, folder / str(name))
    except (OSError, ValueError) as error:  # TensorStore calls a full disk a ValueError
        shutil.rmtree(partial, ignore_errors=True)
        raise InputError(f"cannot save the state in {folder} ({shown(str(error))}): choose another folder") from None
    for old in before:
        if (old / _FACTS).exists():  # else it is somebody else's
            shutil.rmtree(old)


def load[T](folder: str | Path, like: T, kind: Mapping[str, str]) -> tuple[T, Any] | None:
    """Load the newest snapshot of a folder.

    Args:
        folder: where `save` wrote.
        like: a state of the same kind, for its structure, shapes and devices, such as a new cache of the same spec.
        kind: what the state must belong to.

    Returns: the state, bit for bit as it was saved, and the notes; None where there is no snapshot.

    Raises: InputError for a snapshot of another kind or layout, and for one that cannot be read.
    """
    found = _snapshots(Path(folder).absolute())
    if not found:
        return None
    newest = found[-1]
    try:
        facts = json.loads((newest / _FACTS).read_text("utf-8"))
        if facts.pop("sha256") != _digest_of_facts(facts):
            raise ValueError("its facts have changed")
        saved, layout, notes, digest = (facts[name] for name in ("kind", "layout", "notes", "files"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(newest, error) from None
    for name in [*kind, *(name for name in saved if name not in kind)]:
        if (theirs := saved.get(name)) != (ours := kind.get(name)):
            raise InputError(
                f"{folder} holds a state of {name} {theirs}, and this is {name} {ours}: use another folder"
            )
    if layout != _layout(like):
        raise InputError(f"{folder} holds a state of another CacheSpec, or version of kvjax: use another folder")
    # Before Orbax reads them: after an error it may complain of a closed event loop, later and elsewhere.
    if _digest_of_files(newest / _STATE) != digest:
        raise _damaged(newest, ValueError("its files have changed"))
    return _filled(like, _restored(newest, _named(like))), notes


def _restored(snapshot: Path, named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    shapes, where = jax.tree.map(ocp.utils.to_shape_dtype_struct, named), ocp.checkpoint_utils.construct_restore_args
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(snapshot / _STATE, ocp.args.PyTreeRestore(shapes, restore_args=where(named)))
    except Exception as error:  # noqa: BLE001, what TensorStore raises has no class of its own
        raise _damaged(snapshot, error) from None


def _filled[T](like: T, arrays: dict[str, jax.Array]) -> T:
    """The state that is like another, of arrays by their number."""
    leaves, structure = jax.tree.flatten(like)
    for number, leaf in enumerate(leaves):
        if leaf.size and _is_key(leaf):
            leaves[number] = jax.random.wrap_key_data(arrays[str(number)], impl=jax.random.key_impl(leaf))
        elif leaf.size:  # Orbax takes no arrays without elements
            leaves[number] = arrays[str(number)]
    return jax.tree.unflatten(structure, leaves)


def _snapshots(folder: Path) -> list[Path]:
    """Whole snapshots of a folder, the newest last."""
    return sorted((path for path in folder.glob("*") if path.name.isdecimal()), key=lambda path: int(path.name))


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _named(state: Any) -> dict[str, jax.Array]:
    """The arrays of a state that have elements, by their number; random keys as integers."""
    leaves = enumerate(jax.tree.leaves(state))
    return {str(number): jax.random.key_data(leaf) if _is_key(leaf) else leaf for number, leaf in leaves if leaf.size}


def _digest_of_facts(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _digest_of_files(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def _layout(state: Any) -> list[str]:
    """The structure, with all that is static, and dtype and shape of every array."""
    return [str(jax.tree.structure(state)), *(f"{leaf.dtype} {list(leaf.shape)}" for leaf in jax.tree.leaves(state))]


def _damaged(snapshot: Path, error: Exception) -> InputError:
    return InputError(f"the state in {snapshot} is damaged ({shown(str(error))}): remove it")
