"""`gapless run` against a fake engine."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from gapless.base.errors import CheckpointError
from gapless.base.params import SamplingParams
from gapless.cli.main import main


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_is_answered_as_text(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "two", "words", "--max-tokens", "5", "--temp", "0", "--seed", "7", "--depth", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "you said two words\n"
    assert "gapless: 1 answer, 1 tokens in, 4 out, " in err and "tokens/s" in err
    asked = [{"role": "user", "content": "two words"}]
    assert fake.calls == [("chat", [asked], SamplingParams(max_tokens=5, temperature=0.0, seed=7, top_p=0.75))]
    assert fake.engines == [{"seed": 7, "depth": "2"}]
    assert fake.closed == 1 and fake.bars == [False]


def test_raw_skips_the_template(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--raw", "--stop", "a", "--stop", "b", "Once"]) == 0
    assert capsys.readouterr().out == "raw Once\n"
    assert fake.calls == [("generate", ["Once"], SamplingParams(max_tokens=None, stop=["a", "b"], top_p=0.75))]


def test_a_file_of_lines_gives_json_lines(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    assert main(["run", "--file", str(path)]) == 0
    found = rows(capsys.readouterr().out)
    assert [(r["prompt"], r["text"], r["finish_reason"]) for r in found] == [
        ("one", "you said one", "stop"),
        ("two", "you said two", "stop"),
    ]
    assert found[0]["completion_tokens"] == 3 and found[0]["prompt_tokens"] == 1


def test_json_lines_keep_their_other_keys(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    "line, message",
    [
        ("{", "p.jsonl:2: not JSON"),
        ("[]", "p.jsonl:2: expected an object, got list"),
        ("{}", 'p.jsonl:2: expected {"prompt": ...} or {"messages": [...]}'),
        ('{"prompt": "a", "messages": []}', "p.jsonl:2: expected"),
        ('{"prompt": 3}', "p.jsonl:2: prompt must be text"),
        ('{"messages": ["a"]}', "p.jsonl:2: messages must be a list"),
        ('{"messages": []}', "p.jsonl:2: messages must be a list"),
    ],
)
def test_wrong_lines_are_named(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n' + line, encoding="utf-8")
    assert main(["run", "--file", str(path)]) == 2
    assert message in capsys.readouterr().err
    assert fake.engines == []


def test_standard_input_is_one_prompt(
    fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_wrong_use_is_one_line_and_exit_code_2(
    fake: Any, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("gapless: error: ") and err.count("\n") == 1
    assert fake.engines == []


def test_raw_takes_no_messages(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}', encoding="utf-8")
    assert main(["run", "--raw", "--file", str(path)]) == 2
    assert "leave out --raw" in capsys.readouterr().err


def test_an_empty_file_is_named(fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n \n", encoding="utf-8")
    assert main(["run", "--file", str(path)]) == 2
    assert f"{path} holds no prompt" in capsys.readouterr().err


def test_runtime_errors_are_one_line_and_exit_code_1(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.error = CheckpointError("m/config.json:\n no such file")
    assert main(["run", "a", "-m", "m"]) == 1
    assert capsys.readouterr().err == "gapless: error: m/config.json: no such file\n"


def test_a_failed_answer_shows_in_the_exit_code(fake: Any) -> None:
    fake.finish = "error"
    assert main(["run", "a"]) == 1


def test_an_interrupted_run_exits_without_a_word(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake.error = KeyboardInterrupt()
    assert main(["run", "a"]) == 130
    assert capsys.readouterr().err == ""


def test_our_own_bugs_are_not_hidden(fake: Any) -> None:
    fake.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(["run", "a"])


def test_the_timeline_of_a_run_is_written(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gapless
    from gapless.engine.trace import Recording, StepTable
    from gapless.lab.trace import read

    empty = Recording(StepTable.of(), [])
    monkeypatch.setattr(gapless.LLM, "recording", lambda self: empty, raising=False)
    path = tmp_path / "t.jsonl"
    assert main(["run", "x", "--trace", str(path)]) == 0
    found = read(path)
    assert (len(found.steps), found.requests) == (0, [])
