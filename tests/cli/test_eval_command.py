"""`gapless eval`: questions to a server over a socket, to an engine in this process, and two results compared."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.scripted import HEAD, Model, Request, event, serving

import gapless
from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.cli.main import main


class Adds(Model):
    """Adds two numbers, and is wrong about 3 + 3."""

    def stream(self, request: Request) -> Any:
        body = request.body
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"].removesuffix("\nAnswer:")
        text = answer(text.rpartition("Question: ")[2])
        said: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
        yield 0.0, HEAD
        yield 0.0, event({"choices": [{**said, "finish_reason": "stop"}]})
        yield 0.0, event(b"[DONE]") + b"0\r\n\r\n"


def answer(text: str) -> str:
    if "+" not in text:
        return "hm"
    a, b = map(int, text.split("+"))
    return f"{a} + {b} makes {a + b if a != 3 else 7}"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GAPLESS_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def adds() -> Adds:
    return Adds()


@pytest.fixture(scope="module")
def url(adds: Adds) -> Iterator[str]:
    with serving(adds) as url:
        yield url


@pytest.fixture
def sums(tmp_path: Path) -> str:
    rows = [{"question": f"{n} + {n}", "answer": f"#### {2 * n}", "category": "ab"[n % 2]} for n in range(1, 7)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_server_is_asked_and_the_result_kept(url, sums, tmp_path, capsys):
    path = tmp_path / "a.json"
    assert main(["eval", url, "--data", sums, "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"m at {url}, completions, 0 shots" in out
    assert [line.split()[:3] for line in out.splitlines() if line[:2] in ("a ", "b ", "al")] == [
        ["a", "3", "100.00%"],
        ["b", "3", "66.67%"],
        ["all", "6", "83.33%"],
    ]
    written = json.loads(path.read_text())
    assert written["results"]["accuracy"] == pytest.approx(5 / 6) and written["results"]["strict"]["correct"] == 0
    assert written["target"] == {"server": url, "model": "m", "not_sent": []}
    assert [row["extracted"] for row in written["questions"]] == ["2", "4", "7", "8", "10", "12"]


def test_examples_are_part_of_the_prompt_or_conversation(url, adds, sums):
    del adds.requests[:]
    assert main(["eval", "--url", url, "--data", sums, "--shots", "2"]) == 0
    first = adds.asked[1].body["prompt"]
    assert first == "Question: 1 + 1\nAnswer: #### 2\n\nQuestion: 2 + 2\nAnswer: #### 4\n\nQuestion: 3 + 3\nAnswer:"
    assert len(adds.asked) == 1 + 4
    del adds.requests[:]
    words = ["--backend", "openai-chat", "--shots-file", sums, "--num-fewshot", "1", "--limit", "2"]
    assert main(["eval", "--base-url", url, "--data", sums, *words, "--extra-body", '{"seed": 5}']) == 0
    one, two = (request.body for request in adds.asked[1:])
    # A question is no example for itself.
    assert [m["content"] for m in one["messages"]] == ["2 + 2", "#### 4", "1 + 1"]
    assert [m["content"] for m in two["messages"]] == ["1 + 1", "#### 2", "2 + 2"]
    assert one["seed"] == 5


def test_an_accuracy_below_the_least_exits_with_1(url, sums, capsys):
    asked = ["eval", "--base-url", url, "--data", sums]
    assert main([*asked, "--min-accuracy", "0.83"]) == 0
    assert main([*asked, "--min-accuracy", "0.84"]) == 1
    assert "is below --min-accuracy 0.84" in capsys.readouterr().err
    assert main([*asked, "--match", "strict", "--min-accuracy", "0.01"]) == 1
    assert main(["eval", "--base-url", "http://127.0.0.1:9", "--data", sums]) == 1
    assert "is a server running there" in capsys.readouterr().err


def test_ctrl_c_keeps_the_answers_that_had_come(sums, tmp_path, capsys):
    class Interrupting(Adds):
        def stream(self, request: Request) -> Any:
            if len(self.asked) == 4:
                os.kill(os.getpid(), signal.SIGINT)
                return iter([(60.0, b"")])
            return super().stream(request)

    out = tmp_path / "a.json"
    with serving(Interrupting()) as url:
        assert main(["eval", "--base-url", url, "--data", sums, "--concurrency", "1", "--out", str(out)]) == 130
    assert "gapless: interrupted: 2 of 6 questions were answered, and no others count" in capsys.readouterr().err
    written = json.loads(out.read_text())
    assert written["target"]["interrupted"] is True and [row["extracted"] for row in written["questions"]] == ["2", "4"]


def test_two_results_are_compared_by_eval(url, sums, tmp_path, capsys):
    paths = [str(tmp_path / name) for name in ("a.json", "b.json", "c.json")]
    for path, match in zip(paths[:2], ("flexible", "strict"), strict=True):
        assert main(["eval", "--base-url", url, "--data", sums, "--match", match, "--output", path]) == 0
    capsys.readouterr()
    assert main(["eval", "--compare", *paths[:2], "--output", paths[2]]) == 0
    assert "5 right in A alone, 0 right in B alone" in capsys.readouterr().out
    written = json.loads(Path(paths[2]).read_text())
    assert written["mcnemar_p"] == pytest.approx(2 / 2**5) and written["same_text"] == 6


@pytest.mark.parametrize(
    "words, written",
    [
        (["--data", "nowhere.jsonl"], "cannot read the questions nowhere.jsonl"),
        (["--match", "loose"], "must be one of flexible, strict"),
        (["--min-accuracy", "2"], "--min-accuracy must be"),
        (["--base-url", "http://h", "--depth", "8"], "--depth is a matter of the server"),
        (["--base-url", "http://h", "--extra-body", "7"], "must be a JSON object"),
        (["--extra-body", "{}"], "--extra-body goes with --base-url"),
        (["--output", "no/such/folder.json"], "there is no such folder"),
        (["--compare", "x.json", "y.json"], "cannot read x.json"),
        (["--shots", "-1"], "shots must be"),
        (["--data", "demo:x"], "the seed must be a whole number"),
    ],
)
def test_a_wrong_command_line_is_refused(words, written, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *words]) == 2
    assert written in capsys.readouterr().err


class Engine:
    """Answers as Adds does. A question about 4 does not fit."""

    opened: dict[str, Any]
    params: SamplingParams

    @classmethod
    def from_engine_args(cls, engine: dict[str, Any]) -> Engine:
        cls.opened = engine
        return cls()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return messages[-1]["content"]

    async def stream(self, prompt: str, params: SamplingParams) -> AsyncIterator[Any]:
        Engine.params = params
        if "4 +" in prompt:
            raise RequestError("too long", "prompt")
        text = answer(prompt.removeprefix("Question: ").removesuffix("\nAnswer:"))
        yield SimpleNamespace(text=text[:3], token_ids=[1], finish_reason=None)
        yield SimpleNamespace(text=text[3:], token_ids=[1, 2], finish_reason="stop")


@pytest.mark.parametrize("chat", [False, True])
def test_eval_without_a_url_runs_in_this_process(sums, tmp_path, monkeypatch, capsys, chat):
    monkeypatch.setitem(gapless.__dict__, "AsyncLLM", Engine)
    path = tmp_path / "a.json"
    words = ["--backend", "openai-chat"] if chat else []
    assert main(["eval", "--depth", "8", "--data", sums, "--output", str(path), *words]) == 0
    assert Engine.opened == {"depth": "8"}
    params = Engine.params
    assert (params.temperature, params.max_tokens, params.stop_strings) == (0.0, 512, () if chat else ("Question:",))
    written = json.loads(path.read_text())
    assert written["target"] == {"server": None, "model": "demo", "engine": {"depth": "8"}}
    assert (written["results"]["correct"], written["results"]["errors"]) == (4, 1)
    assert written["questions"][0]["output_tokens"] == 3
    assert "error: 4: too long" in capsys.readouterr().out
