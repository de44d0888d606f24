"""Snapshots: what is loaded is what was saved, bit for bit, whatever the format; others are refused."""

import dataclasses
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.driver import SPEC, advance, init

import kvjax
from kvjax import snapshots
from kvjax.policies import H2O

KIND = dict(model="tiny", policy="full")


def bits(tree) -> list[bytes]:
    as_data = lambda leaf: jax.random.key_data(leaf) if snapshots._is_key(leaf) else leaf  # noqa: E731
    return [np.asarray(as_data(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "changes",
    [
        dict(format="bfloat16"),
        dict(format="fp8_e4m3"),
        dict(format="int4", page_size=64),
        dict(format="int8", skip_layers=(1,)),
        dict(policy=H2O(budget=12), groups=2),
    ],
    ids=lambda changes: "-".join(map(str, changes)),
)
def test_a_cache_comes_back_bit_for_bit(tmp_path, changes):
    spec = dataclasses.replace(SPEC, rollback=0, **changes)
    rng = np.random.default_rng(0)
    # Any bits: also those of NaN.
    draw = lambda leaf: jnp.asarray(  # noqa: E731
        np.frombuffer(rng.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape)
    )
    state: dict[str, Any] = dict(cache=jax.tree.map(draw, init(spec)), key=jax.random.key(5), nothing=jnp.zeros((0, 4)))
    snapshots.save(tmp_path, state, KIND, [1, "two"])
    like: dict[str, Any] = dict(cache=init(spec), key=jax.random.key(0), nothing=jnp.zeros((0, 4)))
    found = snapshots.load(tmp_path, like, KIND)
    assert found is not None and found[1] == [1, "two"]
    assert jax.tree.structure(found[0]) == jax.tree.structure(state)
    assert bits(found[0]) == bits(state)
    assert jax.random.bits(found[0]["key"]) == jax.random.bits(state["key"])


def test_a_loaded_cache_goes_on_as_the_saved_one(tmp_path):
    cache, _, _ = advance(init(), [5, 0, 9, 1])
    snapshots.save(tmp_path, cache, KIND)
    loaded, _ = snapshots.load(tmp_path, init(), KIND) or pytest.fail("nothing was saved")
    for lengths in ([3, 2, 0, 8], [1, 1, 1, 1]):
        (cache, _, report), (loaded, _, same) = advance(cache, lengths), advance(loaded, lengths)
        assert report.ok and bits((cache, report)) == bits((loaded, same))
    kvjax.check(loaded)


def test_the_newest_stays_alone_and_an_interrupted_save_changes_nothing(tmp_path):
    for number in range(3):
        snapshots.save(tmp_path, jnp.int32(number), KIND)
    (newest,) = tmp_path.iterdir()
    shutil.copytree(newest, tmp_path / "4.partial")
    shutil.rmtree(tmp_path / "4.partial" / "state")
    state, _ = snapshots.load(tmp_path, jnp.int32(0), KIND) or pytest.fail("nothing was saved")
    assert state == 2
    snapshots.save(tmp_path, jnp.int32(7), KIND)
    assert len(list(tmp_path.iterdir())) == 1 and snapshots.load(tmp_path, jnp.int32(0), KIND) == (7, None)


def test_nothing_saved_is_none(tmp_path):
    assert snapshots.load(tmp_path / "none", jnp.int32(0), KIND) is None
    (tmp_path / "notes.txt").write_text("of somebody else's")
    assert snapshots.load(tmp_path, jnp.int32(0), KIND) is None


def test_others_are_refused_by_name(tmp_path):
    snapshots.save(tmp_path, init(), KIND)
    with pytest.raises(kvjax.InputError, match="holds a state of policy full, and this is policy tova"):
        snapshots.load(tmp_path, init(), KIND | dict(policy="tova"))
    other = dataclasses.replace(SPEC, windows=(None, 12))
    assert [leaf.shape for leaf in jax.tree.leaves(init(other))] == [leaf.shape for leaf in jax.tree.leaves(init())]
    with pytest.raises(kvjax.InputError, match="another CacheSpec"):
        snapshots.load(tmp_path, init(other), KIND)


@pytest.mark.parametrize("lost", ["facts.json", "state/manifest.ocdbt", "state/d"])
def test_a_damaged_snapshot_is_one_line(tmp_path, lost):
    snapshots.save(tmp_path, jnp.arange(3), KIND)
    lost = tmp_path / "1" / lost
    for file in [lost] if lost.is_file() else lost.iterdir():
        file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(kvjax.InputError, match="the state in .*1 is damaged"):
        snapshots.load(tmp_path, jnp.arange(3), KIND)


def test_what_has_changed_on_disk_is_damaged(tmp_path):
    snapshots.save(tmp_path, jax.random.normal(jax.random.key(0), (64, 64)), KIND, dict(position=7))
    like, facts = jnp.zeros((64, 64)), tmp_path / "1" / "facts.json"
    kept = facts.read_text("utf-8")
    for before, after in (('"position": 7', '"position": -5'), (KIND["policy"], "tova"), ('"notes": {', '"note": {')):
        facts.write_text(kept.replace(before, after), "utf-8")
        with pytest.raises(kvjax.InputError, match="damaged"):
            snapshots.load(tmp_path, like, KIND)
    facts.write_text(kept, "utf-8")
    data = max((path for path in (tmp_path / "1").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    intact = data.read_bytes()
    for spoilt in (
        b"",
        intact[: len(intact) // 2],
        intact[:5000] + bytes(b ^ 255 for b in intact[5000:5008]) + intact[5008:],
    ):
        data.write_bytes(spoilt)
        with pytest.raises(kvjax.InputError, match="damaged"):
            snapshots.load(tmp_path, like, KIND)


def test_what_is_somebody_elses_stays(tmp_path):
    for name in ("film.partial", "0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("precious")
    (tmp_path / "notes.partial").write_text("mine")
    for number in range(2):
        snapshots.save(tmp_path, jnp.int32(number), KIND)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2", "film.partial", "notes.partial"}
    assert (tmp_path / "0" / "data").read_text() == (tmp_path / "film.partial" / "data").read_text() == "precious"


def test_what_cannot_be_written_is_one_line_and_leaves_the_snapshot_before(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    snapshots.save(tmp_path, jnp.int32(1), KIND)

    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

    monkeypatch.setattr(ocp.Checkpointer, "save", full)
    with pytest.raises(kvjax.InputError, match="cannot save the state in .* no space left"):
        snapshots.save(tmp_path, jnp.int32(2), KIND)
    assert snapshots.load(tmp_path, jnp.int32(0), KIND) == (1, None) and len(list(tmp_path.iterdir())) == 1


def test_orbax_is_imported_late():
    code = "import sys, kvjax.snapshots; assert not any(name.startswith('orbax') for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
