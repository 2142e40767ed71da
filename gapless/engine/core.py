"""The back side of the engine: model, device and loop, built from one config."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np

from gapless.base.config import EngineConfig, parse_depth
from gapless.base.errors import ConfigError, DeviceError, EngineDeadError, EngineError, UserError
from gapless.base.params import MAX_LOGPROBS, SamplingParams
from gapless.base.progress import tell
from gapless.base.records import Request, StepTokens
from gapless.device import Device, open_device
from gapless.engine import checkers
from gapless.engine.seam import EngineInfo, Started, Stats
from gapless.kernels.choose import choose
from gapless.kernels.scores import PIECE_BYTES
from gapless.kernels.tables import slot_bytes
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.loop.records import StepTable
from gapless.loop.watchdog import Watchdog, patience
from gapless.memory.pages import PageCounts
from gapless.model.config import ModelConfig, load_config, model_length
from gapless.model.dense import DenseModel
from gapless.model.loader import dtype_of, load_model
from gapless.step.graphs import ALONE, CHUNKS, MOST, ON_GPU, TOKENS, MixedSizes, buckets_up_to

T = TypeVar("T")

SMALL_MODEL = 50_000_000
"""Parameters below which one CPU thread computes a step: more of them would take the core that the loop needs."""
TINY_MODEL = 8_000_000
"""Parameters below which launching a short prompt on a CPU takes longer than four prompt tokens more, of which a graph
holds as many on average. With 12 million both take the same."""
FILLED_MODEL = 2_000_000_000
"""Parameters above which launching a prompt's step on a GPU takes less than filling it up to a larger graph."""
SLOT_BYTES = 128 << 20
"""Memory for rows whose logits are adjusted, by default."""
CPU_KV_BYTES = 4 << 30
CPU_KV_SHARE = 0.4
"""KV memory on a CPU by default: the smaller of these bytes and this share of what is free."""
GRAPH_BYTES = 2 << 20
"""What a captured graph takes of a GPU for itself: some KB for each of several hundred kernels."""
WARM_UP_KEY = -1 << 62


class EngineCore:
    """A loop over a loaded model. Implements `Core`; one thread drives it."""

    def __init__(self, device: Device, loop: Loop, info: EngineInfo, watchdog_seconds: float = 0.0) -> None:
        self.info = info
        self.loop = loop
        self.bell = loop.bell
        self._device = device
        self._allocations = 0
        """What the device had counted when start-up was over."""
        self._watchdog: Watchdog | None = None
        if watchdog_seconds and device.kind != "sim":
            self._watchdog = Watchdog(watchdog_seconds, lambda: loop.counters.steps, loop.wants_steps, device.fail)
            self._watchdog.start()

    def ready(self, startup_seconds: tuple[tuple[str, float], ...]) -> None:
        """Start-up is over."""
        self.info = self.info._replace(startup_seconds=startup_seconds)
        self._allocations = self._device.allocations()

    def submit(self, request: Request) -> None:
        self.loop.submit(request)

    def abort(self, key: int) -> None:
        self.loop.abort(key)

    def has_work(self) -> bool:
        return self.loop.has_work()

    def rest(self) -> bool:
        return self.loop.rest()

    def step(self) -> tuple[list[Started], list[StepTokens]]:
        """Run one turn of the loop.

        Raises:
            EngineError: a program failed on the device, the watchdog fired, or an invariant of ours broke.
        """
        try:
            turn = self.loop.turn()
        except EngineError:
            raise
        except Exception as error:
            raise EngineDeadError(f"the loop failed: {type(error).__name__}: {error}") from error
        return [Started(key, cached) for key, cached in turn.started], turn.tokens

    def stats(self) -> Stats:
        loop, counters = self.loop, self.loop.counters
        # Over all groups, so that the counts add up to the total, and are those of the page map.
        pages = PageCounts(*map(sum, zip(*[pool.counts() for pool in loop.pools], strict=True)))
        timeline = loop.account()
        return Stats(
            running=loop.planner.running,
            waiting=len(loop.planner.waiting),
            in_flight=loop.in_flight,
            pages_total=sum(pages),
            pages_free=pages.free,
            pages_cached=pages.cached,
            pages_owned=pages.owned,
            pages_fenced=pages.fenced,
            preemptions=loop.planner.preemptions,
            depth=loop.depth,
            device_allocations=self._device.allocations() - self._allocations,
            **vars(counters),
            **timeline.totals(),
        )

    def steps_after(self, step: int, since: int = 0) -> StepTable:
        """The steps later than `step`, committed at or after `since`, oldest first; those that are kept."""
        return self.loop.records.after(step, since)

    def page_map(self) -> bytes:
        return b"".join([pool.page_map() for pool in self.loop.pools])

    def close(self) -> None:
        """Stop the watchdog and the device. May be called in any state."""
        if self._watchdog:
            self._watchdog.stop()
        self._device.close()


