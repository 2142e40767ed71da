"""ServerConfig, the logs that it asks for, and the line about throughput."""

import dataclasses
import json
import logging

import pytest
from server_harness import serving

from gapless.base.errors import ConfigError
from gapless.engine.seam import Stats
from gapless.server import logs
from gapless.server.config import ServerConfig
from gapless.server.stats_line import log_stats, stats_line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("max_body_bytes", 0),
        ("drain_seconds", -1.0),
        ("drain_seconds", float("nan")),
        ("request_timeout", 0.0),
        ("request_timeout", float("nan")),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("api_key", ("",)),
        ("served_model_name", ("a", "")),
    ],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


def test_the_defaults_are_modest():
    config = ServerConfig()
    assert (config.host, config.port, config.max_body_bytes, config.drain_seconds) == ("127.0.0.1", 8000, 2**22, 30.0)
    assert config.api_key == config.allowed_origins == ()


def test_keys_are_never_printed():
    config = ServerConfig(api_key=("s3cret",))
    assert "s3cret" not in repr(config)
    assert "port=8000" in repr(config)


def test_every_field_is_a_flag_with_help():
    for field in dataclasses.fields(ServerConfig):
        assert field.metadata["help"] and field.metadata["group"]


def test_json_lines():
    record = logging.LogRecord("gapless.server", logging.WARNING, "f", 1, 'say "%s"', ("hi",), None)
    line = json.loads(logs.JsonFormatter().format(record))
    assert (line["level"], line["logger"], line["message"]) == ("warning", "gapless.server", 'say "hi"')


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_go_to_stderr_at_the_level_asked_for(capsys, form):
    with logs.logging_to_stderr(ServerConfig(log_level="warning", log_format=form)):
        logging.getLogger("gapless.server").warning("seen")
        logging.getLogger("gapless.server").info("not seen")
    written = capsys.readouterr().err
    assert "seen" in written and "not seen" not in written
    assert not logging.getLogger().handlers or all(
        not isinstance(handler, logs.DroppingHandler) for handler in logging.getLogger().handlers
    )


def test_a_full_queue_of_lines_drops_and_counts():
    import queue

    handler = logs.DroppingHandler(queue.Queue(1))
    for number in range(3):
        handler.handle(logging.LogRecord("x", logging.INFO, "f", 1, str(number), (), None))
    assert handler.dropped == 2


def access_record(path):
    return logging.LogRecord("uvicorn.access", logging.INFO, "f", 1, "%s %s %s", ("1.2.3.4", "GET", path), None)


def test_probes_leave_no_access_line():
    assert [logs.not_a_probe(access_record(path)) for path in ("/health", "/metrics?x=1", "/v1/models")] == [
        False,
        False,
        True,
    ]


def test_requests_are_logged_on_demand_without_their_text(caplog):
    caplog.set_level(logging.INFO, "gapless.server")
    with serving(ServerConfig(port=0, enable_log_requests=True)) as server, server.client() as client:
        fields = {"prompt": "my secret words", "max_tokens": 3}
        client.post("/v1/completions", json=fields, headers={"x-request-id": "label-7"})
        assert "request label-7: 15 prompt tokens, 3 generated" in caplog.text
    assert "secret" not in caplog.text


def test_unknown_fields_are_warned_about_once(client, caplog):
    for _ in range(3):
        client.post("/v1/completions", json={"prompt": "x", "a_field_nobody_knows": 1})
    assert caplog.text.count("a_field_nobody_knows") == 1


def test_the_line_about_throughput():
    before = Stats(prompt_tokens=100, generation_tokens=50, prefix_queries=100, prefix_hits=0)
    now = Stats(
        *(3, 2, 0, 100, 60, 10, 28, 2),
        prompt_tokens=300,
        generation_tokens=1050,
        prefix_queries=300,
        prefix_hits=100,
    )
    assert stats_line(before, now, 10.0) == (
        "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 100.0 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, GPU KV cache usage: 30.0%, Prefix cache hit rate: 50.0%"
    )
    assert stats_line(now._replace(running=0, waiting=0), now._replace(running=0, waiting=0), 10.0) == ""


async def test_an_idle_server_is_silent(caplog):
    import asyncio

    class Idle:
        def __init__(self, stats):
            self.llm = self
            self._stats = stats

        def stats(self):
            return self._stats

    caplog.set_level(logging.INFO, "gapless.server")
    for stats, lines in ((Stats(), 0), (Stats(running=1), 1)):
        task = asyncio.create_task(log_stats(Idle(stats), every=0.01))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (caplog.text.count("Avg prompt throughput") > 0) == bool(lines)
