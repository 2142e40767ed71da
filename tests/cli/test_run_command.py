"""`gapless run` against a fake engine."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from gapless.base.params import SamplingParams
from gapless.cli.main import main


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_is_answered_as_text(fake, capsys):
    assert main(["run", "two", "words", "--max-tokens", "5", "--temp", "0", "--seed", "7", "--depth", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "you said two words\n"
    assert "gapless: 1 answer, 1 tokens in, 4 out, " in err and "tokens/s" in err
    asked = [{"role": "user", "content": "two words"}]
    assert fake.calls == [("chat", [asked], SamplingParams(max_tokens=5, temperature=0.0, seed=7, top_p=0.75))]
    assert fake.engines == [{"seed": 7, "depth": "2"}]
    assert fake.closed == 1 and fake.bars == [False]


def test_raw_skips_the_template(fake, capsys):
    assert main(["run", "--raw", "--stop", "a", "--stop", "b", "Once"]) == 0
    assert capsys.readouterr().out == "raw Once\n"
    assert fake.calls == [("generate", ["Once"], SamplingParams(max_tokens=None, stop=["a", "b"], top_p=0.75))]


def test_a_file_of_lines_gives_json_lines(fake, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    assert main(["run", "--file", str(path)]) == 0
    found = rows(capsys.readouterr().out)
    assert [(r["prompt"], r["text"], r["finish_reason"]) for r in found] == [
        ("one", "you said one", "stop"),
        ("two", "you said two", "stop"),
    ]
    assert found[0]["completion_tokens"] == 3 and found[0]["prompt_tokens"] == 1


def test_json_lines_keep_their_other_keys(fake, tmp_path, capsys):
    path, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]
    path.write_text(json.dumps({"prompt": "p", "answer": 4}) + "\n" + json.dumps({"messages": chat}), encoding="utf-8")
    assert main(["run", "-f", str(path), "-o", str(out)]) == 0
    assert capsys.readouterr().out == ""
    first, second = rows(out.read_text(encoding="utf-8"))
    assert (first["prompt"], first["answer"], first["text"]) == ("p", 4, "you said p")
    assert (second["messages"], second["text"]) == (chat, "you said ü")
    assert fake.calls[0][1] == [[{"role": "user", "content": "p"}], chat]


@pytest.mark.parametrize(
    "text, message",
    [
        ("\n \n", "p.jsonl holds no line"),
        ('{"prompt": "good"}\n{', "p.jsonl:2: not JSON"),
        ("[]", "p.jsonl:1: expected an object, got list"),
        ("{}", 'p.jsonl:1: expected {"prompt": ...} or {"messages": [...]}'),
        ('{"prompt": "a", "messages": []}', "p.jsonl:1: expected"),
        ('{"prompt": 3}', "p.jsonl:1: prompt must be text"),
        ('{"messages": ["a"]}', "p.jsonl:1: messages must be a list"),
        ('{"messages": []}', "p.jsonl:1: messages must be a list"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "leave out --raw"),
    ],
)
def test_a_wrong_file_is_refused(fake, tmp_path, capsys, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    assert main(["run", "--file", str(path), *["--raw"] * ("--raw" in message)]) == 2
    assert message in capsys.readouterr().err
    assert fake.engines == []


def test_standard_input_is_one_prompt(fake, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("first\nsecond\n"))
    assert main(["run"]) == 0
    assert capsys.readouterr().out == "you said first\nsecond\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        (["run", "a", "--file", "b"], "give a prompt or --file, not both"),
        (["run", "--file", "/nowhere/x"], "cannot read /nowhere/x"),
        (["run", "a", "--temperature", "-1"], "temperature must be a number from 0 to 100"),
        (["run", "a", "--depth", "0"], "depth must be auto or a whole number"),
        (["run", "a", "--dept", "1"], "unknown flag --dept; did you mean --depth?"),
        (["run", "a", "-o", "/nowhere/x"], "cannot write --output /nowhere/x"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(fake, capsys, argv, message):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("gapless: error: ") and err.count("\n") == 1
    assert fake.engines == []


def test_an_empty_file_is_named(fake, tmp_path, capsys):
    path = tmp_path / "p.txt"
    path.write_text("\n \n", encoding="utf-8")
    assert main(["run", "--file", str(path)]) == 2
    assert f"{path} holds no prompt" in capsys.readouterr().err


def test_a_failed_answer_shows_in_the_exit_code(fake):
    fake.finish = "error"
    assert main(["run", "a"]) == 1


def test_the_timeline_of_a_run_is_written(fake, tmp_path, monkeypatch):
    import gapless
    from gapless.engine.trace import Recording, StepTable
    from gapless.lab.trace import read

    empty = Recording(StepTable.of(), [])
    monkeypatch.setattr(gapless.LLM, "recording", lambda self: empty, raising=False)
    path = tmp_path / "t.jsonl"
    assert main(["run", "x", "--trace", str(path)]) == 0
    found = read(path)
    assert (len(found.steps), found.requests) == (0, [])
