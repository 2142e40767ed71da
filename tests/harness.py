"""A whole engine over the checksum model, driven by a script that a seed draws. Used by several rooms' tests."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from page_contents import Contents
from torch import Tensor
from torch._C import DisableTorchFunction

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import AcceleratorDevice, CpuDevice, Device, cpu_native
from gapless.engine.core import EngineCore
from gapless.engine.on_device import on_device
from gapless.kernels import native
from gapless.kernels.seam import Kernels
from gapless.loop.loop import Loop
from gapless.loop.spec import Sizes
from gapless.model.seam import KVCache, StepInputs
from gapless.step.lanes.cut import EVERY_FILTERS, CutKey
from gapless.step.lanes.score import ScoreKey
from gapless.step.logprobs import WIDTHS
from gapless.testing.checksum import ChecksumModel, answer
from gapless.testing.loops import loop_of
from gapless.testing.scenario import Caller, Player
from gapless.testing.scenario import check_at_rest as check_nothing_held

VOCAB = 97
MOST_TURNS = 1_000
"""The longest sound run of the suite takes 258: an engine that goes on longer has lost a request."""


def capturing_cpu() -> CpuDevice:
    """Return a CPU device that captures; without a compiler the test is skipped."""
    device = CpuDevice(threads=1)
    if not device.caps.captures:
        device.close()
        pytest.skip(f"no native streams: {cpu_native.reason()}")
    return device


def tokens_of(core: EngineCore) -> dict[int, list[int]]:
    """Run a core until its requests have ended; return their tokens since now."""
    found: dict[int, list[int]] = {}
    while core.has_work():
        for settled in core.step().tokens:
            for key, token, _ in settled.entries():
                found.setdefault(key, []).append(token)
    return found


class Job(Caller):
    """A caller of the checksum model over VOCAB, whose tokens are known."""

    def expected(self) -> list[int]:
        """All tokens of an undisturbed run, by direct computation."""
        return answer(self.request, VOCAB)

    def check(self, why: object = None) -> None:
        """Fail unless its tokens are the expected ones: all of them, or the first ones if it was aborted."""
        check_tokens([self], lambda request: self.expected(), why)


def check_tokens(jobs: list[Job], direct: Callable[[Request], list[int]], why: object = None) -> None:
    """Fail unless each job has the tokens that `direct` gives for its request, or its first ones if it was aborted."""
    for job in jobs:
        tokens = direct(job.request)
        assert job.tokens == (tokens[: len(job.tokens)] if job.flag == -1 else tokens), why or job.request


def request(key: int, prompt: Iterable[int], new: int, stop_ids: tuple[int, ...] = (), **asks: Any) -> Request:
    """A greedy request for `new` tokens, unless it asks for something else."""
    own = {name: asks.pop(name) for name in ("adapter", "matcher", "priority", "salt", "transfer") if name in asks}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **asks})
    tokens = np.array(prompt, np.int32)
    least, most = len(tokens) + params.min_tokens, len(tokens) + new
    return Request(key, tokens, params, params.seed or 0, stop_ids, least, most, **own)


def ask(key: int, prompt: Iterable[int], arrives: int = 0, new: int = 6, **asks: Any) -> Job:
    return Job(request(key, prompt, new, **asks), arrives, None)


def script(seed: int, max_len: int) -> list[Job]:
    """Arrivals, shared prefixes, stop ids, lengths and aborts, all from the seed."""
    rng = random.Random(seed)
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_len // 2))] for _ in range(2)]
    jobs, turn = [], 0
    for key in range(rng.randrange(3, 9)):
        turn += rng.choice((0, 0, 1, 3, 9))
        prompt = list(rng.choice(shared)) if rng.random() < 0.6 else []
        prompt += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, max_len // 3))]
        length = min(max_len, len(prompt) + rng.choice((1, 2, 5, 12, 30, 30)))
        stops = tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3))))
        request = Request(
            key=key,
            tokens=np.array(prompt, np.int32),
            params=SamplingParams(temperature=0.0, max_tokens=None),
            seed=rng.randrange(2**63),
            stop_ids=stops,
            min_len=0,
            max_len=length,
            priority=rng.choice((0, 0, 1)),
        )
        aborts = rng.randrange(6) if rng.random() < 0.2 else None
        jobs.append(Job(request, turn, aborts))
    return jobs


def sizes(seed: int) -> Sizes:
    """A tiny engine: few rows, and a pool that barely holds one longest sequence."""
    rng = random.Random(seed + 1)
    rows, page_size, max_len = rng.randrange(2, 6), rng.choice((2, 4, 8)), 48
    least = -(-max_len // page_size)
    pages = 1 + least + rng.randrange(3)
    tokens = rows + rng.randrange(12)
    return Sizes(rows, max_len, pages, page_size, tokens, queue=64, slots=rng.randrange(1, rows + 1))


_LOOKS = torch.library.Library("gapless_looks", "DEF")
_LOOKS.define("given(int model, Tensor[] inputs, int columns, int[] plan) -> ()")
_LOOKING: WeakValueDictionary[int, LookingModel] = WeakValueDictionary()


def _given(model: int, inputs: list[Tensor], columns: int, plan: list[int]) -> None:
    _LOOKING[model].note(inputs, columns, plan)


_LOOKS.impl("given", _given, "CPU")


class LookingModel(ChecksumModel):
    """Looks at what it was given, behind each step and on its stream: a step itself reads nothing on the host.

    It is given its inputs by an operator, so that it has those of a replayed step too.
    """

    given: tuple[StepInputs, tuple[int, ...], KVCache]
    _lasting: tuple[StepInputs, KVCache]
    """Inputs whose page tables are those of every step, and the cache."""

    def forward(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> Tensor:
        _LOOKING[id(self)] = self
        self._lasting = inputs, cache
        ours = [inputs.ids, inputs.positions, inputs.slots, inputs.kv_lens, inputs.rows]
        ours += [other.slots for other in inputs.others]
        torch.ops.gapless_looks.given(id(self), ours, inputs.columns, plan)
        return super().forward(inputs, plan, cache)

    def note(self, inputs: list[Tensor], columns: int, plan: list[int]) -> None:
        """The step runs, and these are its inputs."""
        lasting, cache = self._lasting
        given, slots = inputs[:5], inputs[5:]
        others = [other._replace(slots=own) for other, own in zip(lasting.others, slots, strict=True)]
        self.given = StepInputs(*given, lasting.page_table, columns, None, tuple(others)), tuple(plan), cache

    def look_now(self) -> None:
        # What a test reads is no call of the engine, which no_sync would have to look at.
        with DisableTorchFunction():
            self.look(*self.given)

    def look(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> None:
        """What `forward` was given, when the step has run. May read; an assertion that fails here fails the device."""
        raise NotImplementedError


class WaryModel(LookingModel):
    """Asserts what no token would show: inert rows write to the null page, others never, and no slot twice."""

    def look(self, inputs: StepInputs, plan: tuple[int, ...], cache: KVCache) -> None:
        slots, positions, lengths = inputs.slots.tolist(), inputs.positions.tolist(), inputs.kv_lens.tolist()
        rows, ends = inputs.rows.tolist(), itertools.accumulate(plan)
        assert all(length == 1 for row, length in zip(rows, lengths, strict=True) if row == 0), "a null row that reads"
        # A row past its first position reads two entries or more, unless inert. Null rows stand there.
        each = zip(rows, lengths, ends, strict=True)
        inert = sum(row == 0 or (length == 1 and positions[end - 1] > 0) for row, length, end in each)
        real = [slot for slot in slots if slot >= cache.page_size]
        assert slots.count(0) == len(slots) - len(real) == inert, "the null page is for inert rows, and for all of them"
        assert len(set(real)) == len(real), "two tokens in one slot"


def look_behind_steps(loop: Loop, model: ChecksumModel) -> Loop:
    """Have a LookingModel look."""
    if not isinstance(model, LookingModel):
        return loop
    executor = loop.launcher.executor
    enqueue = executor.enqueue

    @functools.wraps(enqueue)
    def enqueue_and_look(*args: Any) -> None:
        enqueue(*args)
        loop.device.compute.launch(model.look_now)

    executor.enqueue = enqueue_and_look
    return loop


def checksum_loop(
    device: Device, shape: Sizes, depth: int | None, kind: type[ChecksumModel] = ChecksumModel, **options: Any
) -> Loop:
    return model_loop(kind(VOCAB, shape.max_len), device, shape, depth, **options)


def model_loop(model: ChecksumModel, device: Device, shape: Sizes, depth: int | None, **options: Any) -> Loop:
    """An engine over a model that a test looks through. Short runs capture nothing on the way, unless `options` do."""
    options = {"patience": 16, **options}

    def build() -> Loop:
        return loop_of(device, model, shape, depth, model_name="checksum", **options)

    # An accelerator's streams do not wait for the default one, on which tables would be made.
    return look_behind_steps(on_device(device, build) if isinstance(device, AcceleratorDevice) else build(), model)


def kernels_for(seed: int, device: Device | None = None) -> Kernels | None:
    """Plain PyTorch for one seed in seven, the C++ operations for the others, whose steps take a tenth of the time; a
    device with memory of its own has its own.

    The two are compared operation by operation in tests/kernels; here it is what is around them that is looked at. Not
    for engines that are broken on purpose: C++ writes wherever their packets say.
    """
    own = device is not None and device.caps.own_memory
    return native.load() if seed % 7 != 4 and not own else None


def captures_at_once(shape: Sizes) -> dict[str, Any]:
    """Options of a loop that captures what it misses once, in one bucket that is often filled up with null rows.

    With the patience of `model_loop` most scripts end before that, and so few rows all have buckets of their own.
    """
    return {"patience": 1, "buckets": (shape.rows,)}


def small_outbox_ring(loop: Loop, slots: int) -> None:
    """Give the loop another outbox ring, of `slots` slots at most, before it has launched anything."""
    executor = loop.launcher.executor
    lines = executor.buffers.lines
    slots = min(slots, len(lines))
    executor.outboxes = ring = loop.device.ring(slots, lines[0].numel() * 4)
    executor.host_lines = ring.memory.view(torch.int32)
    # The device moves on from slot to slot by itself: it must know as many as the ring has.
    lines = executor.host_lines if loop.device.caps.maps_host else lines[:slots]
    executor.buffers = executor.buffers._replace(lines=lines, scores=lines)


def one_line_for_all(loop: Loop) -> None:
    """All steps share one outbox on the device, whose slots it counts modulo those that it knows."""
    executor = loop.launcher.executor
    lines = executor.buffers.lines[:1]
    executor.buffers = executor.buffers._replace(lines=lines, scores=lines)
    write = loop.launcher.leader.write

    def write_first(plan: Any, decision: Any, requests: Any, words: Any, outbox: int) -> None:
        write(plan, decision, requests, words, 0)

    def copy_lines(outbox: Any, start: int, end: int) -> None:
        loop.device.download(outbox.tensor.view(torch.int32)[start:end], lines[0, start:end])

    loop.launcher.leader.write = write_first  # type: ignore[method-assign]
    executor.copy_lines = copy_lines  # type: ignore[method-assign]


def capture_all(loop: Loop) -> None:
    """Every graph that common decode steps can ask for, also of a model whose graphs depend on a bound of lengths."""
    graphs = loop.launcher.graphs
    graphs.warm()
    bounds = range(1, loop.rows.tokens.shape[1] + 1)
    wanted = {graphs.decode_key(*what) for what in itertools.product(graphs.buckets, bounds)}
    lanes = {loop.launcher.leader.lanes.size(count) for count in range(1, loop.rows.size + 1)}
    wanted |= {CutKey(size, filters) for size in lanes for filters in EVERY_FILTERS}
    wanted |= {ScoreKey(size, width) for size in lanes for width in WIDTHS}
    graphs.capture(tuple(key for key in wanted if key is not None and not graphs.has(key)))
    loop.log.forget()


class Run(Player):
    """Plays jobs; with `looks`, it checks all leases each turn, and what pages hold that a transfer may read."""

    def __init__(self, loop: Loop, jobs: list[Job], looks: bool) -> None:
        super().__init__(loop, jobs)
        self._looks = looks
        self._contents = contents_of(loop, jobs) if looks else None

    def check(self) -> None:
        if self._looks:
            super().check()
        if self._contents is not None:
            self._contents.check_settled(self.loop)


def run(loop: Loop, jobs: list[Job], check: bool = True, most_turns: int = MOST_TURNS) -> int:
    """Drive the loop until every job has ended; returns the number of turns. `check` looks at all leases each turn."""
    player = Run(loop, jobs, check)
    player.run(most_turns)
    return player.turns


def contents_of(loop: Loop, jobs: list[Job]) -> Contents | None:
    """What the jobs' pages hold, where prefixes are shared."""
    index, program = loop.planner.index, loop.launcher.executor.program
    # Reading the memory of an accelerator waits for it, which these runs forbid.
    if index is None or not isinstance(program.model, ChecksumModel) or not program.cache.data.is_cpu:
        return None
    contents = Contents(index.hasher)
    contents.know(([*job.request.tokens.tolist(), *job.expected()], job.request.salt) for job in jobs)
    return contents


def check_at_rest(loop: Loop) -> None:
    """Nothing runs, nothing is held, and no line ever came too late."""
    check_nothing_held(loop)
    assert loop.counters.dropped_identity == 0, f"{loop.counters.dropped_identity} late lines"
