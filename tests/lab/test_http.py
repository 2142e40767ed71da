"""Framing and time stamps of the measuring client, byte by byte."""

from __future__ import annotations

import asyncio

import pytest
from lab.scripted import HEAD, Model, Network, chunk, event, play, respond

from gapless.base.errors import ConfigError
from gapless.base.http import HttpError, parse_head
from gapless.lab.http import Client
from gapless.lab.reply import read_reply, server_events
from gapless.lab.target import Target

TARGET = Target("http://there:1", "m")


def ask(parts, **options):
    """The answer to one request whose server sends `parts`."""

    async def main():
        async with Client(Target("http://there:1", "m", **options), Network(lambda request: parts)) as client:
            return await client.send(TARGET.request("GET", "/"))

    return play(main())


def test_chunks_come_out_whole_wherever_the_stream_is_cut():
    body = b"hello" + b"x" * 300 + b"\r\n0\r\n\r\n"  # what looks like an end inside a chunk is none
    wire = (
        chunk(b"hello")
        + b"12C;name=value\r\n"
        + b"x" * 300
        + b"\r\n"
        + chunk(b"\r\n0\r\n\r\n")
        + b"0\r\nTrailer: 1\r\n\r\n"
    )
    for cut in range(1, len(wire)):
        answer = ask([(0.0, HEAD), (1.0, wire[:cut]), (1.0, wire[cut:])])
        assert (answer.body, answer.ended) == (body, 1002.0)


def test_pieces_keep_the_time_at_which_they_were_read():
    wire = HEAD + event({"a": 1}) + event({"b": 2}) + b"0\r\n\r\n"
    for cut in range(1, len(wire)):
        answer = ask([(1.0, wire[:cut]), (2.0, wire[cut:])])
        assert (answer.status, answer.ended) == (200, 1003.0)
        times = {data: at for at, data in server_events(answer.pieces)}
        first_whole = len(HEAD + event({"a": 1}))
        assert times == {b'{"a": 1}': 1001.0 if cut >= first_whole else 1003.0, b'{"b": 2}': times[b'{"b": 2}']}


def test_an_answer_may_end_with_its_connection():
    answer = ask([(0.0, b"HTTP/1.1 200 OK\r\n\r\nsome"), (1.0, b" text"), (1.0, None)])
    assert (answer.body, answer.ended) == (b"some text", 1002.0)


def test_an_interim_answer_is_skipped():
    answer = ask([(0.0, b"HTTP/1.1 100 Continue\r\n\r\n" + respond({"x": 1}))])
    assert answer.status == 200 and answer.body == b'{"x": 1}'


