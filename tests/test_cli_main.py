"""The `kvjax` command: versions, help, dispatch and errors."""

import io
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvjax.cli import main as cli
from kvjax.errors import InputError


@pytest.fixture
def command(monkeypatch):
    """A function that puts another one in the place of `kvjax.cli.generate.main`."""

    def put(function):
        monkeypatch.setitem(sys.modules, "kvjax.cli.generate", types.SimpleNamespace(main=function))

    return put


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"kvjax \d+\.\d+\.\d+, jax [\d.]+, backend cpu \(8 x cpu\)\n", capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_commands_and_folder(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "100%"))
    monkeypatch.setattr(sys, "argv", ["kvjax", *arguments])
    try:
        assert cli.main() == 0
    except SystemExit as stop:
        assert stop.code == 0
    out = capsys.readouterr().out
    assert "KVJAX_CACHE" in out and str(tmp_path / "100%") in out
    for name, text in cli.COMMANDS.items():
        assert re.search(rf"^ +{name} +{text}$", out, re.MULTILINE)


def test_arguments_go_to_the_subcommand(command):
    seen = []
    command(lambda argv: seen.append(argv) or 3)
    assert cli.main(["generate", "--help", "--", "--version"]) == 3
    assert seen == [["--help", "--", "--version"]]


def test_input_error_is_one_line(command, capsys):
    def fail(argv):
        raise InputError("page_size is 0,\nallowed is 1 or more: change it")

    command(fail)
    assert cli.main(["generate"]) == 2
    assert capsys.readouterr().err == "kvjax: error: page_size is 0, allowed is 1 or more: change it\n"


def test_other_errors_keep_their_traceback(command):
    command(lambda argv: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate"])


def test_an_interrupt_ends_the_process_at_once():
    program = "import sys; from kvjax.cli import main as m; m._run = lambda _: input('>'); sys.exit(m.main(['x']))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b">"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT and process.stderr.read() == b""


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt, 130, ""),
        (BrokenPipeError, 141, ""),
        (lambda: OSError(28, "No space left on device"), 2, "kvjax: error: [Errno 28] No space left on device: make"),
    ],
)
def test_interrupts_and_refusals_of_the_system(command, capsys, error, code, line):
    def fail(argv):
        raise error()

    command(fail)
    assert cli.main(["generate"]) == code
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == (code == 2)


def test_an_output_without_unicode_shows_escapes(command, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    command(lambda argv: print("é") or 0)
    assert cli.main(["generate"]) == 0 and out.buffer.getvalue() == b"\\xe9\n"


@pytest.mark.parametrize(("target", "code", "lines"), [("/dev/full", 2, 1), ("a closed pipe", 141, 0)])
def test_an_output_that_takes_nothing(target, code, lines):
    if target == "/dev/full":
        out = os.open(target, os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    command = [Path(sys.executable).parent / "kvjax", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    os.close(out)
    assert (done.returncode, done.stderr.count("\n")) == (code, lines), done.stderr


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"]])
def test_unknown_argument(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "nonsense" in capsys.readouterr().err


def test_bad_cache_folder_is_one_line(monkeypatch, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KVJAX_CACHE", str(file))
    assert cli.main(["--help"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_script_and_command_are_the_same(name, tmp_path):
    script = [sys.executable, Path(__file__).parent.parent / "scripts" / f"{name.replace('-', '_')}.py"]
    installed = [Path(sys.executable).parent / "kvjax", name]
    environment = {**os.environ, "KVJAX_CACHE": str(tmp_path)}
    outputs = [
        subprocess.run([*front, "--help"], env=environment, capture_output=True, text=True, check=True).stdout
        for front in (script, installed)
    ]
    assert outputs[0] and outputs[0] == outputs[1]
