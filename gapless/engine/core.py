"""The back side of the engine: model, device and loop, built from one config."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np

from gapless.base import host
from gapless.base.config import EngineConfig, parse_depth
from gapless.base.errors import (
    EngineDeadError,
    EngineError,
    GaplessError,
    QueueFullError,
    RequestError,
)
from gapless.base.params import MAX_LOGPROBS, SamplingParams
from gapless.base.progress import announce
from gapless.base.records import Request, Turn
from gapless.device import Caps, Device, build, device_class, open_device
from gapless.engine import checkers
from gapless.engine.adapters import AdapterChanges, AdapterFiles
from gapless.engine.callbacks import AllowedTokens
from gapless.engine.frontdoor import open_assets
from gapless.engine.on_device import on_device
from gapless.engine.pauses import Pauses
from gapless.engine.processors import import_processors, try_out
from gapless.engine.seam import AdapterChange, Answer, EngineInfo, OperatorOrder
from gapless.engine.sizing import choose_sizes, most_captured, parameters, settle_dtype, step_bytes
from gapless.engine.stats import Stats, collect
from gapless.engine.tiers import EngineTiers, host_sizes
from gapless.engine.updates import WeightUpdates
from gapless.grammar.compiler import Compiler
from gapless.kernels import native
from gapless.kernels.choose import choose
from gapless.loop import mask_threads
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.loop.records import StepTable
from gapless.loop.watchdog import Watchdog, patience
from gapless.memory.events import PageEvents
from gapless.model.config import ModelConfig, load_config
from gapless.model.dense import DenseModel
from gapless.model.drafting import DRAFTERS
from gapless.model.loader import dtype_of, load_drafter, load_model
from gapless.pace.controllers import Controllers
from gapless.step.adapters import Adapters
from gapless.step.graphs import ALONE, ON_GPU, MixedSizes, buckets_up_to
from gapless.step.speculation import Speculation

if TYPE_CHECKING:
    from gapless.grammar.vocabulary import Vocabulary

SMALL_MODEL = 50_000_000
"""[parameters] Parameters below which one CPU thread computes a step: more threads would take the loop's core."""
SMALL_THREADS, SMALL_TIMES = 2, 128
"""[threads, times] Threads that share long prompts of a small model, and the multiple of the usual least shared work:
on two cores of an Intel Xeon the demo reads 4,000 tokens in 0.49 of the time, while one row, decoded by two threads,
got 0.86 of the tokens/s of one (`benchmarks/peers.py`)."""
TINY_MODEL = 8_000_000
"""[parameters] Parameters below which launching a short prompt on a CPU takes longer than the four padding tokens of an
average graph. At 12 million both take the same."""
FILLED_MODEL = 2_000_000_000
"""[parameters] Parameters above which launching a prompt's step on a GPU takes less than padding it to a larger
graph."""
WARM_UP_KEY = -1 << 62
WARM_UP_TOKENS = 2
"""Tokens of the warm-up prompt, one of them scored: on a slow processor a few more of a large model take a second."""
CAPTURE_SECONDS = 2.0
"""[s] Time limit for recording steps at a CPU's start: recording takes as long as running, and an eager step only a few
milliseconds more than a replay. On a GPU a later capture would stall all requests for many of their steps."""
MATCHER_SECONDS = 1.0
"""[s] Longest wait of an idle turn for a matcher; then late requests are refused."""


