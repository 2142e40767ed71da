"""Spans of generation requests: their nesting, names and attributes, what they leave out, and that nothing waits."""

import json
import logging
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from server_harness import MODEL, broken_off, serving

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.server import tracing
from gapless.server.config import ServerConfig
from gapless.server.tracing import Tracing, collector_url, open_tracing, trace_id_of, wants_old_names

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

PARENT_TRACE, PARENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{PARENT_TRACE}-{PARENT_SPAN}-01"


class Seen:
    """A server's finished spans."""

    def __init__(self, server, exporter):
        self.server = server
        self.exporter = exporter

    def spans(self, count=1):
        """The spans since the last call, once this many requests have ended."""
        self.server.until(lambda: sum(s.name == "llm_request" for s in self.exporter.get_finished_spans()) >= count)
        found = self.exporter.get_finished_spans()
        self.exporter.clear()
        return found

    def ask(self, prompt="a", headers=None, path="/v1/completions", **fields):
        return self.server.http.post(path, json={"prompt": prompt, **fields}, headers=headers)

    @contextmanager
    def using(self, tracing):
        before, self.server.state.tracing = self.server.state.tracing, tracing
        try:
            yield
        finally:
            self.server.state.tracing = before

    def request(self):
        (root,) = [span for span in self.spans() if span.name == "llm_request"]
        return root


@pytest.fixture(scope="module")
def traced():
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(enable_log_requests=True) as server:
        server.state.tracing = Tracing(provider)
        with server.client() as client:
            server.http = client
            yield Seen(server, exporter)
    provider.shutdown()


def named(spans):
    return {span.name: span for span in spans}


def test_a_request_has_a_span_with_its_phases(traced):
    sampling = {"seed": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5}
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=x"}
    answer = traced.ask("a~", headers, max_tokens=8, ignore_eos=True, **sampling).json()
    spans = named(traced.spans())
    assert set(spans) == {"llm_request", "receive", "queue", "prefill", "decode"}
    root = spans.pop("llm_request")
    assert root.kind is SpanKind.SERVER
    assert f"{root.context.trace_id:032x}" == PARENT_TRACE
    assert f"{root.parent.span_id:016x}" == PARENT_SPAN
    assert root.context.trace_state.get("vendor") == "x"
    for child in spans.values():
        assert child.parent.span_id == root.context.span_id
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time
    for before, after in (("receive", "queue"), ("queue", "prefill"), ("prefill", "decode")):
        assert spans[before].end_time == spans[after].start_time
    assert spans["decode"].end_time > spans["decode"].start_time
    assert root.attributes["gen_ai.server.time_to_first_token"] == pytest.approx(
        (spans["prefill"].end_time - spans["queue"].start_time) / 1e9, rel=1e-6
    )
    assert root.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(
        (spans["queue"].end_time - spans["queue"].start_time) / 1e9, rel=1e-6
    )
    assert (
        dict(root.attributes).items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "gapless",
            "gen_ai.request.model": MODEL,
            "gen_ai.response.model": MODEL,
            "gen_ai.response.id": answer["id"],
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.request.stream": False,
            "gen_ai.request.max_tokens": 8,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.top_k": 5,
            "gen_ai.request.seed": 7,
            "gen_ai.usage.input_tokens": 2,
            "gen_ai.usage.output_tokens": 8,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "gen_ai.usage.prompt_tokens": 2,
            "gen_ai.usage.completion_tokens": 8,
            "gen_ai.request.n": 1,
        }.items()
    )
    assert root.status.status_code is StatusCode.UNSET
    assert "gen_ai.request.choice.count" not in root.attributes and "error.type" not in root.attributes


def test_a_streamed_conversation_has_one_span(traced):
    body = {"messages": [{"role": "user", "content": "hi~"}], "max_tokens": 5, "stream": True, "n": 2}
    text = traced.server.http.post("/v1/chat/completions", json=body).text
    identity = json.loads(text.split("\n\n")[0][6:])["id"]
    spans = named(traced.spans())
    root, stream = spans["llm_request"], spans["stream"]
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.response.id"] == identity
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    assert root.attributes["gen_ai.request.choice.count"] == 2
    assert root.attributes["gen_ai.request.stream"] is True
    assert root.parent is None
    assert spans["decode"].start_time <= stream.start_time <= stream.end_time <= root.end_time
    assert stream.end_time >= spans["decode"].end_time


