"""What an emulated event and stream answer to a query: False at first, True once the host has waited."""

from __future__ import annotations

import threading

import pytest
import torch

from gapless import guard
from gapless.guard.emulate import emulated_cuda
from gapless.guard.emulated_progress import MOST_REFUSALS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


@pytest.fixture
def region():
    with emulated_cuda(), guard.no_sync(mode="record"):
        yield


def polls(seed: int = 0, times: int = 20) -> list[int]:
    """Return how often each record of an event is queried at one line until it has passed."""
    counts = []
    with emulated_cuda(seed):
        event = torch.cuda.Event()
        for _ in range(times):
            event.record()
            counts.append(0)
            while not event.query():
                counts[-1] += 1
    return counts


def test_answers_depend_on_the_seed_alone_and_come_to_an_end():
    assert polls() == polls() != polls(seed=1)
    assert {0, 1, MOST_REFUSALS} <= set(polls(times=50)) <= set(range(MOST_REFUSALS + 1))
    assert all(polls(seed, 1)[0] >= 1 for seed in range(20)), "the first answer at a line"


def test_an_event_that_was_never_recorded_has_passed(region):
    assert torch.cuda.Event().query() and torch.cuda.Stream().query()


WAITS = {
    "event.synchronize": lambda x, event: event.synchronize(),
    "stream.synchronize": lambda x, event: torch.cuda.current_stream().synchronize(),
    "cuda.synchronize": lambda x, event: torch.cuda.synchronize(),
    "accelerator.synchronize": lambda x, event: torch.accelerator.synchronize(),
    "item": lambda x, event: x.sum().item(),
    "cpu": lambda x, event: x.cpu(),
    "a later event": lambda x, event: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_an_event_has_passed_once_the_host_has_waited_for_its_stream(region, name, races):
    x, event = torch.ones(3, device="cuda"), torch.cuda.Event()
    with guard.no_race("record", track="all" if races else "registered"):
        event.record()
        assert not event.query()
        WAITS[name](x, event)
        assert event.query()


def test_an_event_has_passed_with_what_waits_for_it(region):
    side, event, other = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    event.record()
    side.wait_event(event)
    other.record()
    side.synchronize()
    assert event.query() and side.query() and not other.query()


def test_a_thread_may_wait_for_another_threads_event(region):
    event = torch.cuda.Event()
    event.record()
    thread = threading.Thread(target=event.synchronize)
    thread.start()
    thread.join()
    assert event.query()


@pytest.mark.parametrize("is_side", [True, False])
def test_a_stream_is_busy_after_work_and_idle_after_a_wait(region, is_side):
    stream = torch.cuda.Stream() if is_side else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        torch.ones(3, device="cuda")
        assert not stream.query()
        while not stream.query():
            pass
        assert stream.query()
        torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    assert stream.query()


def test_the_seed_is_an_option_of_a_run(san_source):
    source = """
    import torch
    event, counts = torch.cuda.Event(), []
    for _ in range(20):
        event.record()
        counts.append(0)
        while not event.query():
            counts[-1] += 1
    print(counts)
    """
    printed = [san_source(source, "--device-tensors", "cuda", "--seed", seed)[2].out for seed in ("0", "0", "7")]
    assert printed[0] == printed[1] != printed[2]


def test_a_query_that_answers_true_is_no_wait():
    with emulated_cuda(), guard.no_sync(mode="record") as region:
        x, event = torch.ones(3, device="cuda"), torch.cuda.Event()
        for _ in range(8):
            x.mul_(2)
            event.record()
            while not event.query() or not torch.cuda.current_stream().query():
                pass
    assert [finding.rule for finding in region.report.findings] == []


def test_streams_and_events_are_of_the_device_that_was_chosen(region):
    torch.cuda.set_device(1)
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    assert stream.device == event.device == torch.cuda.current_stream().device == torch.device("cuda", 1)
    assert stream.device_index == 1
