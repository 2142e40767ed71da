"""The load generator against a server whose every delay is known, on a clock that is exact."""

from __future__ import annotations

import asyncio

import pytest
from lab.scripted import Model, Network, play, respond

from gapless.lab.arrivals import Arrivals
from gapless.lab.datasets import Lengths, Prompt, Source, Workload, multi_turn_prompts, random_prompts
from gapless.lab.http import Client
from gapless.lab.load import run_load
from gapless.lab.summary import peak_concurrency, summarise
from gapless.lab.target import Target

TARGET = Target("http://there:1", "m")
MS = 1e-3


def prompts(count: int, output: int = 5) -> list[Prompt]:
    return random_prompts(Source(range(500)), count, Lengths(16), Lengths(output))


def load(model, wanted, times, delay=0.0, target=TARGET, **options):
    network = Network(model, delay)
    return play(run_load(Client(target, network), wanted, times, **options)), network


def test_known_delays_are_reported_exactly():
    wanted = prompts(8, output=6)
    run, _ = load(Model(ttft=0.05, itl=0.01), wanted, [0.0] * 8, concurrency=2)
    for place, s in enumerate(run.samples):
        assert (s.place, s.error, s.prompt_tokens, s.output_tokens, len(s.events)) == (place, "", 16, 6, 6)
        assert s.ttft == pytest.approx(0.05) and s.tpot == pytest.approx(0.01)
        assert s.itls == pytest.approx([0.01] * 5) and s.latency == pytest.approx(0.1)
        assert s.lag == pytest.approx(0.0, abs=1e-9)
    # Two at a time, 100 ms each.
    assert run.duration == pytest.approx(0.4)
    assert [round(s.sent, 6) for s in run.samples] == [0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    found = summarise(run, wanted)
    assert found.totals["output_throughput"] == pytest.approx(8 * 6 / 0.4)
    assert found.spreads["ttft"].percentiles == ((99.0, pytest.approx(50.0)),)
    assert found.totals["max_concurrent_requests"] == 2 and run.began == 1000.0
    assert run.samples[0].text == "t0 t1 t2 t3 t4 t5 "


def test_requests_leave_at_their_time_whatever_the_server_does():
    times = Arrivals(rate=20.0).times(40, seed=3)
    run, _ = load(Model(ttft=2.0), prompts(40), times)
    assert [s.sent for s in run.samples] == pytest.approx(times)
    assert [s.scheduled for s in run.samples] == pytest.approx(times)
    assert max(s.lag for s in run.samples) == pytest.approx(0.0, abs=1e-9)
    assert peak_concurrency(run.samples) > 30  # no request waited for the slow server


def test_a_limit_holds_back_and_that_is_not_lag():
    run, _ = load(Model(ttft=0.96, itl=0.01), prompts(4), [0.0, 0.1, 0.2, 5.0], concurrency=1)
    assert [round(s.released, 6) for s in run.samples] == [0.0, 1.0, 2.0, 5.0]
    assert [round(s.queued, 6) for s in run.samples] == [0.0, 0.9, 1.8, 0.0]
    assert max(s.lag for s in run.samples) < 1e-9
    assert [round(s.latency, 6) for s in run.samples] == [1.0] * 4
    assert peak_concurrency(run.samples) == 1


def test_a_client_that_is_late_says_so():
    class Busy(Model):
        def __call__(self, request):
            if len(self.asked) == 2:  # the third request finds the client's loop held up for 0.3 s
                asyncio.get_running_loop().now += 0.3
            return super().__call__(request)

    run, _ = load(Busy(), prompts(5), [0.0, 0.1, 0.2, 0.21, 2.0])
    assert [round(s.lag, 6) for s in run.samples] == [0.0, 0.0, 0.0, 0.29, 0.0]
    assert max(run.client.late) > 0.2
    found = summarise(run, prompts(5))
    assert found.client["send_lag_max_ms"] == pytest.approx(290.0) and found.client["loop_delay_max_ms"] > 200.0


def test_opening_a_connection_counts_against_the_server_and_is_kept():
    run, network = load(Model(), prompts(3), [0.0, 1.0, 2.0], delay=0.02)
    assert [round(s.ttft, 6) for s in run.samples] == [0.07, 0.05, 0.05]
    assert network.opened == 1 and run.samples[0].lag == 0.0


def test_a_kept_connection_that_was_closed_is_opened_again_once():
    class Closing(Model):
        def stream(self, request):
            yield from super().stream(request)
            yield 0.5, None

    run, network = load(Closing(), prompts(3), [0.0, 0.2, 1.0], concurrency=1)
    assert [s.error for s in run.samples] == ["", "", ""] and network.opened == 2


def test_a_request_whose_connection_was_closed_is_sent_once_more():
    class Dying(Model):
        def stream(self, request):
            if len(self.asked) == 2:
                yield 0.0, None
            else:
                yield from super().stream(request)

    model = Dying()
    run, network = load(model, prompts(3), [0.0, 1.0, 2.0])
    assert [s.error for s in run.samples] == ["", "", ""]
    assert network.opened == 2 and len(model.asked) == 4
    fresh = Dying()
    run, _ = load(fresh, prompts(2), [0.0, 0.01])  # the second has a connection of its own, and no second try
    assert run.samples[1].error == "http://there:1: the connection broke off" and len(fresh.asked) == 2


def test_a_request_that_fails_is_a_sample():
    class Faulty(Model):
        def stream(self, request):
            number = len(self.asked)
            parts = list(super().stream(request))
            if number == 1:
                yield 0.0, respond({"error": {"message": "full up"}}, 503)
            elif number == 2:
                yield from [*parts[:3], (0.0, None)]
            elif number == 3:
                yield 100.0, b""
            else:
                yield from parts

    target = Target("http://there:1", "m", timeout=3.0)
    run, _ = load(Faulty(), prompts(4), [0.0, 1.0, 2.0, 20.0], target=target)
    assert [s.error for s in run.samples] == [
        "HTTP 503: full up",
        "http://there:1: the connection broke off",
        "http://there:1: no whole answer in 3 s",
        "",
    ]
    found = summarise(run, prompts(4))
    assert [found.totals[key] for key in ("completed", "failed", "total_output_tokens")] == [1, 3, 5]
    assert found.spreads["ttft"].n == 1


def turns(words, count, turns, **fields):
    work = Workload("multi_turn", count, turns=turns, **{"input_len": 2, "output_len": 1, **fields})
    return multi_turn_prompts(Source(words), work)


def test_turns_wait_for_their_answers_and_carry_them():
    wanted = turns(["a", "b"], 6, 3, output_len=2, pause=1.5, seed=1)
    model = Model(ttft=0.4, itl=0.1)
    chat = Target("http://there:1", "m", backend="openai-chat")
    run, _ = load(model, wanted, [0.0, 0, 0, 0.25, 0, 0], target=chat)
    assert [round(s.sent, 6) for s in run.samples] == [0.0, 2.0, 4.0, 0.25, 2.25, 4.25]
    assert [round(s.scheduled, 6) for s in run.samples] == [round(s.sent, 6) for s in run.samples]
    last = max(model.asked, key=lambda r: r.at).body["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in last[::2]] == [p.content for p in wanted[3:]]
    assert last[1]["content"] == "t0 t1 "


def test_turns_of_completions_are_one_text():
    wanted = turns(["a"], 2, 2)
    model = Model()
    load(model, wanted, [0.0, 0.0])
    assert [r.body["prompt"] for r in model.asked] == ["a a", "a at0 \na a"]


def test_a_turn_after_a_failed_one_fails_too():
    model = Model()
    model.refuses = {"ignore_eos"}
    wanted = turns(["a"], 3, 3)
    run, _ = load(model, wanted, [0.0] * 3)
    assert [s.error.split(":")[0] for s in run.samples] == [
        "HTTP 400",
        "the turn before failed",
        "the turn before failed",
    ]
    assert len(model.asked) == 1


def test_progress_counts_every_end():
    seen: list[int] = []
    load(Model(), prompts(5), [0.0] * 5, advance=seen.append)
    assert seen == [1, 2, 3, 4, 5]


def test_prompts_with_a_time_of_their_own_keep_it():
    wanted = [p._replace(at=at) for p, at in zip(prompts(3), (2.0, 0.5, 1.0), strict=True)]
    run, _ = load(Model(), wanted, [0.0] * 3)
    assert [round(s.sent, 6) for s in run.samples] == [2.0, 0.5, 1.0]


def test_cancelling_leaves_no_connection():
    model = Model(ttft=50.0)
    network = Network(model)

    async def command():
        async with Client(TARGET, network) as client:
            await run_load(client, prompts(3), [0.0] * 3)

    async def main():
        task = asyncio.create_task(command())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    play(main())