def test_spans_of_several_prompts_are_bounded(traced, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_NESTED", 2)
    traced.ask(["a", "bc", "def"], max_tokens=2)
    spans = traced.spans()
    decodes = [span for span in spans if span.name == "decode"]
    assert sorted(span.attributes["gapless.prompt.index"] for span in decodes) == [0, 1]
    root = named(spans)["llm_request"]
    assert root.attributes["gapless.prompts"] == 3
    assert root.attributes["gen_ai.usage.input_tokens"] == 6


def test_no_text_is_in_a_span(traced):
    secret, stop = "zebra crossing", "klmno"
    answer = traced.ask(secret, max_tokens=20, stop=[stop], user="somebody").json()
    written = "".join(span.to_json() for span in traced.spans())
    for text in (secret, stop, answer["choices"][0]["text"], "somebody"):
        assert text and text not in written


@pytest.mark.parametrize(
    "fields, error, status",
    [
        ({"temperature": -1}, "400", StatusCode.UNSET),
        ({"model": "another"}, "model_not_found", StatusCode.UNSET),
        ({"prompt": "a!", "max_tokens": 5}, "internal_error", StatusCode.ERROR),
    ],
)
def test_a_request_that_fails_has_its_error_in_the_span(traced, fields, error, status):
    traced.ask(**fields)
    root = traced.request()
    assert root.attributes["error.type"] == error
    assert root.status.status_code is status


def test_an_answer_that_breaks_in_its_middle_has_its_error_in_the_span(traced):
    text = broken_off(traced.server.http, "/v1/completions", {"prompt": "a!", "max_tokens": 5})
    assert "could not complete" in text
    spans = named(traced.spans())
    assert spans["llm_request"].attributes["error.type"] == "internal_error"
    assert spans["llm_request"].status.status_code is StatusCode.ERROR
    assert "stream" in spans


def test_a_client_that_goes_away_is_named_in_the_span(traced):
    body = {"prompt": "a~", "max_tokens": 500, "stream": True, "ignore_eos": True}
    with traced.server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    root = traced.request()
    assert root.attributes["error.type"] == "client_gone"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert root.status.status_code is StatusCode.UNSET


def test_an_unsampled_parent_is_obeyed(traced):
    traced.ask(headers={"traceparent": TRACEPARENT[:-1] + "0"})
    traced.ask("b")
    assert f"{traced.request().context.trace_id:032x}" != PARENT_TRACE


def test_only_generation_is_traced(traced):
    http = traced.server.http
    for path in ("/health", "/metrics", "/v1/models"):
        assert http.get(path).status_code == 200
    traced.ask(path="/tokenize")
    traced.ask()
    assert len([span for span in traced.spans() if span.kind is SpanKind.SERVER]) == 1


def test_the_line_of_the_request_names_the_trace(traced, caplog):
    caplog.set_level(logging.INFO, "gapless.server")
    traced.ask("ab", {"x-request-id": "r1"}, max_tokens=3)
    root = traced.request()
    (record,) = [record for record in caplog.records if record.message.startswith("request r1")]
    assert record.fields["trace_id"] == f"{root.context.trace_id:032x}"
    assert record.message.endswith(record.fields["trace_id"])
    assert root.attributes["gen_ai.request.id"] == "r1"


def test_old_names_go_when_the_convention_alone_is_wanted():
    for words, old in (("", True), ("http,database", True), ("http, gen_ai_latest_experimental", False)):
        assert wants_old_names({"OTEL_SEMCONV_STABILITY_OPT_IN": words}) is old
    assert wants_old_names({}) is True


def test_spans_without_old_names_have_the_new_ones_alone(traced):
    with traced.using(Tracing(traced.server.state.tracing.provider, old_names=False)):
        traced.ask()
        names = set(traced.request().attributes)
    assert "gen_ai.usage.input_tokens" in names
    assert not names & {"gen_ai.usage.prompt_tokens", "gen_ai.request.id", "gen_ai.request.n"}
    assert not any(name.startswith("gen_ai.latency.") for name in names)


class Collector(ThreadingHTTPServer):
    """An OTLP collector; with `hold`, one that takes requests and does not answer until that is set."""

    daemon_threads = True

    def __init__(self, hold=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.hold = hold
        self.asked = threading.Event()
        self.got = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        data = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(data)))
        self.server.asked.set()
        if self.server.hold is not None:
            self.server.hold.wait(20)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.end_headers()


