"""Requests, devices that move as a scenario wants, and engines with one part broken, which must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import MOST_TURNS, VOCAB, Job, check_at_rest, checksum_loop, request, run, script, sizes
from torch import Tensor

from gapless.base.errors import GaplessError
from gapless.base.records import Request, StepPlan
from gapless.loop.loop import Loop
from gapless.model.seam import BatchShape
from gapless.step.keys import ForwardKey
from gapless.step.leader import Leader
from gapless.testing.checksum import ChecksumModel
from gapless.testing.sim import SimDevice

Tweak = Callable[[Loop], None]

BROKEN = (AssertionError, GaplessError, LookupError, ValueError)
"""How a broken engine shows: an assertion of ours or of the scenario, a failed program, a failed look-up."""


def job(key: int, prompt: list[int], new: int, arrives: int = 0, stop_ids: tuple[int, ...] = ()) -> Job:
    return Job(request(key, prompt, new, stop_ids), arrives, None)


def tokens(key: int, count: int) -> list[int]:
    """A prompt of that length, of its own for each key."""
    return [(key * 37 + place * 11 + key * place) % VOCAB for place in range(count)]


def play(loop: Loop, jobs: list[Job], most_turns: int = MOST_TURNS) -> Loop:
    """Run all jobs to their ends: the tokens are those of a direct computation, and nothing is left behind."""
    run(loop, jobs, check=False, most_turns=most_turns)
    for one in jobs:
        expected = one.expected()
        if one.flag == -1:
            expected = expected[: len(one.tokens)]
        assert one.tokens == expected, f"request {one.request.key} has wrong tokens"
    check_at_rest(loop)
    return loop


def crowd(seed: int, depth: int = 8, tweak: Tweak | None = None, mood: str | None = None, **options: bool) -> Loop:
    """A drawn script (shared prefixes, stops, aborts, a pool that is too small) on a drawn engine."""
    shape = sizes(seed)
    device = SimDevice(seed, mood, maps_host=seed % 2 == 0)
    loop = checksum_loop(device, shape, depth, **options)
    if tweak is not None:
        tweak(loop)
    return play(loop, script(seed, shape.max_len))


class ManyScores(ChecksumModel):
    """Every token has a score of its own, so that sampling has something to choose from."""

    def logits(self, hidden: Tensor) -> Tensor:
        ids = torch.arange(self.vocab_size, device=hidden.device)
        return ((hidden + 1) * (ids + 7) * 48_271 % 1_000_003).float() / 250_000


def collect(loop: Loop, requests: list[Request]) -> dict[int, list[int]]:
    """Submit all and run to the end; the tokens of each key."""
    for one in requests:
        loop.submit(one)
    settled: dict[int, list[int]] = {one.key: [] for one in requests}
    while loop.has_work():
        for item in loop.turn().tokens:
            for key, token, _ in item.entries():
                settled[key].append(token)
    check_at_rest(loop)
    return settled


class Prefers:
    """An adversary that at every touch runs all it can of the named streams, and others only when it is forced."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def moves(self, ready: Callable[[], list[Any]]) -> Iterator[Any]:
        while liked := [stream for stream in ready() if stream.name in self._names]:
            yield liked[0]

    def forced(self, ready: list[Any], needed: Any) -> Any:
        return next((stream for stream in ready if stream.name in self._names), needed)


class Log:
    """The plans of a loop: all of them, and those that are in flight now."""

    def __init__(self, loop: Loop) -> None:
        self.plans: list[StepPlan] = []
        self._loop = loop
        self._plan = loop.planner.plan
        loop.planner.plan = self.plan

    def plan(self) -> StepPlan | None:
        plan = self._plan()
        if plan is not None:
            self.plans.append(plan)
        return plan

    def in_flight(self) -> list[StepPlan]:
        return [flight.plan for flight in self._loop.flights]


def short_packets(loop: Loop) -> None:
    """A packet ring of two slots, whatever the depth: only the fences of its slots protect them."""
    executor = loop.launcher.executor
    executor.packets = loop.device.ring(2, executor.packets.slots[0].array.nbytes)


@contextmanager
def broken(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """With this part of the engine replaced, what runs inside must fail."""
    with patch.object(owner, name, replacement), pytest.raises(BROKEN):
        yield


@contextmanager
def must_fail() -> Iterator[None]:
    """For an engine that a scenario broke by its own hands."""
    with pytest.raises(BROKEN):
        yield


@contextmanager
def one_batch_for_all() -> Iterator[None]:
    """The integers from which a forward plans lie in one buffer, refilled by the next step that the host decides."""

    class Shared:
        """Fields of a BatchShape, but not of one step."""

    shared, exact = Shared(), Leader.exact

    def refill(*args: Any) -> ForwardKey:
        key = exact(*args)
        for name in (*BatchShape._fields, "rows", "tokens"):
            setattr(shared, name, getattr(key.batch, name))
        return key._replace(batch=shared)  # type: ignore[arg-type]

    with patch.object(Leader, "exact", refill):
        yield


class FakeCuda:
    """As much of torch.cuda as opening a device and waiting for a fence needs.

    While `busy`, events pass when a thread sleeps on one, or after very many questions.
    """

    PATIENCE = 50_000

    def __init__(self, one_handle: bool = False) -> None:
        self.one_handle = one_handle
        self.handles = 0
        self.busy = False
        self.questions = self.sleeps = 0
        self.events: list[_Event] = []

    def Stream(self, device: Any, priority: int) -> Any:
        self.handles += not self.one_handle
        return type("Stream", (), {"cuda_stream": self.handles or 1})()

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Any:
        self.events.append(_Event(self, blocking))
        return self.events[-1]

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> str:
        return "pool"

    def set_device(self, device: Any) -> None:
        """There is one."""


class _Event:
    def __init__(self, owner: FakeCuda, blocking: bool) -> None:
        self._owner = owner
        self.blocking = blocking

    def record(self, stream: Any) -> None:
        """Passed at once, unless the device is busy."""

    def query(self) -> bool:
        self._owner.questions += self._owner.busy
        return not self._owner.busy or self._owner.questions > FakeCuda.PATIENCE

    def synchronize(self) -> None:
        self._owner.sleeps += self._owner.busy
        self._owner.busy = False
