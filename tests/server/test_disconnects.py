"""A client that leaves ends its request at once: streamed or not, queued or running, before and after tokens."""

import socket
from contextlib import ExitStack, contextmanager

import pytest
from server_harness import CHAT, COMPLETIONS, RESPONSES, fake_core, posted, serving


def send(server, path="/v1/completions", **fields):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(posted(path, fields))
    return connection


@contextmanager
def aborting(server, count):
    """Afterwards the core has been asked to end `count` sequences, and everything is quiet."""
    before = len(server.core.aborted)
    yield
    server.until(lambda: quiet(server))
    assert len(server.core.aborted) == before + count


def quiet(server):
    """Nothing runs, nothing waits, nothing is open anywhere."""
    stats = server.stats()
    return (
        stats.queue.running,
        stats.queue.waiting,
        server.run(lambda: server.llm.open_requests),
        server.state.open,
    ) == (0,) * 4


LONG = {"prompt": "~long", "max_tokens": 1000}


def test_fifty_clients_that_go_in_mid_stream_are_aborted(server):
    before = server.state.metrics.finished["abort"]
    with aborting(server, 50), ExitStack() as stack:
        connections = [stack.enter_context(send(server, **LONG, stream=True)) for _ in range(50)]
        for connection in connections:
            with connection.makefile("rb") as lines:
                while not lines.readline().startswith(b"data: "):
                    pass
    assert server.state.metrics.finished["abort"] == before + 50


RUNNING = [
    (COMPLETIONS, LONG, 1),
    (COMPLETIONS, {**LONG, "n": 4}, 4),
    (COMPLETIONS, {**LONG, "prompt": ["~a", "~b", "~c"]}, 3),
    (CHAT, {"messages": [{"role": "user", "content": "~"}]}, 1),
    (RESPONSES, {"input": "~"}, 1),
]


@pytest.mark.parametrize(("path", "fields", "rows"), RUNNING, ids=["one", "n", "prompts", "chat", "response"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_whose_client_goes_is_aborted(server, path, fields, rows, stream):
    with aborting(server, rows), send(server, path, **fields, stream=stream):
        server.until(lambda: server.stats().queue.running == rows)


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_whose_client_goes_is_aborted(stream):
    """Two rows only: the third request has not had a token when its client goes."""
    with serving(core=lambda: fake_core(max_num_seqs=2)) as server:
        with send(server, **LONG, n=2) as holder:
            server.until(lambda: server.stats().queue.running == 2)
            with send(server, **LONG, stream=stream):
                server.until(lambda: server.stats().queue.waiting == 1)
            server.until(lambda: server.stats().queue.waiting == 0)
            assert server.stats().queue.running == 2
            assert len(server.core.aborted) == 1
            holder.close()
        server.until(lambda: quiet(server))


@pytest.mark.parametrize(
    ("begin", "end"),
    [(b"content-length: 100\r\n\r\n{", b""), (b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"zz\r\n")],
    ids=["short", "malformed"],
)
def test_a_client_that_leaves_in_its_body_is_no_error(server, caplog, begin, end):
    """Leaving in the middle of one's own body is no fault of the server's."""
    faults = server.state.metrics.rejected["internal_error"]
    with aborting(server, 0):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n" + begin)
            server.until(lambda: server.state.open == 1)
            connection.sendall(end)
        server.until(lambda: server.state.open == 0)
    assert server.state.metrics.rejected["internal_error"] == faults
    assert "incident" not in caplog.text


def test_a_client_that_stays_is_not_disturbed(server, client):
    with aborting(server, 1), send(server, **LONG, stream=True) as leaver:
        leaver.recv(1000)
        leaver.close()
        answer = client.post("/v1/completions", json={"prompt": "~", "max_tokens": 30})
    assert len(answer.json()["choices"][0]["text"]) == 30
