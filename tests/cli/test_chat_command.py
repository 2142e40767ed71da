"""`gapless chat` and `gapless complete`, against a fake engine and against a small HTTP server."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from lab.scripted import HEAD, Model, Request, chunk, event, respond, serving

from gapless.base.errors import CheckpointError
from gapless.base.params import SamplingParams
from gapless.cli.main import main


class Server(Model):
    """Says what it was asked; `mode` makes it misbehave."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = ""
        self.interrupts = False
        self.gone = threading.Event()
        self.routes["/v1/models"] = (200, {"data": [{"id": "served"}]})

    @property
    def seen(self) -> list[tuple[str, str | None, dict[str, Any]]]:
        return [(request.path, request.headers.get("authorization"), request.body) for request in self.asked]

    def __call__(self, request: Request) -> Any:
        if request.path == "/v1/models":
            return super().__call__(request)
        self.requests.append(request)
        return self.stream(request)

    def stream(self, request: Request) -> Iterator[tuple[float, bytes | None]]:
        body, mode = request.body, self.mode
        asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if mode == "refuse" or asked == "refuse me":
            yield 0.0, respond({"error": {"message": "wrong key", "type": "auth", "code": None}}, 401)
        elif mode == "html":
            yield 0.0, respond(b"<h1>Bad gateway</h1>", 502)
        else:
            yield 0.0, HEAD
            yield from self.broken(mode) if mode in ("cut chunks", "forever", "silent") else ()
            words = [f"{word} " for word in ("you", "said")] + [asked]
            yield from ((0.0, event({"choices": [said(word, body)]})) for word in words if mode != "no JSON")
            yield from ((0.0, part) for part in ENDS.get(mode, ENDS[""]))
            yield 0.0, b"0\r\n\r\n"

    def broken(self, mode: str) -> Iterator[tuple[float, bytes | None]]:
        """Sends no whole answer."""
        if mode == "cut chunks":
            yield 0.0, b'13\r\ndata: {"choices": [\r\n'
            yield 0.0, None
        while mode == "silent":
            yield 60.0, b""
        try:
            while True:
                yield 0.0, event({"choices": [{"delta": {"content": "x"}}]})
                if self.interrupts:
                    self.interrupts = False
                    os.kill(os.getpid(), signal.SIGINT)
        finally:
            self.gone.set()


def said(text: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"delta": {"content": text}} if "messages" in body else {"text": text}


