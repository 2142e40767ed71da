"""CUDA streams and events under no_race, played by stand-ins: what orders whom. Nothing here runs on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gapless.guard.patches import Patches
from gapless.guard.race import no_race
from gapless.guard.race_cuda import CudaWatch


def fake_cuda():
    """torch.cuda as far as the checker uses it. Every stream is always idle."""

    class Stream:
        current: Stream

        def __init__(self, handle: int) -> None:
            self.device, self.cuda_stream = torch.device("cuda", 0), handle

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

        def __enter__(self) -> None:
            self.before, Stream.current = Stream.current, self

        def __exit__(self, *error: object) -> None:
            Stream.current = self.before

    class Event:
        def record(self, stream=None) -> None:
            pass

        def wait(self, stream=None) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

    Stream.current = Stream(0)
    return SimpleNamespace(
        Stream=Stream, Event=Event, current_stream=lambda: Stream.current, synchronize=lambda device=None: None,
        is_current_stream_capturing=lambda: False,
    )  # fmt: skip


class Watch(CudaWatch):
    """Chosen CPU tensors stand for tensors on the GPU, others for pinned memory."""

    def __init__(self, checker, cuda, gpu: list[Tensor], pinned: list[Tensor]) -> None:
        super().__init__(checker, cuda, lambda device: cuda.current_stream().cuda_stream)
        self.gpu = {tensor.untyped_storage().data_ptr() for tensor in gpu}
        self.pinned = {tensor.untyped_storage().data_ptr() for tensor in pinned}

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.gpu

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned


class Bench:
    def __init__(self) -> None:
        self.cuda = fake_cuda()
        self.one, self.other = self.cuda.Stream(0x10), self.cuda.Stream(0x20)
        self.gpu, self.gpu2 = torch.zeros(4), torch.zeros(4)
        self.pinned, self.pageable = torch.zeros(4), torch.zeros(4)
        self.event = self.cuda.Event()

    def run(self, program) -> list:
        with no_race("record") as checker:
            for name in ("gpu", "gpu2"):
                checker.register(name, getattr(self, name))
            for name in ("pinned", "pageable"):
                checker.register(name, getattr(self, name), host=True)
            checker.cuda = Watch(checker, self.cuda, [self.gpu, self.gpu2], [self.pinned])
            checker.follows_results = True
            self.checker = checker
            with Patches() as patches:
                checker.cuda.install(patches)
                program(self)
        return checker.races


def wait_event(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
        b.event.record()
    b.event.wait(b.other)
    with b.other:
        b.gpu.sum()


def stage_and_synchronize(b: Bench) -> None:
    b.pinned.fill_(1)
    with b.one:
        b.gpu.copy_(b.pinned, non_blocking=True)
    b.event.record(b.one)
    b.event.synchronize()
    b.pinned.fill_(2)


def stage_and_query(b: Bench) -> None:
    with b.one:
        b.gpu.copy_(b.pinned, non_blocking=True)
    b.event.record(b.one)
    assert b.event.query()
    b.pinned.fill_(2)


def blocking_copy_home(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
        b.pinned.copy_(b.gpu)
    assert b.pinned.tolist() == [1, 1, 1, 1]
    b.pinned.fill_(2)


def copy_from_pageable_memory(b: Bench) -> None:
    with b.one:
        b.gpu.copy_(b.pageable, non_blocking=True)
    b.pageable.fill_(2)


def read_one_number(b: Bench) -> None:
    with b.one:
        b.pinned.copy_(b.gpu, non_blocking=True)
        b.gpu[0].item()
    b.pinned.tolist()


def stream_synchronize(b: Bench) -> None:
    with b.one:
        b.pinned.copy_(b.gpu, non_blocking=True)
    b.one.synchronize()
    b.pinned.tolist()


def device_synchronize(b: Bench) -> None:
    with b.one:
        b.pinned.copy_(b.gpu, non_blocking=True)
    b.cuda.synchronize()
    b.pinned.tolist()


def through_the_host(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
    b.one.synchronize()
    with b.other:
        b.gpu.sum()


def through_two_events(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
    b.event.record(b.one)
    b.event.wait(b.other)
    second = b.cuda.Event()
    second.record(b.other)
    second.wait()
    b.gpu.sum()


def a_late_copy_home_is_no_overwrite(b: Bench) -> None:
    with b.one:
        b.gpu2.copy_(b.pinned, non_blocking=True)
        b.pinned.copy_(b.gpu, non_blocking=True)
    b.one.synchronize()


RIGHT = [
    wait_event,
    stage_and_synchronize,
    stage_and_query,
    blocking_copy_home,
    copy_from_pageable_memory,
    read_one_number,
    stream_synchronize,
    device_synchronize,
    through_the_host,
    through_two_events,
    a_late_copy_home_is_no_overwrite,
]


@pytest.mark.parametrize("program", RIGHT)
def test_a_program_in_order_has_no_race(program):
    assert Bench().run(program) == []


def no_event(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
    with b.other:
        b.gpu.sum()


def event_before_the_work(b: Bench) -> None:
    b.event.record(b.one)
    with b.one:
        b.gpu.fill_(1)
    b.event.wait(b.other)
    with b.other:
        b.gpu.sum()


def event_that_was_never_recorded(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
    b.event.wait(b.other)
    with b.other:
        b.gpu.sum()


def event_recorded_again(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
    b.event.record(b.one)
    b.event.record(b.other)
    b.event.wait()
    b.gpu.sum()


def wait_on_the_wrong_stream(b: Bench) -> None:
    with b.one:
        b.gpu.fill_(1)
    b.event.record(b.one)
    b.event.wait()
    with b.other:
        b.gpu.sum()


def staging_reused(b: Bench) -> None:
    with b.one:
        b.gpu.copy_(b.pinned, non_blocking=True)
    b.pinned.fill_(2)


def result_read_early(b: Bench) -> None:
    with b.one:
        b.pinned.copy_(b.gpu, non_blocking=True)
    b.pinned.tolist()


WRONG = {
    no_event: ("gpu", "stream cuda:0 0x20 reads 'gpu' without waiting for a fence of stream cuda:0 0x10"),
    event_before_the_work: ("gpu", "none has been recorded after it"),
    event_that_was_never_recorded: ("gpu", "none has been recorded after it"),
    event_recorded_again: (
        "gpu",
        "stream cuda:0 default reads 'gpu' without waiting for a fence of stream cuda:0 0x10",
    ),
    wait_on_the_wrong_stream: ("gpu", "is not waited for"),
    staging_reused: ("pinned", "thread MainThread writes 'pinned' without waiting for a fence of stream cuda:0 0x10"),
    result_read_early: ("pinned", "thread MainThread reads 'pinned' without waiting for a fence of stream cuda:0 0x10"),
}


@pytest.mark.parametrize("program", WRONG)
def test_what_is_not_ordered(program):
    buffer, words = WRONG[program]
    (race,) = Bench().run(program)
    assert race.buffer == buffer and words in race.missing, race.missing
    assert race.first.site.function == race.second.site.function == program.__name__


@pytest.mark.parametrize("waits", [True, False])
def test_a_numpy_write_before_the_copy_is_known_to_be_done(waits):
    def program(b: Bench) -> None:
        array = b.pinned.numpy()
        with b.one:
            b.gpu.copy_(b.pinned, non_blocking=True)
        b.event.record(b.one)
        if waits:
            b.event.synchronize()
        array[:] = 5
        b.event.synchronize()

    assert [race.rule for race in Bench().run(program)] == ([] if waits else ["overwritten"])


# Against a search of the graph of what comes before what.

AGENTS = ("host", "one", "other")
CELLS = 4
uses = st.tuples(st.just("use"), st.sampled_from(AGENTS), st.integers(0, CELLS - 1), st.booleans())
steps = st.one_of(
    uses,
    uses,
    st.tuples(st.sampled_from(("record", "wait")), st.sampled_from(AGENTS[1:])),
    st.tuples(st.just("synchronize")),
)


class Played:
    """Steps on one event and two streams that use the pinned buffer, and what comes before what by definition."""

    def __init__(self, bench: Bench, program: list) -> None:
        self.bench = bench
        self.before: list[set[int]] = []
        self.last: dict[str, int] = {}
        self.recorded: list[int] = []
        self.uses: list[tuple[int, str, int, bool]] = []
        self.found: set[tuple[str, frozenset[str]]] = set()
        bench.checker.note_race = self.note
        agents = {name: bench.checker.cuda.agent_of(getattr(bench, name)) for name in AGENTS[1:]}
        self.names = {agent.index: name for name, agent in agents.items()}
        for what, *rest in program:
            getattr(self, what)(*rest)

    def note(self, actor, buffer, kind, note, other) -> bool:
        if buffer.name == "pinned":
            pair = frozenset(self.names.get(index, "host") for index in (actor.index, other.agent))
            self.found.add((other.part, pair))
        return False

    def node(self, who: str, *after: int) -> None:
        """Something that `who` does. What a stream does comes after what the host did before it asked for that."""
        known = {*after, *(self.last[agent] for agent in {who, "host"} if agent in self.last)}
        self.before.append(known.union(*(self.before[node] for node in known)))
        self.last[who] = len(self.before) - 1

    def use(self, who: str, cell: int, writes: bool) -> None:
        self.node(who)
        self.uses.append((self.last[who], who, cell, writes))
        pinned, gpu, gpu2 = (t[cell : cell + 1] for t in (self.bench.pinned, self.bench.gpu, self.bench.gpu2))
        if who == "host":
            _ = pinned.fill_(1) if writes else pinned.sum()
        else:
            with getattr(self.bench, who):
                _ = pinned.copy_(gpu, True) if writes else gpu2.copy_(pinned, True)

    def record(self, who: str) -> None:
        self.node(who)
        self.recorded = [self.last[who]]
        self.bench.event.record(getattr(self.bench, who))

    def wait(self, who: str) -> None:
        self.node(who, *self.recorded)
        self.bench.event.wait(getattr(self.bench, who))

    def synchronize(self) -> None:
        self.node("host", *self.recorded)
        self.bench.event.synchronize()

    def races(self) -> set[tuple[str, frozenset[str]]]:
        return {
            (f"bytes {4 * cell}..{4 * cell + 4}", frozenset((one, other)))
            for i, one, cell, writes in self.uses
            for j, other, same, also in self.uses
            if i < j and one != other and cell == same and i not in self.before[j] and (writes or also)
        }


@settings(max_examples=100, deadline=None)
@given(st.lists(steps, min_size=10, max_size=30))
def test_what_races_is_what_nothing_orders(program):
    played = []
    Bench().run(lambda bench: played.append(Played(bench, program)))
    assert played[0].found == played[0].races()


def test_the_methods_are_put_back():
    bench = Bench()
    before = dict(vars(bench.cuda.Event))
    bench.run(lambda b: None)
    assert dict(vars(bench.cuda.Event)) == before
