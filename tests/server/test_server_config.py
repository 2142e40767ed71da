"""ServerConfig, the logs that it asks for, and the line about throughput."""

import dataclasses
import json
import logging
import queue
import re
import warnings
from dataclasses import replace

import pytest
from server_harness import MODEL, idle, serving

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.engine.seam import EngineInfo
from gapless.engine.stats import Stats
from gapless.loop.records import StepCounts
from gapless.loop.timeline import DeviceTimes
from gapless.memory.pages import PageCounts
from gapless.plan.queue import QueueCounts
from gapless.server import logs
from gapless.server.config import ServerConfig
from gapless.server.logs import log_stats, rates, stats_line


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": -1}, "port"),
        ({"port": 65536}, "port"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"drain_seconds": -1.0}, "drain_seconds"),
        ({"drain_seconds": float("nan")}, "drain_seconds"),
        ({"request_timeout": 0.0}, "request_timeout"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"log_level": "loud"}, "log_level"),
        ({"log_format": "xml"}, "log_format"),
        ({"api_key": ("",)}, "api_key"),
        ({"served_model_name": ("a", "")}, "served_model_name"),
        ({"root_path": "llm"}, "root_path must begin with /"),
        ({"root_path": "/llm/"}, "root_path must begin with / and not end"),
        ({"ssl_keyfile": "k.pem"}, "ssl_certfile is missing"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 2}, "ssl_ca_certs is missing"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs must be a whole number from 0 to 2"),
        ({"default_chat_template_kwargs": "{"}, "default_chat_template_kwargs must be JSON such as"),
        ({"default_chat_template_kwargs": "[1]"}, "must be a JSON object"),
        ({"max_logprobs": 21}, "max_logprobs must be a whole number from 0 to 20"),
        ({"stream_interval": 0}, "stream_interval must be a whole number from 1"),
    ],
)
def test_settings_that_cannot_be_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**fields)


def test_the_defaults_are_modest():
    config = ServerConfig()
    assert (config.host, config.port, config.max_body_bytes, config.drain_seconds) == ("127.0.0.1", 8000, 2**22, 30.0)
    assert config.api_key == config.allowed_origins == ()


@pytest.mark.parametrize("given", [("http://a", "http://b"), ("http://a, http://b",), ('["http://a", "http://b"]',)])
def test_origins_are_read_one_by_one(given):
    assert ServerConfig(allowed_origins=given).allowed_origins == ("http://a", "http://b")
    assert ServerConfig(allowed_origins=("http://[::1]:80",)).allowed_origins == ("http://[::1]:80",)


def test_keys_are_never_printed():
    config = ServerConfig(api_key=("s3cret",))
    assert "s3cret" not in repr(config)
    assert "port=8000" in repr(config)


def test_every_field_is_a_flag_with_help():
    for field in dataclasses.fields(ServerConfig):
        assert field.metadata["help"] and field.metadata["group"]


