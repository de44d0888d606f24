"""Peers of the benchmark, against a worker of the tests' own that speaks the same protocol."""

import runpy
import sys
import textwrap
from pathlib import Path

import pytest

from kvjax.benchmarks.peers import MODELS, Peer, PeerError, find_repository, random_prompts

REPOSITORY = Path(__file__).parents[1]

WORKER = """
import sys, time
sys.path.insert(0, {protocol!r})
from protocol import serve

def decode(batch, prompt_tokens, new_tokens, seed, threads):
    if batch == 13:
        raise MemoryError("no room for 13")
    if batch == 14:
        time.sleep(60)
    if batch == 15:
        sys.stderr.write("engine fell over\\n")
        sys.exit(3)
    return dict(seconds=batch * prompt_tokens * (new_tokens - 1) / 1000, tokens=[[seed] * new_tokens] * batch)

def prefill(prompt_tokens, batch, seed, threads):
    return dict(seconds=prompt_tokens / 1000 + threads)

def start():
    print("a library that prints")
    return dict(engine="fake 1.0", vocab_size=99), dict(decode=decode, prefill=prefill)

{body}
"""


def make_root(folder: Path, body: str = "serve(start)") -> Path:
    """A repository with a worker named transformers that this interpreter runs."""
    for part in (".peers/transformers/bin", ".peers/models/smollm2-135m", "scripts/peers"):
        (folder / part).mkdir(parents=True)
    (folder / ".peers/transformers/bin/python").symlink_to(sys.executable)
    worker = WORKER.format(protocol=str(REPOSITORY / "scripts" / "peers"), body=textwrap.dedent(body))
    (folder / "scripts/peers/transformers_peer.py").write_text(worker)
    return folder


def test_measures(tmp_path):
    with Peer("transformers", root=make_root(tmp_path), threads=1) as peer:
        assert peer.available()
        assert peer.decode(2, 10, 6, seed=5) == pytest.approx(0.1)
        assert peer.last["tokens"] == [[5] * 6] * 2
        assert peer.prefill(500) == pytest.approx(1.5)
        assert (peer.engine, peer.vocab_size) == ("fake 1.0", 99)


def test_close_ends_the_worker_and_it_can_start_again(tmp_path):
    peer = Peer("transformers", root=make_root(tmp_path))
    peer.start()
    process = peer._process
    peer.close()
    peer.close()
    assert process is not None and process.returncode == 0
    assert peer.decode(1, 10, 2) == pytest.approx(0.01)
    peer.close()


def test_an_error_is_readable_and_the_worker_lives_on(tmp_path):
    with Peer("transformers", root=make_root(tmp_path)) as peer:
        with pytest.raises(PeerError, match="peer transformers: MemoryError: no room for 13"):
            peer.decode(13, 1, 2)
        assert peer.decode(1, 10, 2) == pytest.approx(0.01)


def test_timeout(tmp_path):
    with Peer("transformers", root=make_root(tmp_path), timeout=0.5) as peer:
        with pytest.raises(PeerError, match="did not answer within 0.5 s"):
            peer.decode(14, 1, 2)
        assert peer._process is None


def test_a_worker_that_dies_leaves_its_last_words(tmp_path):
    with (
        Peer("transformers", root=make_root(tmp_path)) as peer,
        pytest.raises(PeerError, match="has ended; its last words: engine fell over"),
    ):
        peer.decode(15, 1, 2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import no_such_engine", "has ended; its last words: ModuleNotFoundError"),
        ("print('hello')", "said 'hello"),
        ("def bad(): raise OSError('no model')\nserve(bad)", "could not start: OSError: no model"),
        ("print('{}')", "should have said that it is ready"),
    ],
)
def test_a_worker_that_does_not_start(tmp_path, body, words):
    with Peer("transformers", root=make_root(tmp_path, body)) as peer, pytest.raises(PeerError, match=words):
        peer.start()


def test_not_set_up(tmp_path):
    peer = Peer("openvino", root=tmp_path)
    assert not peer.available()
    with pytest.raises(PeerError, match="peer openvino is not set up; run in the repository: make peers"):
        peer.decode(1, 1, 2)


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown peer 'vllm'; known are transformers, openvino"):
        Peer("vllm")


def test_the_workers_lie_in_the_repository():
    assert find_repository() == REPOSITORY
    assert all((REPOSITORY / "scripts" / "peers" / f"{name}_peer.py").is_file() for name in MODELS)


def test_workers_make_the_same_prompts():
    theirs = runpy.run_path(str(REPOSITORY / "scripts" / "peers" / "prompts.py"))["random_prompts"]
    ours = random_prompts(3, 20, 7, 100)
    assert ours == theirs(3, 20, 7, 100)
    assert all(3 <= token < 100 for row in ours for token in row)
