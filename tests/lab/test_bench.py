"""The whole measurement against a scripted server: what is asked before, what is refused, what is reported."""

from __future__ import annotations

import json
import os
import random
from contextlib import contextmanager
from dataclasses import replace

import pytest
from lab.scripted import Model, Network, play, respond

from gapless.base.errors import ConfigError, ServerError
from gapless.lab import probe, workload
from gapless.lab.arrivals import Arrivals, Burst, Ramp
from gapless.lab.bench import LoadPlan, bench_serve, raised_priority
from gapless.lab.datasets import Prompt, Source, Workload
from gapless.lab.http import Client
from gapless.lab.target import Target

TARGET = Target("http://there:1")
WORK = Workload(num_prompts=6, input_len=20, output_len=4)


@contextmanager
def no_bar(what, total):
    yield lambda done: None


def bench(model, **fields):
    said = []
    plan = LoadPlan(**{"target": TARGET, "work": WORK, "concurrency": 2, **fields})
    report = play(bench_serve(Client(plan.target, Network(model)), plan, said.append, no_bar))
    # Virtual seconds cost no processor time of their own, so the client seems busy.
    return report._replace(notes=tuple(note for note in report.notes if "of a core" not in note)), said


def test_a_measurement_reports_its_requests_and_their_times():
    model = Model(ttft=0.05, itl=0.01)
    report, said = bench(model, num_warmups=3, goodput={"ttft": 51.0})
    assert said == ["6 requests of random to m at http://there:1: all at once, at most 2 at a time"]
    assert report.notes == () and report.summary.totals["completed"] == 6
    assert len(model.asked) == 1 + 3 + 6  # the first request finds out what the server takes
    assert [len(r.body["prompt"]) for r in model.asked] == [20] * 10
    assert {i for r in model.asked for i in r.body["prompt"]} <= set(range(499))  # no special token
    assert len({tuple(r.body["prompt"]) for r in model.asked[1:]}) == 9
    assert model.asked[-1].body | {"prompt": 0} == {
        **{"model": "m", "prompt": 0, "max_tokens": 4, "temperature": 0.0, "stream": True, "ignore_eos": True},
        "stream_options": {"include_usage": True},
    }
    result = report.json()
    assert (result["model_id"], result["request_rate"], result["max_concurrency"]) == ("m", "inf", 2)
    assert result["mean_ttft_ms"] == pytest.approx(50.0) and result["p99_tpot_ms"] == pytest.approx(10.0)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    json.dumps(result)
    assert "Maximum request concurrency:             2 " in report.block()


def test_rates_and_ramps_are_in_the_result():
    report, said = bench(Model(), arrivals=Arrivals(4.0, 0.5), concurrency=None)
    assert said[0].endswith("gamma, 4 requests/s") and report.json()["request_rate"] == 4.0
    assert report.run.samples[-1].sent == pytest.approx(6 / 4.0)
    assert "Request rate configured (RPS):           4.00" in report.block()
    report, _ = bench(Model(), arrivals=Arrivals(ramp=Ramp("linear", 1.0, 3.0)))
    assert report.json()["ramp_up_end_rps"] == 3.0 and report.json()["schedule"]["gap_cv"] > 0


def fails(message, model=None, kind=ServerError, **fields):
    with pytest.raises(kind, match=message):
        bench(model or Model(), **fields)


def test_a_server_that_cannot_be_measured_is_reported_with_the_mend():
    fails("has no model 'x'; it has m", target=replace(TARGET, model="x"))
    locked = Model()
    locked.key = "k"
    fails(r"answered 401: no key; give the server's key with --api-key or \$OPENAI_API_KEY", locked)
    assert bench(locked, target=replace(TARGET, api_key="k"))[0].summary.totals["completed"] == 6
    for answer, message in (((404, {"error": "x"}), "answered 404: x"), ((200, {"data": []}), "lists no model")):
        other = Model()
        other.routes["/v1/models"] = answer
        fails(message, other)

    async def refuse(factory):
        raise ConnectionRefusedError("refused")

    with pytest.raises(
        ServerError, match=r"http://there:1: cannot connect: .*is a server running there\? \(gapless serve\)"
    ):
        play(bench_serve(Client(TARGET, refuse), LoadPlan(TARGET), print, no_bar))


def test_a_first_request_that_fails_ends_it():
    class Broken(Model):
        def stream(self, request):
            yield 0.0, respond({"error": {"message": "out of order"}}, 500)

    broken = Broken()
    fails("a first request to http://there:1 failed: HTTP 500: out of order", broken)
    assert len(broken.asked) == 1  # only a 400 may mean a field that it does not know


