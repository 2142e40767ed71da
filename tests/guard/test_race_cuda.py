"""CUDA streams and events under no_race, emulated: what orders whom, although everything runs at once and in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless import guard
from gapless.guard.emulate import emulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


class Bench:
    """Two streams, an event, tensors on the device, pinned and pageable memory."""

    def __init__(self, checker) -> None:
        self.checker = checker
        self.one, self.other = torch.cuda.Stream(stream_id=0x10), torch.cuda.Stream(stream_id=0x20)
        self.event = torch.cuda.Event(blocking=True)
        self.gpu, self.gpu2 = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        self.pinned, self.pageable = torch.zeros(4, pin_memory=True), torch.zeros(4)
        for name in ("gpu", "gpu2"):
            checker.register(name, getattr(self, name))
        for name in ("pinned", "pageable"):
            checker.register(name, getattr(self, name), host=True)


def races_of(program) -> list:
    with emulated_cuda(), guard.no_sync(mode="record"), guard.no_race("record") as checker:
        program(Bench(checker))
    return checker.races


def blocking_copy_home(b: Bench) -> None:
    with torch.cuda.stream(b.one):
        b.gpu.fill_(1)
        b.pinned.copy_(b.gpu)
    assert b.pinned.tolist() == [1, 1, 1, 1]
    b.pinned.fill_(2)


def copy_from_pageable_memory(b: Bench) -> None:
    with torch.cuda.stream(b.one):
        b.gpu.copy_(b.pageable, non_blocking=True)
    b.pageable.fill_(2)


def a_late_copy_home_is_no_overwrite(b: Bench) -> None:
    with torch.cuda.stream(b.one):
        b.gpu2.copy_(b.pinned, non_blocking=True)
        b.pinned.copy_(b.gpu, non_blocking=True)
    b.one.synchronize()


@pytest.mark.parametrize("program", [blocking_copy_home, copy_from_pageable_memory, a_late_copy_home_is_no_overwrite])
def test_a_program_in_order_has_no_race(program):
    assert races_of(program) == []


def event_before_the_work(b: Bench) -> None:
    b.event.record(b.one)
    with torch.cuda.stream(b.one):
        b.gpu.fill_(1)
    b.event.wait(b.other)
    with torch.cuda.stream(b.other):
        b.gpu.sum()


def wait_on_the_wrong_stream(b: Bench) -> None:
    with torch.cuda.stream(b.one):
        b.gpu.fill_(1)
    b.event.record(b.one)
    b.event.wait()
    with torch.cuda.stream(b.other):
        b.gpu.sum()


def result_read_early(b: Bench) -> None:
    with torch.cuda.stream(b.one):
        b.pinned.copy_(b.gpu, non_blocking=True)
    b.pinned.tolist()


WRONG = {
    event_before_the_work: ("gpu", "none has been recorded after it"),
    wait_on_the_wrong_stream: ("gpu", "is not waited for"),
    result_read_early: ("pinned", "thread MainThread reads 'pinned' without waiting for a fence of stream cuda:0 0x10"),
}


@pytest.mark.parametrize("program", WRONG)
def test_a_program_out_of_order_has_one_race(program):
    buffer, words = WRONG[program]
    (race,) = races_of(program)
    assert race.buffer == buffer and words in race.missing, race.missing
    assert race.first.site.function == race.second.site.function == program.__name__


def test_of_two_operators_the_later_one_must_wait():
    """However long ago its stream was last fenced."""

    def program(b: Bench) -> None:
        with torch.cuda.stream(b.other):
            b.gpu2.fill_(1)
        b.event.record(b.one)
        with torch.cuda.stream(b.one):
            b.gpu.fill_(1)
        with torch.cuda.stream(b.other):
            b.gpu.sum()

    (race,) = races_of(program)
    assert race.missing.startswith("stream cuda:0 0x20 reads 'gpu' without waiting for a fence of stream cuda:0 0x10")


@pytest.mark.parametrize("waits", [True, False])
def test_a_numpy_write_before_the_copy_is_known_to_be_done(waits):
    def program(b: Bench) -> None:
        array = b.pinned.numpy()
        with torch.cuda.stream(b.one):
            b.gpu.copy_(b.pinned, non_blocking=True)
        b.event.record(b.one)
        if waits:
            b.event.synchronize()
        array[:] = 5
        b.event.synchronize()

    assert [race.rule for race in races_of(program)] == ([] if waits else ["overwritten"])


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
        agents = {name: bench.checker.device.agent_of(getattr(bench, name)) for name in AGENTS[1:]}
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
            with torch.cuda.stream(getattr(self.bench, who)):
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
def test_accesses_race_if_no_path_of_the_graph_orders_them(program):
    played = []
    races_of(lambda bench: played.append(Played(bench, program)))
    assert played[0].found == played[0].races()