class EngineCore:
    """A loop over a loaded model. Implements `Core`; one thread drives it."""

    def __init__(
        self,
        device: Device,
        loop: Loop,
        info: EngineInfo,
        compiler: Compiler,
        tiers: EngineTiers,
        updates: WeightUpdates,
        changes: AdapterChanges | None = None,
    ) -> None:
        self.info = info
        self._tiers = tiers
        self.loop = loop
        self.bell = loop.bell
        self._device = device
        self._compiler = compiler
        self._changes = changes
        self.updates = updates
        self.pauses = Pauses(loop)
        self._matched: deque[Request] = deque()
        """Requests ready for the loop's queue, or waiting for new weights or the end of a pause."""
        self._allocations = 0
        """The device's allocation count at the end of start-up."""
        self._watchdog: Watchdog | None = None
        if info.watchdog_seconds and device.caps.real_time:
            self._watchdog = Watchdog(info.watchdog_seconds, lambda: loop.counters.steps, loop.wants_steps, device.fail)
            self._watchdog.start()

    def ready(self, startup_seconds: tuple[tuple[str, float], ...]) -> None:
        """Note the end of start-up."""
        self.info = self.info._replace(startup_seconds=startup_seconds)
        self._allocations = self._device.allocations()

    def submit(self, request: Request) -> None:
        if request.params.prefix_allowed_tokens_fn is not None:
            request = request._replace(matcher=AllowedTokens(request, self.info.vocab_size))
        ready, waiting = request.params.structured_outputs is None or request.matcher is not None, len(self._matched)
        if (self.held or not ready) and waiting >= self.loop.planner.waiting.limit:
            raise QueueFullError(f"{waiting} requests are waiting, which is the limit; try again later")
        if not ready:
            self._compiler.submit(request)
        elif self.held:
            self._matched.append(request)
        else:
            self.loop.submit(request)

    def abort(self, key: int) -> None:
        self._compiler.abort(key)
        self._matched = deque(request for request in self._matched if request.key != key)
        self.loop.abort(key)

    def change_adapter(self, change: AdapterChange, answer: Answer) -> None:

        def done(error: GaplessError | None) -> None:
            if self.loop.parts.adapters is not None:
                self.info = self.info._replace(adapters=tuple(self.loop.parts.adapters.names))
            answer(error)

        if self._changes is None:
            done(RequestError("this engine loads no adapters after its start: start it with --lora-dir", "lora_name"))
        else:
            self._changes.begin(change, done)

    def update_weights(self, path: str, answer: Answer) -> None:
        if self.pauses.keeps and self.loop.requests:
            text = "a pause holds requests that must end with the old weights: resume or abort them first"
            answer(RequestError(text, "model_path"))
        else:
            self.updates.begin(path, answer)

    def obey(self, order: OperatorOrder, answer: Answer) -> None:
        self.pauses.obey(order, answer)

    @property
    def held(self) -> bool:
        """Whether new requests wait outside the loop."""
        return self.updates.waits or self.pauses.waits

    def wakes(self, wake: Callable[[], None]) -> None:
        self._tiers.wake = wake

    def has_work(self) -> bool:
        waiting = self._compiler.waiting + len(self._matched) + (self._changes.waiting if self._changes else 0)
        return self.loop.has_work() or waiting > 0 or self.updates.under_way or self.pauses.asked

    def rest(self) -> bool:
        return self.loop.rest()

    def step(self) -> Turn:
        """Run one turn of the loop; without other work, wait for a matcher or an adapter.

        Raises:
            EngineError: a program failed on the device, the watchdog fired, or an invariant of ours broke.
        """
        refused = self._admit()
        changed = self._changes is not None and self._changes.take()
        changed = self.updates.take() or changed
        if not self.loop.has_work():
            if not (self.pauses.rested() or refused or changed) and self.bell.wait(MATCHER_SECONDS):
                self.bell.clear()
            return Turn([], [], refused)
        try:
            turn = self.pauses.turn()
        except EngineError:
            raise
        except Exception as error:
            raise EngineDeadError(f"the loop failed: {type(error).__name__}: {error}") from error
        return turn._replace(failed=refused + turn.failed)

    def _admit(self) -> list[tuple[int, GaplessError]]:
        """Queue the requests with finished matchers, up to the queue's limit. Returns the refused ones."""
        ready, refused = self._compiler.take() if self._compiler.waiting else ([], [])
        self._matched += ready
        while self._matched and not self.held:
            try:
                self.loop.submit(self._matched[0])
            except QueueFullError:
                break
            except RequestError as error:
                refused.append((self._matched[0].key, error))
            self._matched.popleft()
        return refused

    def stats(self) -> Stats:
        matched, held = len(self._matched), self.held
        grammars = self._compiler.report(ready=0 if held else matched)
        allocations = self._device.allocations() - self._allocations
        return collect(self.loop, matched if held else 0, grammars, allocations)

    def steps_after(self, step: int, since: int = 0) -> StepTable:
        return self.loop.records.after(step, since)

    def page_map(self) -> bytes:
        return b"".join([pool.page_map() for pool in self.loop.pools])

    def page_events(self) -> PageEvents | None:
        index, adapters = self.loop.planner.index, self.loop.parts.adapters
        if index is not None:
            index.events = PageEvents(self.loop.pools, adapters.name_of if adapters else str)
        return index.events if index else None

    def close(self) -> None:
        """Stop the watchdog, the compiler and the device. May be called in any state."""
        self._compiler.close()
        if self._changes:
            self._changes.close()
        if self._watchdog:
            self._watchdog.stop()
        self.loop.close()
        self._tiers.close()
        self.updates.close()  # last: files being read take time
        self._device.close()


