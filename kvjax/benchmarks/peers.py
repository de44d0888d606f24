"""Other engines as peers of the benchmark: worker processes in environments of their own, one JSON object a line.

`make peers` sets the environments up under `.peers/` of the repository; `scripts/peers/` holds the workers and the
protocol. This side imports the standard library only. A worker lives as long as its `Peer`, so that a benchmark can
interleave repeats of several engines.
"""

from __future__ import annotations

import json
import os
import queue
import random
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

MODELS = {"transformers": "smollm2-135m", "openvino": "smollm2-135m-openvino"}
"""The known peers, and the folder under `.peers/models` that each reads."""

Answer = dict[str, Any]


class PeerError(RuntimeError):
    """A peer is not set up, did not answer in time, or answered with an error."""


def random_prompts(batch: int, prompt_tokens: int, seed: int, vocab_size: int) -> list[list[int]]:
    """`batch` rows of `prompt_tokens` ids in 3..vocab_size - 1, the same that the workers make from `seed`."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]


def find_repository() -> Path | None:
    """The repository with the workers: the one this file lies in, else one around the current folder."""
    around = [Path(__file__).resolve().parents[2], Path.cwd(), *Path.cwd().parents]
    return next((folder for folder in around if (folder / "scripts" / "peers" / "protocol.py").is_file()), None)


class Peer:
    """One peer engine. The worker starts with the first measurement, or with `start`, and ends with `close`.

    Args:
        name: A key of `MODELS`.
        root: Repository folder; found by `find_repository` when None.
        threads: CPU threads that the engine uses.
        start_timeout: Seconds to load the model.
        timeout: Seconds for one measurement.

    Raises:
        ValueError: `name` is no known peer.
    """

    def __init__(
        self,
        name: str,
        *,
        root: Path | None = None,
        threads: int = 2,
        start_timeout: float = 300,
        timeout: float = 600,
    ) -> None:
        if name not in MODELS:
            raise ValueError(f"unknown peer {name!r}; known are {', '.join(MODELS)}")
        self.name = name
        self.threads = threads
        self.start_timeout = start_timeout
        self.timeout = timeout
        self.ready: Answer = {}
        self.last: Answer = {}
        self._root = root or find_repository()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log: IO[str] | None = None

    def available(self) -> bool:
        """Whether environment and model are there. Starts nothing."""
        return self._root is not None and all(path.exists() for path in self._paths(self._root))

    def how_to_install(self) -> str:
        """The command, run in the repository, that makes the peer available."""
        return "make peers"

    @property
    def engine(self) -> str:
        """Name and version as the worker gives them; starts it."""
        self.start()
        return str(self.ready["engine"])

    @property
    def vocab_size(self) -> int:
        """Vocabulary of the model, which `random_prompts` needs to repeat the worker's prompts; starts it."""
        self.start()
        return int(self.ready["vocab_size"])

    def decode(
        self, batch: int, prompt_tokens: int, new_tokens: int, *, seed: int = 0, cache: str | None = None
    ) -> float:
        """Seconds of the `new_tokens - 1` decode steps after the first token, for `batch` prompts at once.

        `cache` is one of those that the worker names in `ready["caches"]`, its usual one by default. `last` then holds
        the whole answer, with `tokens` [batch, new_tokens] and `prefill_seconds`.
        """
        kind = {} if cache is None else dict(cache=cache)
        return self._measure(
            op="decode", batch=batch, prompt_tokens=prompt_tokens, new_tokens=new_tokens, seed=seed, **kind
        )

    def prefill(self, prompt_tokens: int, *, batch: int = 1, seed: int = 0) -> float:
        """Seconds from the prompts to the first token of each."""
        return self._measure(op="prefill", batch=batch, prompt_tokens=prompt_tokens, seed=seed)

    def start(self) -> None:
        """Starts the worker unless it runs, and waits until its model is loaded.

        Raises:
            PeerError: the peer is not set up, or its worker ended or did not get ready in `start_timeout` seconds.
        """
        if self._process is not None:
            return
        if self._root is None or not self.available():
            raise PeerError(f"peer {self.name} is not set up; run in the repository: {self.how_to_install()}")
        python, script, model = self._paths(self._root)
        self._lines = queue.Queue()
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (lives until close)
        self._process = subprocess.Popen(
            [str(python), str(script), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1"},
        )
        threading.Thread(target=_read_lines, args=(self._process, self._lines), daemon=True).start()
        try:
            self.ready = self._read(self.start_timeout)
        except PeerError:
            self.close()
            raise
        if not self.ready.get("ready"):
            self._fail(f"said {self.ready} where it should have said that it is ready")

    def close(self) -> None:
        """Ends the worker; without effect when none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.stdin.write('{"op": "quit"}\n')
            process.stdin.close()
            process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _paths(self, root: Path) -> tuple[Path, Path, Path]:
        """Interpreter, worker script and model folder."""
        return (
            root / ".peers" / self.name / "bin" / "python",
            root / "scripts" / "peers" / f"{self.name}_peer.py",
            root / ".peers" / "models" / MODELS[self.name],
        )

    def _measure(self, **request: Any) -> float:
        self.start()
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request | {"threads": self.threads}) + "\n")
            self._process.stdin.flush()
        except OSError:
            self._fail("has ended")
        self.last = self._read(self.timeout)
        return float(self.last["seconds"])

    def _read(self, timeout: float) -> Answer:
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            self._fail(f"did not answer within {timeout:g} s")
        if line is None:
            self._fail("has ended")
        try:
            answer = json.loads(line)
        except ValueError:
            self._fail(f"said {line[:200]!r}, which is not JSON")
        if "error" in answer:
            raise PeerError(f"peer {self.name}: {answer['error']}")
        return answer

    def _fail(self, what: str) -> NoReturn:
        """Ends the worker and raises, with the last line it logged as the likely reason."""
        logged = ""
        if self._log is not None:
            self._log.seek(0)
            logged = next((line for line in reversed(self._log.read().splitlines()) if line.strip()), "")
        if self._process is not None:
            self._process.kill()
        self.close()
        raise PeerError(f"peer {self.name} {what}" + (f"; its last words: {logged[:300]}" if logged else ""))


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