def build_core(
    config: EngineConfig, device: Device | None = None, spent: Sequence[tuple[str, float]] = ()
) -> EngineCore:
    """Load the model, size the memory, warm up. `device` is one that the caller opened, for tests.

    `spent` are the parts of the start before this one, and their seconds.

    Raises:
        ConfigError, CheckpointError: the user can mend it.
    """
    checkers.connect()
    timer = _Timer(spent)
    with timer("device", "opening the device"):
        model_config = load_config(config)
        threads = config.threads or (1 if _parameters(model_config) < SMALL_MODEL else 0)
        device = device or open_device(config.device, threads)
    try:
        return _build_on(device, config, model_config, timer)
    except BaseException:
        device.close()
        raise


def _build_on(device: Device, config: EngineConfig, model_config: ModelConfig, timer: _Timer) -> EngineCore:
    kernels = choose(device.kind, dtype_of(config, model_config), config.batch_invariant)
    with timer("weights"):
        model = _on_device(device, lambda: load_model(config, device.torch_device, kernels))
    with timer("memory", "sizing KV memory"):
        sizes = choose_sizes(config, model_config, model, device)
        # Equal digests must mean equal KV, so the name holds everything that the KV depends on.
        name = f"{config.model}|{config.load_format}|{config.seed}|{model.dtype}|{config.batch_invariant}"
        depth = parse_depth(config.depth)
        loop = _on_device(
            device,
            lambda: build_loop(
                device,
                model,
                sizes,
                depth,
                model_name=name,
                prefix_caching=config.enable_prefix_caching,
                by_priority=config.scheduling_policy == "priority",
                # A budget that the user chose is kept. A GPU takes less than 0.1 s for a usual one.
                bounds_stalls=device.kind == "cpu" and not config.max_num_batched_tokens,
                kernels=kernels,
                buckets=_buckets(config, sizes),
                mixed=_mixed(device.kind, _parameters(model_config), sizes.step_tokens),
            ),
        )
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
        parameters=_parameters(model_config),
        watchdog_seconds=patience(config.watchdog_seconds, _operations(model_config, sizes), device.kind),
    )
    # The watchdog looks on from here: a device that hangs in its first step is a failed start, not an endless one.
    core = EngineCore(device, loop, info, info.watchdog_seconds)
    try:
        if kernels.ahead is not None:
            with timer("kernels", "loading kernels (the first start compiles them)"):
                loop.compile()
        if device.kind == "cuda":  # and libraries have what they keep: torch's products, 32 MiB
            step = step_bytes(model, sizes.rows, sizes.step_tokens, captured=not config.enforce_eager)
            device.reserve(step.eager, step.graphs)
        with timer("warm-up", "warming up"):
            _warm_up(loop, sizes, largest=device.kind == "cuda")
        with timer("graphs"):
            loop.capture()
    except BaseException:
        core.close()
        raise
    core.ready(tuple(timer.spent))
    return core