def build_core(
    config: EngineConfig, device: Device | None = None, spent: Sequence[tuple[str, float]] = ()
) -> EngineCore:
    """Load the model, size the memory, warm up. `device` is already open, for tests.

    `spent` are the earlier parts of the start, and their seconds.

    Raises:
        ConfigError, CheckpointError: the user can mend it.
    """
    checkers.connect()
    parts = list(spent)
    with _timed(parts, "device", "opening the device"):
        model_config = load_config(config)
        if device is None and device_class(config.device).caps.kernels == "native":
            Thread(target=native.load, name="gapless-build", daemon=True).start()  # while the streams' C++ builds
        device = device or open_device(config.device, _threads(config, model_config))
    try:
        return _build_on(device, config, model_config, parts)
    except BaseException:
        device.close()
        raise


def _threads(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the number of computing threads on a CPU; 0 for most of its cores."""
    if config.threads or parameters(model_config) >= SMALL_MODEL:
        return config.threads
    return min(SMALL_THREADS, host.usable_cores()) if build.may_have(native.NAME) else 1


def _build_on(
    device: Device, config: EngineConfig, model_config: ModelConfig, spent: list[tuple[str, float]]
) -> EngineCore:
    config = on_device(device, lambda: settle_dtype(config, model_config, device.caps))
    tiers = EngineTiers(config)
    Thread(target=mask_threads.load, name="gapless-build", daemon=True).start()  # while the model loads
    kernels = choose(device.caps.kernels, dtype_of(config, model_config), config.batch_invariant)
    if not config.threads and parameters(model_config) < SMALL_MODEL:
        on_device(device, lambda: native.share_from(SMALL_TIMES))
    processors = import_processors(config.processors, device)
    with _timed(spent, "weights"):
        tiers.look_at_weights()
        model = on_device(device, lambda: load_model(config, device.torch_device, kernels))
        model_config = model.config  # confirmed by its weights
        drafting = on_device(device, lambda: speculation(config, device, model))
    files = adapters = None
    if (config.lora_modules or config.lora_dir) and model.adapters is not None:
        files = AdapterFiles(config, model_config, model.adapters, device)
        with _timed(spent, "adapters", "reading adapters"):
            adapters = Adapters(model.adapters, files.named())
    with _timed(spent, "memory", "sizing KV memory"):
        sizes = choose_sizes(config, model_config, model, device)
        name = tiers.name(model_config, model, device.kind)
        depth = parse_depth(config.depth)
        loop = on_device(
            device,
            lambda: build_loop(
                device,
                model,
                sizes,
                depth,
                model_name=name,
                prefix_caching=config.enable_prefix_caching,
                by_priority=config.scheduling_policy == "priority",
                # A user's budget is kept. A GPU takes less than 0.1 s for a usual one.
                bounds_stalls=device.caps.slow and not config.max_num_batched_tokens,
                max_itl_ns=int((config.max_itl or 0) * 1e6),
                kernels=kernels,
                buckets=_buckets(config, sizes),
                mixed=_mixed(device.caps, parameters(model_config), sizes.step_tokens),
                adapters=adapters,
                speculation=drafting,
                processors=processors,
                host=host_sizes(config),
                controllers=Controllers.named(config.controllers),
            ),
        )
    try_out(loop.launcher.program, device, exact=config.batch_invariant)
    info = EngineInfo(
        model=config.model,
        device=device.kind,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.vocab_size,
        max_model_len=sizes.max_len,
        max_num_seqs=sizes.rows,
        max_num_batched_tokens=sizes.step_tokens,
        pages=sizes.pages,
        page_size=sizes.page_size,
        depth=config.depth,
        parameters=parameters(model_config),
        adapters=tuple(config.adapters),
        processors=tuple(config.processors),
        tiers=tuple(tiers.kinds),
        kv_bytes=sizes.pages * model.page_bytes(sizes.page_size),
        watchdog_seconds=patience(config.watchdog_seconds, _operations(model_config, sizes), device.caps.operations),
    )
    # The watchdog runs from here: a device that hangs in its first step is a failed start, not an endless one.
    compiler = Compiler(lambda: _vocabulary(config, model.vocab_size), loop.bell.ring, sizes.queue)
    changes = AdapterChanges(config.lora_dir, files, loop) if files and config.lora_dir else None
    updates = WeightUpdates(loop, model, device, name)
    core = EngineCore(device, loop, info, compiler, tiers, updates, changes)
    try:
        if kernels.ahead is not None:
            with _timed(spent, "kernels", "loading kernels (the first start compiles them)"):
                loop.launcher.compile()
        if device.caps.own_memory:  # after libraries have allocated their workspaces: torch's products, 32 MiB
            step = step_bytes(config, model, device.caps, sizes.rows, sizes.step_tokens)
            device.reserve(step.eager, step.graphs)
        with _timed(spent, "warm-up", "warming up"):
            _warm_up(loop, sizes, largest=device.caps.own_memory)
        with _timed(spent, "graphs"):
            loop.capture(CAPTURE_SECONDS if device.caps.slow else inf)
        if loop.parts.masks is not None and device.caps.real_time:
            loop.parts.masks.threads = mask_threads.start(loop.parts.masks.mail, polls=device.caps.polled)
        tiers.attach(loop)
    except BaseException:
        core.close()
        raise
    core.ready(tuple(spent))
    return core


def speculation(config: EngineConfig, device: Device, model: DenseModel) -> Speculation | None:
    asked = config.speculation
    if asked is None:
        return None
    rows = config.max_num_seqs or device.caps.rows
    drafts, most = asked.num_speculative_tokens, min(rows, device.caps.drafted_rows)
    if make := DRAFTERS.get(asked.method):
        drafter, learner = make(asked, device.torch_device)
        return Speculation(drafts, drafter, most, learner=learner)
    return Speculation(drafts, None, most, load_drafter(config, model, rows))


def _vocabulary(config: EngineConfig, size: int) -> Vocabulary:
    """Read the model's tokenizer, at the first request with a form of output."""
    from gapless.grammar.vocabulary import make_vocabulary  # imports llguidance, which most engines never need

    assets = open_assets(config)
    return make_vocabulary(assets.tokenizer, size, assets.eos_ids)


def _buckets(config: EngineConfig, sizes: Sizes) -> tuple[int, ...]:
    """Return the row counts of captured steps."""
    most = min(sizes.rows, config.max_cudagraph_capture_size or sizes.rows)
    return () if config.enforce_eager else buckets_up_to(most)


def _mixed(caps: Caps, parameters: int, step_tokens: int) -> MixedSizes | None:
    """Return the sizes of captured steps with chunks; None for none."""
    if not caps.pads:
        return ALONE if caps.slow and parameters < TINY_MODEL else None
    most = most_captured(step_tokens) if parameters < FILLED_MODEL else 0
    return ON_GPU._replace(stand_ins=tuple(tokens for tokens in ON_GPU.stand_ins if tokens <= most))


def _operations(config: ModelConfig, sizes: Sizes) -> float:
    """Return the operations of the longest step: every token meets all parameters, and a whole context in attention."""
    attention = 2 * config.layers * config.heads * config.head_dim * sizes.max_len
    return 2.0 * sizes.step_tokens * (parameters(config) + attention)


def _warm_up(loop: Loop, sizes: Sizes, largest: bool) -> None:
    """Run requests through the whole loop, to wake thread pools, libraries and kernels before ready.

    First a short one; then, if `largest`, a step of the most tokens: a GPU without the memory for it fails now. A CPU
    would take seconds for such a step.
    """
    longest = sizes.max_len - 1
    whole, rest = divmod(sizes.step_tokens, longest)
    together = ([longest] * whole + [rest] * (rest > 0))[: min(sizes.rows, sizes.queue)] if largest else []
    params = SamplingParams(temperature=0.5, top_k=5, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    key = WARM_UP_KEY
    for lengths in ([min(WARM_UP_TOKENS, longest)], together):
        for length in lengths:
            loop.submit(Request(key, np.zeros(length, np.int32), params, 0, (), 0, length + 1))
            key += 1
        while loop.has_work():
            loop.turn()
    if loop.parts.transfers is not None:
        loop.parts.transfers.warm_up()
    for pool in loop.pools:
        pool.forget()


@contextmanager
def _timed(spent: list[tuple[str, float]], what: str, text: str = "") -> Iterator[None]:
    """Add the seconds of a part of the start, and show `text`; without it, the code inside reports progress."""
    if text:
        announce(text)
    begin = time.perf_counter()
    yield
    spent.append((what, round(time.perf_counter() - begin, 3)))