def test_every_record_is_one_line_of_json(capsys, monkeypatch):
    access = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(access, "propagate", True)  # uvicorn silences it where no access log is wanted
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest would send the surrogate to the other process
    log = logging.getLogger("gapless.server")
    with logs.logging_to_stderr(ServerConfig(log_format="json")):
        try:
            raise ValueError("first\nsecond")
        except ValueError:
            log.exception("it broke\noff")
        log.warning("a lone \udcff surrogate")
        log.info(
            "fields", extra={"fields": {"n": 1, "level": "mine", "odd": {1, 2}, "bad": "\udcff", "nan": float("nan")}}
        )
        log.info("where", stack_info=True)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("this will go", DeprecationWarning, stacklevel=1)
        access.info('%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "GET", "/v1/models", "1.1", 200)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    broke, lone, fields, where, warned, accessed = lines
    assert broke["message"] == "it broke\noff" and broke["level"] == "error" and broke["time"].endswith("+00:00")
    assert broke["logger"] == "gapless.server"
    assert broke["exception"].startswith("Traceback") and broke["exception"].endswith("ValueError: first\nsecond")
    assert "surrogate" in lone["message"]
    assert (fields["level"], fields["n"]) == ("info", "1") and "nan" in fields
    assert "test_every_record" in where["stack"]
    assert "this will go" in warned["message"]
    assert accessed["path"] == "/v1/models" and accessed["status"] == 200


def test_a_line_whose_arguments_do_not_fit_is_written_all_the_same():
    record = logging.LogRecord("x", logging.INFO, "f", 1, "two %s", ("given", "arguments"), None)
    prepared = logs.DroppingHandler(queue.Queue()).prepare(record)
    assert "two %s" in prepared.getMessage() and "arguments" in prepared.getMessage()


def test_text_lines_keep_their_traceback(capsys):
    with logs.logging_to_stderr(ServerConfig()):
        try:
            raise ValueError("inside")
        except ValueError:
            logging.getLogger("gapless.server").exception("it broke")
    written = capsys.readouterr().err
    assert written.count("ValueError: inside") == 1 and "Traceback" in written


def test_a_line_outside_of_logging_has_the_form_and_level_of_the_log(capsys):
    for form, level, text in (("text", "info", "gapless: hello\n"), ("text", "error", ""), ("json", "info", "{")):
        logs.say(ServerConfig(log_format=form, log_level=level), logging.WARNING, "hello")
        assert capsys.readouterr().err.startswith(text)


def test_the_start_is_logged_without_secrets(caplog):
    caplog.set_level(logging.INFO, "gapless.server")
    hidden = {"api_key": ("s3cret",), "otlp_traces_endpoint": "http://me:s3cret@host:4318"}
    tiers = ("host:1GiB", "redis://me:s3cret@cache/0", "disk:/home/me/kv:1GiB")
    logs.log_settings(EngineConfig(kv_tiers=tiers, kv_peer_key_file="/home/me/key"), ServerConfig())
    assert "kv_tiers=['host:1GiB', 'redis://cache/0', 'disk:kv:1GiB'], kv_peer_key_file=key" in caplog.text
    logs.log_settings(EngineConfig(depth="4", model="/home/me/model"), ServerConfig(port=1, **hidden))
    assert "s3cret" not in caplog.text and "/home" not in caplog.text
    assert (
        "settings: model=model, depth=4, port=1, api_key=<secret>, otlp_traces_endpoint=http://host:4318" in caplog.text
    )
    logs.log_settings(EngineConfig(), ServerConfig())
    assert "settings: all defaults" in caplog.text
    info = EngineInfo("m", "cpu", "float32", 9, 100, 4, 64, 50, 16, "auto", 9, (("device", 2.0), ("weights", 0.5)))
    logs.log_start(info, 3.0)
    line = "KV cache size: 800 tokens, Maximum concurrency for 100 tokens per request: 8.00x"
    assert line in caplog.text and f"GPU {line}" not in caplog.text
    logs.log_start(info._replace(own_memory=True), 3.0)
    assert f"GPU {line}" in caplog.text
    assert "start-up, seconds: process and imports 0.50 | device 2.00 | weights 0.50 | ready 3.00" in caplog.text


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


def test_a_full_queue_drops_the_lines_that_come_then():
    waiting = queue.Queue(1)
    handler = logs.DroppingHandler(waiting)
    for number in range(3):
        handler.handle(logging.LogRecord("x", logging.INFO, "f", 1, str(number), (), None))
    assert waiting.get_nowait().getMessage() == "0" and waiting.empty()


def access_record(path):
    return logging.LogRecord("uvicorn.access", logging.INFO, "f", 1, "%s %s %s", ("1.2.3.4", "GET", path), None)


def test_probes_leave_no_access_line():
    paths = {"/health": False, "/metrics?x=1": False, "/debug/kv": False, "/v1/models": True}
    assert {path: logs.is_shown(access_record(path)) for path in paths} == paths


def test_endpoints_named_by_a_flag_leave_no_access_line(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    with logs.logging_to_stderr(ServerConfig(disable_access_log_for_endpoints=("/v1/models, /load", "/x"))):
        for path in ("/v1/models", "/load?x=1", "/v1/models/tiny"):
            logging.getLogger("uvicorn.access").handle(access_record(path))
    written = capsys.readouterr().err
    assert "GET /v1/models/tiny" in written and "/load" not in written and written.count("GET") == 1


def test_requests_are_logged_on_demand_without_their_text(caplog):
    caplog.set_level(logging.INFO, "gapless.server")
    with serving(enable_log_requests=True) as server, server.client() as client:
        fields = {"prompt": "my secret words", "max_tokens": 3}
        client.post("/v1/completions", json=fields, headers={"x-request-id": "label-7"})
        assert re.search(r"request label-7 \(cmpl-\w{24}\): 15 prompt tokens \(0 cached\), 3 generated", caplog.text)
        (record,) = [record for record in caplog.records if hasattr(record, "fields")]
        assert (
            record.fields.items()
            >= {
                **{"request_id": "label-7", "model": MODEL, "prompt_tokens": 15, "cached_tokens": 0},
                **{"generation_tokens": 3, "finish_reasons": ["length"]},
            }.items()
        )
        assert record.fields["response_id"].startswith("cmpl-") and "trace_id" not in record.fields
        assert 0 < record.fields["time_to_first_token_seconds"] < record.fields["duration_seconds"]
    assert "secret" not in caplog.text


def test_unknown_fields_are_warned_about_once(client, caplog):
    for _ in range(3):
        client.post("/v1/completions", json={"prompt": "x", "an_unknown_field": 1})
    assert caplog.text.count("an_unknown_field") == 1


def test_the_line_about_throughput_has_the_rates():
    before = Stats(steps=StepCounts(prompt_tokens=100, generation_tokens=50, prefix_queries=100))
    after = StepCounts(prompt_tokens=300, generation_tokens=1050, prefix_queries=300, prefix_hits=100)
    now = Stats(QueueCounts(running=3, waiting=2), PageCounts(60, 10, 28, 2), after)
    assert stats_line(rates(before, now, 10.0)) == (
        "Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 100.0 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, KV cache usage: 30.0%, Prefix cache hit rate: 50.0%"
    )
    assert not rates(replace(now, queue=QueueCounts()), replace(now, queue=QueueCounts()), 10.0)


def test_the_line_tells_bubbles_but_not_the_time_without_work():
    before = Stats(device=DeviceTimes(10**9, 0, idle(host_late=10**8)))
    later = DeviceTimes(11 * 10**9, 0, idle(host_late=3 * 10**8, no_work=5 * 10**9))
    busy = Stats(QueueCounts(running=1), device=later)
    assert stats_line(rates(before, busy, 10.0)).endswith(", Device idle with work: 2.0% (host_late 2.0%)")
    assert rates(before, busy, 10.0)["device_idle_no_work_percent"] == 50.0
    smooth = replace(busy, device=replace(before.device, wall_ns=11 * 10**9))
    assert stats_line(rates(before, smooth, 10.0)).endswith(", Device idle with work: 0.0%")


async def test_an_idle_server_is_silent(caplog):
    import asyncio

    class Idle:
        info = EngineInfo("m", "cpu", "float32", 9, 100, 4, 64, 50, 16, "auto", 9, ())

        def __init__(self, stats):
            self.llm = self
            self.looks = 0
            self._stats = stats

        def stats(self):
            self.looks += 1
            return self._stats

    caplog.set_level(logging.INFO, "gapless.server")
    for stats, lines in ((Stats(), 0), (Stats(QueueCounts(running=1)), 1)):
        state = Idle(stats)
        task = asyncio.create_task(log_stats(state, every=0.001))
        while state.looks < 4:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (caplog.text.count("Avg prompt throughput") > 0) == bool(lines)