@contextmanager
def collecting(hold=None):
    collector = Collector(hold)
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        if hold is not None:
            hold.set()
        collector.shutdown()
        thread.join()
        collector.server_close()


def test_spans_reach_a_collector(traced, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    with collecting() as collector:
        exporting = open_tracing(collector.url)
        with traced.using(exporting):
            traced.ask(headers={"traceparent": TRACEPARENT})
        assert collector.asked.wait(20)
        exporting.provider.shutdown()
    path, _ = collector.got[0]
    assert path == "/v1/traces"
    resources = [resource for _, batch in collector.got for resource in batch.resource_spans]
    attributes = {item.key: item.value.string_value for item in resources[0].resource.attributes}
    assert attributes["service.name"] == "gapless" and attributes["deployment.environment.name"] == "test"
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"llm_request", "receive", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {PARENT_TRACE}


@pytest.mark.process
def test_a_collector_that_hangs_holds_up_no_request(traced, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with collecting(hold=threading.Event()) as collector:
        stuck = open_tracing(collector.url)
        with traced.using(stuck):
            for _ in range(12):  # 5 spans each: the queue overflows
                assert traced.ask().status_code == 200
        assert collector.asked.wait(20)
        assert len(collector.got) == 1, "one thread exports, and it is stuck"
        collector.hold.set()
        stuck.provider.shutdown()
    sent = sum(len(s.spans) for _, batch in collector.got for r in batch.resource_spans for s in r.scope_spans)
    assert 8 <= sent <= 4 + 8 + 4  # what was under way, and the bounded queue


async def test_closing_does_not_wait_for_a_collector(monkeypatch):
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.05)
    let_go, ended = threading.Event(), threading.Event()

    class Stuck(TracerProvider):
        def shutdown(self):
            let_go.wait(20)
            ended.set()

    await Tracing(Stuck(shutdown_on_exit=False)).close()
    assert not ended.is_set()
    let_go.set()
    assert ended.wait(20)


def test_the_address_of_the_collector_gets_its_path():
    assert collector_url("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert collector_url("https://u:p@host/") == "https://u:p@host/v1/traces"
    assert collector_url("http://host/otlp/v1/traces") == "http://host/otlp/v1/traces"
    for wrong in ("localhost:4317", "grpc://localhost:4317", "http://", "/v1/traces"):
        with pytest.raises(ConfigError, match="otlp_traces_endpoint must be the HTTP address"):
            collector_url(wrong)


def test_a_password_or_query_in_the_address_is_shown_nowhere():
    for url, said in (
        ("grpc://me:s3cret@host:4317", "host:4317"),
        ("http://host/?k=s3cret", "OTEL_EXPORTER_OTLP_HEAD"),
    ):
        with pytest.raises(ConfigError, match=said) as failed:
            collector_url(url)
        assert "s3cret" not in str(failed.value)
    config = ServerConfig(otlp_traces_endpoint="http://me:s3cret@host:4318/x?key=s3cret")
    assert "s3cret" not in repr(config) and "host:4318/x" in repr(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("http://host:4318/v1/traces", "http://host:4318/v1/traces"),
        ("me:s3cret@host:4318", "host:4318"),
        ("http://me:s3/cret@host/x", "http://host/x"),
        ("http://me:s3?cret@host/x", "http://…"),
        ("http://me:s3#cret@host/x", "http://…"),
        ("http://host/x?mail=a@s3cret", "http://…"),
        ("host:4318", "host:4318"),
    ],
)
def test_no_password_is_shown_of_an_address_that_is_none_either(given, expected):
    assert hide_password(given) == expected


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"):
        open_tracing("http://localhost:4318")


@pytest.mark.process
def test_the_sdk_is_imported_only_when_asked_for():
    code = "import gapless.server.run, sys; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_trace_of_a_request_is_read_without_spans():
    assert trace_id_of({"traceparent": TRACEPARENT}) == PARENT_TRACE
    for wrong in ({}, {"traceparent": "x"}, {"traceparent": f"00-{'0' * 32}-{PARENT_SPAN}-01"}):
        assert trace_id_of(wrong) == ""