ENDS: dict[str, list[bytes]] = {
    "": [
        chunk(b": keep-alive\n\n"),
        event({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
        event({"choices": [], "usage": {"completion_tokens": 3}}),
        chunk(b"data: [DONE]\r\n\r\n"),
    ],
    "error": [event({"error": {"message": "engine died", "code": 500}})],
    "cut": [],
    "no JSON": [event(b"{")],
}


@pytest.fixture
def server() -> Iterator[Server]:
    model = Server()
    with serving(model) as model.url:
        yield model


def test_one_question_in_process_is_answered(fake, capsys):
    argv = ["chat", "some/model", "-q", "hi there", "--system", "be brief", "--max-tokens", "9", "--stats"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert out == "you said hi there\n"
    assert err.startswith("first token after ") and "4 tokens in" in err and "tokens/s" in err
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi there"}]
    assert fake.calls == [("stream", {"messages": messages}, SamplingParams(max_tokens=9, top_p=0.75))]
    assert fake.engines == [{"model": "some/model"}] and fake.closed == 1


def test_a_conversation_is_remembered(fake, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == "you said one\nyou said two\n"
    assert [(m["role"], m["content"]) for m in fake.calls[1][1]["messages"]] == [
        ("user", "one"),
        ("assistant", "you said one"),
        ("user", "two"),
    ]


@pytest.mark.parametrize("words", [["-q", "it goes"], ["it", "goes"]])
def test_complete_without_a_url_runs_in_this_process(fake, capsys, words):
    assert main(["complete", *words, "--top-k", "4"]) == 0
    assert capsys.readouterr().out == "and so it goes\n"
    assert fake.calls == [("stream", "it goes", SamplingParams(max_tokens=128, top_k=4, top_p=0.75))]
    assert main(["complete", "it", "-q", "goes"]) == 2
    assert "give a text or -q, not both" in capsys.readouterr().err


def test_a_question_in_the_place_of_a_model_is_told_where_it_goes(capsys):
    assert main(["chat", "Who are you?"]) == 2
    assert "'Who are you?' is no model; ask one with -q: gapless chat -q 'Who are you?'" in capsys.readouterr().err


def test_a_bare_word_that_is_a_url_names_the_server(server, capsys):
    assert main(["chat", server.url, "-q", "x"]) == 0
    assert capsys.readouterr().out == "you said x\n"
    assert main(["chat", server.url, "--url", "http://other:1", "-q", "x"]) == 2
    assert f"two servers are named: {server.url} and http://other:1" in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_closed(fake, capsys):
    fake.start_error = CheckpointError("m: no config.json")
    assert main(["chat", "-m", "m", "-q", "x"]) == 1
    assert capsys.readouterr().err == "gapless: error: m: no config.json\n" and fake.closed == 1


def test_wrong_sampling_is_told_before_the_engine_starts(fake, capsys):
    assert main(["chat", "-q", "x", "--top-p", "2"]) == 2
    assert "top_p must be a number above 0 and at most 1" in capsys.readouterr().err and fake.engines == []


class Interrupted(io.StringIO):
    """Ctrl-C comes while the first bit of an answer is shown."""

    def write(self, text: str) -> int:
        raise KeyboardInterrupt


def test_interruption_gives_the_answer_up(fake, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", Interrupted())
    assert main(["chat", "-q", "x"]) == 130
    assert capsys.readouterr().err == ""
    assert (fake.given_up, fake.closed) == (1, 1)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_chat_with_a_server_prints_its_answer(server, capsys, suffix):
    words = ["--api-key", "k", "-q", "héllo", "--stats", "--seed", "3", "--stop", "z"]
    assert main(["chat", "--url", server.url + suffix, *words]) == 0
    out, err = capsys.readouterr()
    assert out == "you said héllo\n" and "3 tokens in" in err
    ((path, key, body),) = server.seen
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body == {
        "model": "served",
        "messages": [{"role": "user", "content": "héllo"}],
        "seed": 3,
        "stop": ["z"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_complete_with_a_server_prints_its_answer(server, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    assert main(["complete", "-m", "named", "--base-url", server.url.removeprefix("http://"), "p", "-n", "4"]) == 0
    assert capsys.readouterr().out == "you said p\n"
    ((path, key, body),) = server.seen
    assert (path, key, body["model"], body["max_tokens"]) == ("/v1/completions", "Bearer from-env", "named", 4)


@pytest.mark.parametrize(
    "mode, message",
    [
        ("refuse", "answered 401: wrong key; give the server's key with --api-key"),
        ("html", "answered 502: <h1>Bad gateway</h1>; is that an OpenAI-compatible server?"),
        ("error", "the server stopped answering: engine died"),
        ("cut", "the server's answer broke off before its end"),
        ("cut chunks", ": the connection broke off"),
        ("no JSON", "an event is no JSON object: b'{'"),
        ("silent", "nothing came for 0.2 s"),
    ],
)
def test_a_server_that_fails(server, monkeypatch, capsys, mode, message):
    server.mode = mode
    monkeypatch.setattr("gapless.lab.probe.SILENT_SECONDS", 0.2)
    assert main(["chat", "--url", server.url, "-q", "x"]) == 1
    err = capsys.readouterr().err
    assert message in err and err.startswith("gapless: error: ") and err.count("\n") == 1


def test_leaving_in_mid_stream_hangs_up(server, monkeypatch):
    server.mode = "forever"
    monkeypatch.setattr("sys.stdout", Interrupted())
    assert main(["chat", "--url", server.url, "-q", "x"]) == 130
    assert server.gone.wait(30)


def test_a_server_that_closes_kept_connections_still_gets_every_question(server, monkeypatch, capsys):
    answer = server.stream
    # Without a word in the headers.
    monkeypatch.setattr(server, "stream", lambda request: chain(answer(request), [(0.0, None)]))
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", "--url", server.url]) == 0
    assert capsys.readouterr().out == "you said one\nyou said two\n"


class Keyboard(io.StringIO):
    """Types as a user would."""

    def isatty(self) -> bool:
        return True


def test_at_a_keyboard_a_refused_question_is_told_and_forgotten(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", Keyboard("one\nrefuse me\ntwo\n"))
    assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert "you said one" in out and "you said two" in out
    assert err.startswith("gapless: error: ") and "answered 401: wrong key" in err and err.count("\n") == 1
    assert [m["content"] for m in server.seen[-1][2]["messages"]] == ["one", "you said one", "two"]


def test_at_a_keyboard_commands_change_the_conversation(server, monkeypatch, capsys):
    lines = [
        *("/help", "/temperature 0.5", "/stop a,b", "one", "/clear", "/max-tokens 7", "/temperature", "two"),
        *("/system be kind", "three", "/top-p 2", "/temprature 1", " /etc", "/exit", "four"),
    ]
    monkeypatch.setattr("sys.stdin", Keyboard("\n".join(lines)))
    assert main(["chat", "--url", server.url, "--system", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("/help lists commands; ") and "/top-k, /max-tokens" in out and "four" not in out
    assert err.splitlines() == [
        "gapless: error: top_p must be a number above 0 and at most 1, got 2.0",
        "gapless: error: unknown command /temprature; did you mean /temperature?",
    ]
    bodies = [body for _, _, body in server.seen]
    assert [[m["content"] for m in body["messages"]] for body in bodies] == [
        ["be brief", "one"], ["be brief", "two"], ["be kind", "three"], ["be kind", "three", "you said three", " /etc"],
    ]  # fmt: skip
    assert [(body.get("temperature"), body.get("max_tokens")) for body in bodies] == [(0.5, None), *[(None, 7)] * 3]
    assert {tuple(body["stop"]) for body in bodies} == {("a", "b")}


def test_at_a_keyboard_ctrl_c_without_an_answer_says_how_to_leave(fake, monkeypatch, capsys):
    class Impatient(Keyboard):
        def readline(self, size: int = -1) -> str:
            line = super().readline(size)
            if line == "^C\n":
                raise KeyboardInterrupt
            return line

    for command, said in (("chat", "you said two"), ("complete", "and so two")):
        monkeypatch.setattr("sys.stdin", Impatient("^C\ntwo\n"))
        assert main([command]) == 0
        out = capsys.readouterr().out
        assert f"> \nCtrl-D leaves\n> {said}\n> \n" in out and out.endswith("> \n")


def test_at_a_keyboard_ctrl_c_ends_an_answer_and_not_the_conversation(fake, monkeypatch):
    interrupts = iter([True])

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            if text == "you" and next(interrupts, False):
                raise KeyboardInterrupt
            return super().write(text)

    terminal = Terminal()
    monkeypatch.setattr("sys.stdin", Keyboard("one\ntwo\n"))
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["chat"]) == 0
    assert "you said two" in terminal.getvalue() and "you said one" not in terminal.getvalue()
    assert fake.given_up == 1
    assert [m["content"] for m in fake.calls[-1][1]["messages"]] == ["two"]


def test_at_a_keyboard_ctrl_c_hangs_up_before_the_next_question(server, monkeypatch, capsys):
    class Typing(Keyboard):
        def readline(self, size: int = -1) -> str:
            line = super().readline(size)
            if line == "two\n":
                assert server.gone.wait(30)
                server.mode = ""
            return line

    server.mode, server.interrupts = "forever", True
    monkeypatch.setattr("sys.stdin", Typing("one\ntwo\n"))
    assert main(["chat", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert "\n> you said two\n" in out and err == ""
    assert [m["content"] for m in server.seen[-1][2]["messages"]] == ["two"]


def test_a_pipe_is_not_a_keyboard(server, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("refuse me\ntwo\n"))
    assert main(["chat", "--url", server.url]) == 1
    assert "you said two" not in capsys.readouterr().out


def test_chat_without_a_server_there_exits_with_1(capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        # Bound, not listening: nothing answers, and no other process can take the port meanwhile.
        assert main(["chat", "--url", f"http://127.0.0.1:{port}", "-q", "x"]) == 1
    assert "is a server running there? (gapless serve)" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:port", "http://h:99999"])
def test_chat_with_a_wrong_url_is_refused(capsys, url):
    assert main(["chat", "--url", url, "-q", "x"]) == 2
    assert "a server's URL must look like http://localhost:8000" in capsys.readouterr().err


def test_engine_flags_do_not_reach_a_server(server, monkeypatch, capsys):
    assert main(["chat", "--url", server.url, "-q", "x", "--max-num-seqs", "3"]) == 2
    assert "--max-num-seqs is a matter of the server" in capsys.readouterr().err
    monkeypatch.setenv("GAPLESS_DEPTH", "2")
    assert main(["chat", "--url", server.url, "-q", "x"]) == 0
