"""`kvjax generate`: what it prints and what it refuses, on a tiny checkpoint written for the test."""

import io
import json
from pathlib import Path

import pytest

import kvjax
from kvjax import batch
from kvjax.cli import generate
from kvjax.cli.main import main

KEYS = {
    "text", "token_ids", "prompt_tokens", "generated_tokens", "finish_reason", "ttft_s", "compile_s",
    "decode_tokens_per_s", "cache",
}  # fmt: skip
CACHE_KEYS = {"page_size", "pages_total", "pages_used_peak", "bytes_total", "bytes_used_peak"}


@pytest.fixture
def checkpoint(random_weights, write_gguf) -> str:
    return str(write_gguf(random_weights()))


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path_factory.getbasetemp() / "kvjax-cache"))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(["generate", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_prompt_prints_one_object(capsys, checkpoint):
    code, out, _ = run(capsys, "--model", checkpoint, "--prompt", "hello w", "--max-new-tokens", "5", "--json")
    entry = json.loads(out)
    assert code == 0 and entry.keys() >= KEYS and entry["cache"].keys() >= CACHE_KEYS
    assert entry["generated_tokens"] == len(entry["token_ids"]) <= 5
    assert entry["finish_reason"] in ("length", "stop")
    assert 0 < entry["cache"]["pages_used_peak"] <= entry["cache"]["pages_total"]


def test_several_prompts_print_a_list_in_order(capsys, checkpoint, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "max_new_tokens": 2}\n\n{"prompt": "w"}\n')
    argv = ("--model", checkpoint, "--prompt", "hell", "--prompts-file", str(file), "--max-new-tokens", "4", "--json")
    code, out, _ = run(capsys, *argv, "--logprobs", "2")
    entries = json.loads(out)
    assert code == 0 and len(entries) == 3
    assert entries[1]["generated_tokens"] <= 2 and entries[2]["generated_tokens"] <= 4
    for entry in entries:
        assert len(entry["logprobs"]) == entry["generated_tokens"]
        assert all(len(token["top"]) == 2 and token["logprob"] <= 0 for token in entry["logprobs"])


def test_a_stream_prints_the_text_of_the_batch_run(capsys, checkpoint):
    argv = ("--model", checkpoint, "--prompt", "hello", "--max-new-tokens", "20")
    text = json.loads(run(capsys, *argv, "--json")[1])["text"]
    code, out, err = run(capsys, *argv, "--stream")
    assert code == 0 and out == "hello" + text + "\n"
    assert "\ncompiling" in err and "\n[length, 20 tokens]\n" in err


def test_a_stop_text_is_cut_off(capsys, checkpoint):
    argv = ("--model", checkpoint, "--prompt", "hello", "--max-new-tokens", "20")
    full = json.loads(run(capsys, *argv, "--json")[1])
    text = full["text"]
    stop = text[3:5]
    assert len(stop) == 2
    entry = json.loads(run(capsys, *argv, "--json", "--stop", stop, "--logprobs", "1")[1])
    assert entry["text"] == text[: text.index(stop)] and entry["finish_reason"] == "stop"
    count = entry["generated_tokens"]
    assert len(entry["token_ids"]) == len(entry["logprobs"]) == count < 20
    decode = kvjax.load(checkpoint).tokenizer.decode
    assert stop in decode(full["token_ids"][:count]) and stop not in decode(full["token_ids"][: count - 1])
    # The last token allowed completes it.
    last = json.loads(run(capsys, *argv[:-1], str(count), "--json", "--stop", stop)[1])
    assert (last["text"], last["finish_reason"]) == (entry["text"], "stop")
    _, out, err = run(capsys, *argv, "--stream", "--stop", stop)
    assert out == "hello" + entry["text"] + "\n" and f"[stop, {count} tokens]" in err


def test_the_prompt_may_come_from_standard_input(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    argv = ("--model", checkpoint, "--max-new-tokens", "2", "--json")
    from_stdin = json.loads(run(capsys, *argv)[1])
    from_flag = json.loads(run(capsys, *argv, "--prompt", "hello")[1])
    assert from_stdin["token_ids"] == from_flag["token_ids"] and from_stdin["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("stdin", "words"), [(None, "standard input is closed"), (b"caf\xe9", "cannot read a prompt from standard input")]
)
def test_a_standard_input_that_is_no_text(capsys, monkeypatch, stdin, words):
    monkeypatch.setattr("sys.stdin", None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    code, _, err = run(capsys, "--model", "nosuchmodel")
    assert code == 2 and words in err


def test_lines_end_with_a_newline_alone(capsys, checkpoint, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "hello\u2028w"}\r\n{"prompt": "w"}'.encode())
    argv = ("--model", checkpoint, "--prompts-file", str(file), "--max-new-tokens", "2", "--json")
    assert len(json.loads(run(capsys, *argv)[1])) == 2


def test_a_prompt_beyond_the_trained_context_is_warned_of(capsys, checkpoint):
    argv = ("--model", checkpoint, "--prompt", "hello", "--max-new-tokens", "200", "--json")
    code, _, err = run(capsys, *argv)
    assert code == 0 and "warning: prompt 1 and its new tokens come to 201 tokens" in err and "trained on 128" in err


def test_the_formats_of_the_cache_are_what_the_flag_says(capsys, checkpoint):
    sizes = {}
    for form in ("float32", "bfloat16"):
        argv = ("--model", checkpoint, "--prompt", "hello", "--max-new-tokens", "2", "--json", "--kv-cache-dtype", form)
        sizes[form] = json.loads(run(capsys, *argv)[1])["cache"]["bytes_total"]
    assert 1.4 < sizes["float32"] / sizes["bfloat16"] < 2


def test_out_of_pages_is_a_result(capsys, checkpoint):
    argv = ("--model", checkpoint, "--prompt", "hello", "--max-new-tokens", "60", "--num-pages", "5", "--json")
    code, out, _ = run(capsys, *argv)
    entry = json.loads(out)
    assert code == 0 and entry["finish_reason"] == "out_of_pages" and 0 < entry["generated_tokens"] < 60
    assert "tokens: raise --num-pages]" in run(capsys, *argv[:-1])[1]
    assert "tokens: raise --num-pages]" in run(capsys, *argv[:-1], "--stream")[2]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "nosuchmodel", "--prompt", "x"], "unknown model 'nosuchmodel'"),
        (["--model", "./nothing.gguf", "--prompt", "x"], "no such model file"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--prompt", "x", "--max-new-tokens", "-5"], "--max-new-tokens is -5"),
        (["--prompt", "x", "--temperature", "-1"], "temperature -1"),
        (["--prompt", "x", "--top-p", "0"], "top_p 0"),
        (["--prompt", "x", "--top-p", "1.1"], "top_p 1.1"),
        (["--prompt", "x", "--stream", "--json"], "--stream and --json"),
        (["--prompt", "x", "--logprobs", "2"], "--logprobs are printed as JSON only: add --json"),
        (["--prompt", "x", "--stop", ""], "--stop is empty"),
        (["--prompt", "x", "--stop", "\udcff"], "--stop is no valid UTF-8"),
        (["--prompt", "x", "--prompt", "caf\udce9"], "prompt 2 is no valid UTF-8 from character 4 on"),
        (["--prompts-file="], "--prompts-file is empty"),
        (["--prompts-file", "/nonexistent.jsonl"], "cannot read --prompts-file"),
        (["--prompt", "x", "--dtype", "int7"], "dtype 'int7'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if line.startswith("kvjax: error:")]
    assert code == 2 and out == "" and len(lines) == 1 and words in lines[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--page-size", "0"], "page_size 0 is not a multiple of 8"),
        (["--page-size", "12"], "page_size 12"),
        (["--num-pages", "2"], "num_pages 2"),
        (["--kv-format", "int3"], "format 'int3'"),
        (["--logprobs", "-1", "--json"], "logprobs is -1"),
        (["--logprobs", "265", "--json"], "logprobs is 265: it must be a whole number from 0 to 264"),
        (["--seed", "-1"], "seed is -1"),
        (["--seed", "9" * 30], "seed is 999"),
        (["--max-new-tokens", "1" + "0" * 9], "bytes"),
        (["--num-pages", "1" + "0" * 9], "bytes"),
        (["--page-size", "1" + "0" * 9], "bytes"),
        (["--prompt", "hello " * 200, "--num-pages", "20"], "longer than the cache"),
    ],
)
def test_mistakes_about_the_cache_are_one_line_and_exit_code_2(capsys, monkeypatch, checkpoint, argv, words):
    monkeypatch.setattr(batch, "_memory", lambda: 10**10)
    code, _, err = run(capsys, "--model", checkpoint, "--prompt", "x", *argv)
    assert code == 2 and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is no JSON"),
        ('{"text": "x"}', 'no text under "prompt"'),
        ('{"prompt": 3}', 'no text under "prompt"'),
        ('{"prompt": "x", "tokens": 3}', "unknown key 'tokens'"),
        ('{"prompt": "x", "max_new_tokens": 0}', "line 1: max_new_tokens is 0"),
        ('{"prompt": "x", "max_new_tokens": 1' + "0" * 30 + "}", "line 1: max_new_tokens is 1000"),
        ('{"prompt": "x", "max_new_tokens": 1' + "0" * 5000 + "}", "line 1 is no JSON"),
        ('{"prompt": "\\ud800"}', "prompt 1 is no valid UTF-8"),
        ("[" * 100_000, "line 1 is nested too deeply"),
        ('{"prompt": ""}', "prompt 1 is empty"),
        ("", "holds no prompt"),
    ],
)
def test_bad_lines_of_a_prompts_file_are_named(capsys, tmp_path, line, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    code, _, err = run(capsys, "--prompts-file", str(file))
    assert code == 2 and words in err


def test_damaged_files_are_refused(capsys, checkpoint, tmp_path):
    whole = Path(checkpoint).read_bytes()
    for name, data in {"cut.gguf": whole[: len(whole) // 2], "noise.gguf": b"GGUF" + bytes(range(200))}.items():
        (tmp_path / name).write_bytes(data)
        code, _, err = run(capsys, "--model", str(tmp_path / name), "--prompt", "x")
        assert code == 2 and "Traceback" not in err and name in err


def test_help_names_the_folder_of_the_cache(capsys):
    with pytest.raises(SystemExit) as end:
        generate.parser().parse_args(["--help"])
    assert end.value.code == 0 and "KVJAX_CACHE" in capsys.readouterr().out