@pytest.mark.parametrize(
    "parts, message",
    [
        *(
            ([(0.0, HEAD), (0.0, wire)], r"chunk|bytes")
            for wire in (b"zz\r\n", b"-5\r\n", b"5\r\nhelloXX", b"FFFFFFFFFF\r\n", b"1" * 70000)
        ),
        ([(0.0, b"SSH-2.0-OpenSSH\r\n\r\n")], "does not speak HTTP"),
        ([(0.0, b"HTTP/1.1 200 OK\r\nContent-Length: 9x\r\n\r\n")], "Content-Length"),
        ([(0.0, b"x" * (70 << 10))], "bytes"),
        ([(0.0, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfour"), (0.0, None)], "broke off"),
    ],
)
def test_an_answer_that_is_no_http_is_refused(parts, message):
    with pytest.raises(HttpError, match=message):
        ask(parts)


def test_a_body_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr("gapless.base.http.MAX_BODY", 20)
    for parts in ([(0.0, respond(b"x" * 21))], [(0.0, HEAD), (0.0, chunk(b"x" * 11)), (0.0, chunk(b"x" * 11))]):
        with pytest.raises(HttpError, match=r"a part of 2[12] bytes"):
            ask(parts)


def test_a_connection_is_given_up_when_its_server_says_close():
    async def main():
        closing = [(0.0, b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx")]
        network = Network(lambda request: closing)
        async with Client(TARGET, network) as client:
            for _ in range(3):
                assert (await client.send(TARGET.request("GET", "/"))).body == b"x"
        return network.opened

    assert play(main()) == 3


def test_a_body_without_bytes_is_done_at_once():
    for head in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"):
        answer = ask([(0.0, head), (5.0, b"")])
        assert (answer.body, answer.ended) == (b"", 1000.0)
    assert parse_head(b"HTTP/1.1 200 OK\r\nX-Y:  z ") == (200, [(b"x-y", b"z")])


def test_a_refused_connection_names_the_server():
    async def refuse(factory):
        raise OSError(111, "Connection refused")

    async def main():
        async with Client(TARGET, refuse) as client:
            await client.send(b"")

    with pytest.raises(HttpError, match=r"http://there:1: cannot connect: .*; is a server running there"):
        play(main())


@pytest.mark.parametrize(
    "url, host, port, tls, prefix",
    [
        ("http://localhost:8000", "localhost", 8000, False, ""),
        ("localhost:8000/v1/", "localhost", 8000, False, ""),
        ("https://api.example.com/openai/v1", "api.example.com", 443, True, "/openai"),
        ("http://[::1]:9", "::1", 9, False, ""),
    ],
)
def test_a_url_gives_its_address(url, host, port, tls, prefix):
    assert Target(url).address() == (host, port, tls, prefix)


@pytest.mark.parametrize(
    "fields",
    [
        *({"base_url": url} for url in ("ftp://x", "http://x:99999", "")),
        {"backend": "x"},
        *({"headers": (header,)} for header in (("a\r\nb", "c"), ("a", "c\nd"), ("", "c"))),
    ],
)
def test_targets_that_cannot_be(fields):
    with pytest.raises(ConfigError):
        Target(**fields)


def test_requests_hold_what_was_asked():
    target = Target(
        "http://h:1", "m", api_key="secret", headers=(("X-A", "b"),), extra_body={"seed": 5, "temperature": 0.5}
    )
    head, _, body = target.generation((1, 2), 7).partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b"Authorization: Bearer secret" in head and b"X-A: b" in head and b"Content-Length: %d" % len(body) in head
    assert b'"prompt": [1, 2]' in body and b'"ignore_eos": true' in body and b'"temperature": 0.5' in body
    assert b'"include_usage": true' in body and b"continuous" not in body
    assert "secret" not in repr(target)


def test_a_timeout_closes_the_connection():
    model = Model(ttft=100.0)

    async def main():
        network = Network(model)
        async with Client(Target("http://there:1", "m", timeout=1.0), network) as client:
            for _ in range(2):
                with pytest.raises(HttpError, match="no whole answer in 1 s"):
                    await client.send(client.target.generation("x", 3))
                assert network.transports[-1].is_closing()  # the server need not go on for no client
            assert asyncio.get_running_loop().time() == 1002.0
        return network.opened

    assert play(main()) == 2


def test_a_timeout_after_a_lost_kept_connection_closes_the_new_one():
    """The second request meets a connection that its server has closed, and is sent again over a new one."""
    scripts = iter([[(0.0, respond({}))], [(0.0, None)], [(100.0, respond({}))]])

    async def main():
        network = Network(lambda request: next(scripts))
        async with Client(Target("http://there:1", "m", timeout=1.0), network) as client:
            await client.send(TARGET.request("GET", "/"))
            with pytest.raises(HttpError, match="no whole answer in 1 s"):
                await client.send(TARGET.request("GET", "/"))
            return network.opened, network.transports[-1].is_closing()

    assert play(main()) == (2, True)


def test_pieces_of_an_answer_can_be_had_as_they_are_read():
    seen = []

    async def main(status):
        parts = [(0.0, HEAD.replace(b"200", status)), (1.0, event({"a": 1})), (1.0, event({"b": 2}) + b"0\r\n\r\n")]
        async with Client(TARGET, Network(lambda request: parts)) as client:
            answer = await client.send(TARGET.request("GET", "/"), seen.append)
        return answer.pieces

    assert play(main(b"200")) == tuple(seen) and [piece.at for piece in seen] == [1001.0, 1002.0]
    seen.clear()
    assert len(play(main(b"500"))) == 2 and seen == []


def test_an_answer_without_a_request_ends_the_connection():
    async def main():
        parts = [(0.0, respond({})), (1.0, b"more")]
        network = Network(lambda request: parts)
        async with Client(TARGET, network) as client:
            await client.send(TARGET.request("GET", "/"))
            await asyncio.sleep(5)
            await client.send(TARGET.request("GET", "/"))
        return network.opened

    assert play(main()) == 2


def reply_of(events, *, usage=None, status=200):
    parts = [(0.0, HEAD)] + [(1.0, event(e)) for e in events]
    parts += [(0.0, event({"choices": [], "usage": usage}))] if usage else []
    return read_reply(ask([*parts, (0.0, event(b"[DONE]") + b"0\r\n\r\n")]))


def text(value, finish=None, **more):
    return {"choices": [{"text": value, "finish_reason": finish, **more}]}


def test_a_reply_of_completions_has_its_events():
    reply = reply_of(
        [text("a"), text(""), text("b"), text("", "length")], usage={"prompt_tokens": 3, "completion_tokens": 9}
    )
    # A token without text of its own is an event; the end of the stream is not, but it is the end.
    assert reply.events == (1001.0, 1002.0, 1003.0) and reply.ended == 1004.0
    assert (reply.text, reply.prompt_tokens, reply.output_tokens, reply.counted) == ("ab", 3, 9, False)
    assert (reply.finish, reply.error) == ("length", "")


def test_replies_of_chat_begin_with_a_role_that_is_no_token():
    events = [{"choices": [{"delta": delta}]} for delta in ({"role": "assistant", "content": ""}, {"content": "a"})]
    events += [{"choices": [{"delta": {"reasoning_content": "b"}}]}]
    events += [{"choices": [{"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}}]}]
    events += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    reply = reply_of(events)
    assert reply.events == (1002.0, 1003.0, 1004.0) and reply.text == "abf{"
    assert reply.counted and reply.output_tokens == 3


def test_token_ids_are_joined_over_all_events():
    assert reply_of([text("ab", token_ids=[1, 2]), text("", "stop", token_ids=[3])]).token_ids == (1, 2, 3)
    one = reply_of([text("", "stop")], usage={"prompt_tokens": 1, "completion_tokens": 1})
    assert one.events == (1001.0,) and not one.error


@pytest.mark.parametrize(
    "events, message",
    [
        ([text("a")], "the stream broke off: no finish_reason"),
        ([], "the stream holds no output"),
        ([text("a"), {"error": {"message": "out of pages"}}], "the server stopped answering: out of pages"),
        ([b"{"], "an event is no JSON object"),
        ([b"[1]"], "an event is no JSON object"),
    ],
)
def test_a_reply_that_failed_has_its_reason(events, message):
    assert reply_of(events).error.startswith(message)


def test_comments_and_carriage_returns():
    wire = HEAD + chunk(b": ping\r\n\r\ndata:1\r\ndata: 2\r\n\r\nevent: x\n\n") + b"0\r\n\r\n"
    assert [data for _, data in server_events(ask([(0.0, wire)]).pieces)] == [b"1\n2"]


def test_an_error_body_is_part_of_the_reason():
    assert read_reply(ask([(0.0, respond({"detail": "nope"}, 404))])).error == "HTTP 404: {'detail': 'nope'}"
    assert read_reply(ask([(0.0, respond(b"<html>", 502))])).error == "HTTP 502: <html>"