def _buckets(config: EngineConfig, sizes: Sizes) -> tuple[int, ...]:
    """Rows of captured steps."""
    most = min(sizes.rows, config.max_cudagraph_capture_size or sizes.rows)
    return () if config.enforce_eager else buckets_up_to(most)


def _mixed(kind: str, parameters: int, step_tokens: int) -> MixedSizes | None:
    """Steps with chunks that are captured; None where none is."""
    if kind != "cuda":
        return ALONE if kind == "cpu" and parameters < TINY_MODEL else None
    most = _most_captured(step_tokens) if parameters < FILLED_MODEL else 0
    return ON_GPU._replace(stand_ins=tuple(tokens for tokens in ON_GPU.stand_ins if tokens <= most))


def _most_captured(step_tokens: int) -> int:
    """Prompt tokens of the largest captured step in an engine of that budget."""
    return next((tokens for tokens in TOKENS if tokens >= step_tokens), TOKENS[-1])


def choose_sizes(config: EngineConfig, model_config: ModelConfig, model: DenseModel, device: Device) -> Sizes:
    """Rows, pages and step budget from the config and the memory that is left after the weights.

    Raises:
        ConfigError: the memory does not hold one sequence of max_model_len, the budget is below the rows, or a
            sequence has no room for a prompt and an output.
    """
    on_gpu = device.kind == "cuda"
    rows = config.max_num_seqs or (256 if on_gpu else 64)
    step_tokens = config.max_num_batched_tokens or max(rows, 8192 if on_gpu else 1024)
    if step_tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens ({step_tokens}) must be at least max_num_seqs ({rows}), "
            "so that every running request fits into one step"
        )
    max_len = model_length(config, model_config)
    size, page_bytes = config.block_size, model.page_bytes(config.block_size)
    budget = config.kv_cache_memory_bytes or _kv_bytes(config, model, device, rows, step_tokens, max_len)
    wanted = rows * -(-max_len // size) + 1
    pages = config.num_gpu_blocks_override or min(wanted, budget // page_bytes)
    room = (pages - 1) * size
    if room < max_len and config.max_model_len is None and room >= size:
        max_len = room
    if room < max_len:
        raise ConfigError(
            f"max_model_len is {max_len} but the KV cache has room for {max(room, 0)} tokens "
            f"({pages} pages of {page_bytes:,} bytes, one of them reserved): "
            "lower --max-model-len, or raise --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    if max_len < 2:
        raise ConfigError(
            f"max_model_len comes to {max_len}, but must be at least 2, for a prompt and an output: "
            "raise --max-model-len, --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    slots = _slots(config, rows, model.vocab_size)
    return Sizes(rows, max_len, pages, size, step_tokens, config.max_num_queued_reqs, slots)


def _slots(config: EngineConfig, rows: int, vocab: int) -> int:
    """Return how many rows may have their logits adjusted."""
    return min(rows, config.max_adjusted_seqs or max(1, SLOT_BYTES // slot_bytes(vocab)))


def _kv_bytes(
    config: EngineConfig, model: DenseModel, device: Device, rows: int, step_tokens: int, max_len: int
) -> int:
    free, total = device.memory()
    if device.kind != "cuda":
        return min(CPU_KV_BYTES, int(free * CPU_KV_SHARE))
    tables = (rows + 1) * (max_len + len(model.groups()) * -(-max_len // config.block_size)) * 4
    tables += (_slots(config, rows, model.vocab_size) + 1) * slot_bytes(model.vocab_size)
    step = sum(step_bytes(model, rows, step_tokens, captured=not config.enforce_eager))
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - step - tables)


class StepBytes(NamedTuple):
    """Memory on a GPU that steps take beside weights, KV and tables, at their largest."""

    logits: int
    """The buffer of logits, which lives as long as the engine."""
    eager: int
    graphs: int
    """An eager step and the graphs take the same from two pools of the allocator: the graphs share one."""
    driver: int
    """Memory that the graphs themselves take from the driver"""


def step_bytes(model: DenseModel, rows: int, step_tokens: int, captured: bool) -> StepBytes:
    wide, vocab = rows + CHUNKS[-1], model.vocab_size  # a captured step is filled up by whole chunks
    # The widest activations of one layer, four of them alive at once; `forward` frees them layer by layer.
    width = max(model.config.intermediate_size * 4, model.config.hidden_size * 8)
    # The buffer of logits, and the model's own result on its way there.
    buffer = wide * vocab * model.dtype.itemsize
    # Sampling reads logits where they are; cut and sample keep a float32 and an id of each block of them at most, which
    # a copy of the logits in float32 covers with room to spare.
    sampling = wide * vocab * 4
    # Scores take a piece of logits at a time: the logits, their logarithms, int64 keys and what makes them, masks.
    scores = 11 * min(PIECE_BYTES, max(step_tokens, wide) * vocab * 4)
    beside = buffer + max(sampling, scores)
    if not captured:
        return StepBytes(buffer, step_tokens * width * 4 + beside, 0, 0)
    # A captured step is filled up to its decode rows and to its prompt tokens, each by itself, and runs eagerly once.
    filled = max(wide, _most_captured(step_tokens) + rows)
    eager = max(step_tokens, filled) * width * 4 + beside
    return StepBytes(buffer, eager, filled * width * 4 + beside, MOST * GRAPH_BYTES)


def _parameters(config: ModelConfig) -> int:
    """Parameters of the model, from its config."""
    wide = (config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden_size * (wide + config.heads * config.head_dim + 3 * config.intermediate_size + 2)
    return config.layers * layer + config.vocab_size * config.hidden_size * (1 if config.tied else 2)


def _operations(config: ModelConfig, sizes: Sizes) -> float:
    """Arithmetic of the longest step: every token meets all parameters, and a whole context in attention."""
    attention = 2 * config.layers * config.heads * config.head_dim * sizes.max_len
    return 2.0 * sizes.step_tokens * (_parameters(config) + attention)


def _on_device(device: Device, build: Callable[[], T]) -> T:
    """Run `build` on the compute stream, so that what it allocates is ordered before every step."""
    made: list[T] = []

    def program() -> None:
        made.append(build())

    try:
        device.run(program)
    except DeviceError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise
    return made[0]


def _warm_up(loop: Loop, sizes: Sizes, largest: bool) -> None:
    """Requests through the whole loop: thread pools, libraries and kernels wake up before ready.

    First a short one; then, if `largest`, a step of all the tokens that one may have: a GPU that has no memory for it
    says so now. A CPU takes seconds for such a step, and waits for no device.
    """
    longest = sizes.max_len - 1
    whole, rest = divmod(sizes.step_tokens, longest)
    together = ([longest] * whole + [rest] * (rest > 0))[: min(sizes.rows, sizes.queue)] if largest else []
    params = SamplingParams(temperature=0.5, top_k=5, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    key = WARM_UP_KEY
    for lengths in ([min(8, longest)], together):
        for length in lengths:
            loop.submit(Request(key, np.zeros(length, np.int32), params, 0, (), 0, length + 1))
            key += 1
        while loop.has_work():
            loop.turn()
    for pool in loop.pools:
        pool.forget()


class _Timer:
    """Measures how long each part of the start takes."""

    def __init__(self, spent: Sequence[tuple[str, float]]) -> None:
        self.spent = list(spent)

    @contextmanager
    def __call__(self, what: str, text: str = "") -> Iterator[None]:
        """Time a phase, and say `text`; without it, what runs inside says more."""
        if text:
            tell(text)
        begin = time.perf_counter()
        yield
        self.spent.append((what, round(time.perf_counter() - begin, 3)))