@pytest.mark.parametrize("names", [{"ignore_eos"}, {"stream_options"}, {"ignore_eos", "stream_options"}])
def test_fields_that_a_server_refuses_are_left_out(names):
    model = Model()
    model.refuses = names
    report, _ = bench(model)
    assert report.summary.totals["completed"] == 6 and set(report.plan.target.omit) == names
    assert report.json()["not_sent"] == sorted(names, reverse=True)
    assert any(note.endswith("not sent") for note in report.notes)
    assert ("stream_options" in names) == any("counted events" in note for note in report.notes)
    assert report.summary.totals["total_output_tokens"] == 24


def test_a_field_of_the_users_own_is_not_dropped():
    model = Model()
    model.refuses = {"frobnicate"}
    fails("unknown field frobnicate", model, target=replace(TARGET, extra_body={"frobnicate": 1}))


def test_a_server_that_loads_is_waited_for():
    class Loading(Model):
        def __call__(self, request):
            self.routes["/health"] = (200 if len(self.requests) > 12 else 503, None)
            return super().__call__(request)

    fails("still loading", Loading(), ready_seconds=2.0)
    report, _ = bench(Loading(), ready_seconds=30.0)
    assert report.summary.totals["completed"] == 6


def test_default_lengths_shrink_to_the_model_and_given_ones_do_not():
    small = Model()
    small.routes["/v1/models"] = (200, {"data": [{"id": "m", "max_model_len": 40}]})
    work = replace(WORK, input_len=1024, output_len=128)
    report, said = bench(small, work=work, fit_lengths=True)
    assert {p.input_len + p.output_len for p in report.prompts} == {40} and said[0].startswith("m holds 40 tokens")
    fails("1152 tokens .* does not fit into the 40 that m holds", small, ConfigError, work=work)


def test_token_ids_are_small_where_the_server_names_no_vocabulary(tmp_path):
    silent = Model()
    del silent.routes["/tokenizer_info"]
    report, _ = bench(silent)
    assert report.notes[0].startswith("the server does not tell its vocabulary: prompts use ids 100 to 999")
    assert {i for p in report.prompts for i in p.content} <= set(range(100, 1000))
    file = tmp_path / "tokenizer.json"
    added = [{"id": 5, "special": True}, {"id": 3, "special": False}]
    file.write_text(json.dumps({"model": {"vocab": {"a": 3, "b": 4, "<s>": 5}}, "added_tokens": added}))
    report, _ = bench(silent, tokenizer=str(tmp_path))
    assert {i for p in report.prompts for i in p.content} == {3, 4}
    for text, message in (("{", "not a tokenizer.json"), ('{"model": {"vocab": {}}}', "holds no vocabulary")):
        file.write_text(text)
        fails(message, kind=ConfigError, tokenizer=str(file))
    fails("cannot read", kind=ConfigError, tokenizer=str(tmp_path / "none"))


CHAT = Target("http://there:1", backend="openai-chat")


def test_chat_gets_texts_of_exact_length():
    report, _ = bench(Model(offset=9), target=CHAT)
    assert {len(p.content.split()) for p in report.prompts} == {20}
    assert report.notes == ("the server counts +9 tokens in every prompt (a chat template, or a BOS token)",)


class Letters(Model):
    """A tokenizer of one token a letter."""

    def __call__(self, request):
        if request.path == "/tokenize":
            return [(0.0, respond({"tokens": [ord(c) for c in request.body["prompt"]]}))]
        if request.path == "/detokenize":
            return [(0.0, respond({"prompt": "".join(map(chr, request.body["tokens"]))}))]
        return super().__call__(request)

    @staticmethod
    def length(body):
        return sum(len(m["content"]) for m in body["messages"])


def test_texts_are_cut_to_length_where_words_are_several_tokens():
    report, _ = bench(Letters(), target=CHAT, work=replace(WORK, range_ratio=0.5))
    assert [len(p.content) for p in report.prompts] == [p.input_len for p in report.prompts]
    assert len({p.input_len for p in report.prompts}) > 2 and report.notes == ()


def test_a_cut_text_is_counted_again():
    """A tokenizer that reads one token more into every text that was cut."""

    async def encode(client, text):
        return list(text)

    async def decode(client, tokens):
        return "".join(tokens) + "!"

    prompts = [Prompt(0, "some words", 7, 1), Prompt(1, "as it is", 0, 1)]

    def cut_by(decode):
        source = Source(["x"], codec=probe.Codec(encode, decode))
        return play(workload.cut(WORK, source, prompts, None))

    cut, whole = cut_by(decode)
    assert cut.content == "some w!" and whole.content == "as it is"

    async def mute(client, tokens):
        return None

    assert cut_by(mute) == prompts


def test_lengths_by_usage_where_nothing_tokenizes():
    class Halves(Model):
        """Two tokens a word, and no /tokenize."""

        @staticmethod
        def length(body):
            return 2 * Model.length(body) + 5

    mute = Halves()
    mute.routes["/tokenize"] = (404, {})
    report, _ = bench(mute, target=CHAT)
    assert {len(p.content.split()) for p in report.prompts} == {10}
    assert "prompts are words of 2.00 tokens on average: lengths are not exact" in report.notes


