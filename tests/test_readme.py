"""The README's examples run, and are short."""

import re
from pathlib import Path

import kvjax

README = (Path(__file__).parent.parent / "README.md").read_text()


def example(heading: str) -> str:
    section = README.split(f"## {heading}", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def test_the_example_of_a_model_author_runs(capsys):
    code = example("Examples")
    assert len(code.splitlines()) <= 40
    exec(compile(code, "README.md", "exec"), {})
    printed, promised = capsys.readouterr().out.strip(), code.rsplit("# ", 1)[1].strip()
    assert printed == promised


def test_the_example_of_a_user_runs(capsys, monkeypatch, tmp_path, write_gguf, random_weights):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "cache"))
    checkpoint = kvjax.load(str(write_gguf(random_weights())))
    monkeypatch.setattr(kvjax, "load", {"smollm2-135m": checkpoint}.get)
    exec(compile(example("Use it from Python"), "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.fullmatch(r"(.*) (stop|length)\n\1\n", out, re.DOTALL)


def test_commands_of_the_readme_exist():
    from kvjax.cli.main import COMMANDS

    blocks = "".join(re.findall(r"```\n(.*?)```", README, re.DOTALL))
    named = set(re.findall(r"^kvjax ([\w-]+)", blocks, re.MULTILINE))
    assert named and named <= set(COMMANDS)