def test_words_that_are_one_token():
    async def count(text):  # one token a word, but three for words with an e
        return sum(3 if "e" in word else 1 for word in text.split())

    found = play(workload.single_tokens(count, ["a", "be", "c", "d", "ef", "g", "h"]))
    assert found == ["a", "c", "d", "g", "h"]

    async def unanswered(text):
        return None

    assert play(workload.single_tokens(unanswered, workload.MADE_UP_WORDS)) == []
    assert len(set(workload.MADE_UP_WORDS)) == len(workload.MADE_UP_WORDS) > 150
    assert Source(["x"]).draw(random.Random(0), 0) == ()


def test_a_conversation_through_completions_repeats_its_earlier_turns():
    model = Model()
    work = Workload("multi_turn", num_prompts=4, input_len=5, output_len=2, turns=2)
    report, _ = bench(model, work=work)
    assert report.summary.totals["completed"] == 4 and report.notes == ()
    prompts = sorted((r.body["prompt"] for r in model.asked[1:]), key=len)
    assert prompts[2].startswith(tuple(prompts[:2])) and "t0 t1" in prompts[2]


def test_files_that_do_not_go_with_the_api(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": [1, 2]}')
    work = Workload("custom", num_prompts=1, path=str(path))
    fails("token ids cannot be sent to chat", kind=ConfigError, target=CHAT, work=work)
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
    fails("messages need the chat API", kind=ConfigError, work=work)
    assert bench(Model(), target=CHAT, work=work)[0].summary.totals["completed"] == 1


def test_traces_and_bursts_bring_their_own_times(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"timestamp": t, "input_length": 4, "output_length": 2}) for t in (0, 1500)))
    report, said = bench(Model(), work=Workload("timed_trace", path=str(path)), concurrency=None)
    assert [s.sent for s in report.run.samples] == pytest.approx([0.0, 1.5]) and "at the data set's times" in said[0]
    burst = Arrivals(burst=Burst(2, 3.0))
    work = Workload(num_prompts=4, input_len=3, output_len=1)
    report, _ = bench(Model(), work=work, arrivals=burst, concurrency=None)
    assert report.json()["schedule"]["name"] == "2 at once every 3 s"
    assert [s.sent for s in report.run.samples] == pytest.approx([0.0, 0.0, 3.0, 3.0])


def test_another_client_asks_beside_the_load():
    class Slow(Model):
        def stream(self, request):
            self.ttft = 0.02 if request.body["max_tokens"] == 1 else 1.0
            yield from super().stream(request)

    slow = Slow()
    report, _ = bench(slow, probe_rate=10.0, concurrency=1, work=replace(WORK, num_prompts=2))
    # Two requests of 1.03 s each; a probe of 20 ms, a pause of 100 ms, and so on.
    assert report.side["probe_completed"] == 18 and report.side["probe_failed"] == 0
    result = report.json()
    assert (result["probe_completed"], result["completed"]) == (18, 2)
    assert result["probe_p99_e2el_ms"] == pytest.approx(20.0) and "Max probe E2EL (ms):" in report.block()
    assert "Probe" not in bench(Model())[0].block()


def test_answers_that_make_no_sense():
    async def main(value):
        async with Client(TARGET, Network(lambda request: [(0.0, respond(value))])) as client:
            return (
                await probe.server_vocabulary(client),
                await probe.tokenize(client, "x"),
                await probe.detokenize(client, [1]),
            )

    for value in ([], {}, {"vocab_size": "x", "tokens": "y", "prompt": 3}, b"<html>"):
        assert play(main(value)) == (None, None, None)
    special = {"added_tokens_decoder": {"1000": {}, "1001": {}}}
    assert play(main(special))[0] == list(range(1000))  # special tokens stand behind the others


def test_priority_is_what_was_got(monkeypatch):
    tried = []

    def set_priority(kind, who, level):
        tried.append(level)
        if level < -7:
            raise PermissionError

    def no_scheduler(*_):
        raise PermissionError

    monkeypatch.setattr("os.setpriority", set_priority)
    monkeypatch.setattr("os.sched_setscheduler", no_scheduler)
    with raised_priority("none") as got:
        assert got == "none" and tried == []
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with raised_priority("rt") as got:
        assert got == "nice -5" and tried == [-20, -10, -5]
    assert tried[3:] == [before]


def test_an_answer_that_is_no_object_says_nothing():
    model = Model()
    answers = {"/a": (200, [1]), "/b": (200, None), "/c": (404, {"version": 1}), "/d": (200, {"version": 1})}
    model.routes.update(answers)

    async def asked():
        async with Client(TARGET, Network(model)) as client:
            return [await probe.ask(client, "GET", path) for path in answers]

    assert play(asked()) == [{}, {}, {}, {"version": 1}]
