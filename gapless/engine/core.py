"""The back side of the engine: model, device and loop, built from one config."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from gapless.base.config import EngineConfig, parse_depth
from gapless.base.errors import ConfigError, DeviceError, EngineDeadError, EngineError, UserError
from gapless.base.params import MAX_LOGPROBS, SamplingParams
from gapless.base.records import Request, StepTokens
from gapless.device import Device, open_device
from gapless.engine.seam import EngineInfo, Started, Stats
from gapless.kernels.choose import choose
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.loop.records import StepRecord
from gapless.loop.watchdog import Watchdog
from gapless.model.config import ModelConfig, load_config, model_length
from gapless.model.dense import DenseModel
from gapless.model.loader import dtype_of, load_model
from gapless.step.graphs import buckets_up_to
from gapless.step.logprobs import PIECE_BYTES

T = TypeVar("T")

SMALL_MODEL = 50_000_000
"""Parameters below which one CPU thread computes a step: more of them would take the core that the loop needs."""
CPU_KV_BYTES = 4 << 30
CPU_KV_SHARE = 0.4
"""KV memory on a CPU, unless told otherwise: the smaller of these bytes and this share of what is free."""
WARM_UP_KEY = -1 << 62


class EngineCore:
    """A loop over a loaded model. Implements `Core`; one thread drives it."""

    def __init__(self, device: Device, loop: Loop, info: EngineInfo, watchdog_seconds: float = 0.0) -> None:
        self.info = info
        self.loop = loop
        self._device = device
        self._watchdog: Watchdog | None = None
        if watchdog_seconds and device.kind != "sim":
            self._watchdog = Watchdog(watchdog_seconds, lambda: loop.counters.steps, loop.has_work, device.fail)
            self._watchdog.start()

    @property
    def records(self) -> Iterator[StepRecord]:
        """The latest step records, oldest first."""
        return iter(self.loop.records)

    def submit(self, request: Request) -> None:
        self.loop.submit(request)

    def abort(self, key: int) -> None:
        self.loop.abort(key)

    def has_work(self) -> bool:
        return self.loop.has_work()

    def step(self) -> tuple[list[Started], list[StepTokens]]:
        """One turn of the loop.

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
        loop, counters, pages = self.loop, self.loop.counters, self.loop.pool.counts()
        timeline = loop.account()
        return Stats(
            running=loop.planner.running,
            waiting=len(loop.planner.waiting),
            in_flight=loop.in_flight,
            pages_total=loop.pool.size,
            pages_free=pages.free,
            pages_cached=pages.cached,
            pages_owned=pages.owned,
            pages_fenced=pages.fenced,
            preemptions=loop.planner.preemptions,
            depth=loop.depth,
            step_tokens=tuple(timeline.step_tokens),
            **vars(counters),
            **timeline.totals(),
        )

    def steps_after(self, step: int, since: int = 0) -> list[StepRecord]:
        """Records of the steps later than `step`, committed at or after `since`, oldest first; those that are kept."""
        found = []
        for record in reversed(self.loop.records):
            if record.step <= step or record.committed_at < since:
                break
            found.append(record)
        return found[::-1]

    def page_map(self) -> bytes:
        return self.loop.pool.page_map()

    def close(self) -> None:
        """Stop the watchdog and the device. May be called in any state."""
        if self._watchdog:
            self._watchdog.stop()
        self._device.close()


def build_core(config: EngineConfig, device: Device | None = None) -> EngineCore:
    """Load the model, size the memory, warm up. `device` is one that the caller opened, for tests.

    Raises:
        ConfigError, CheckpointError: the user can mend it.
    """
    timer = _Timer()
    with timer("device"):
        model_config = load_config(config)
        threads = config.threads or (1 if _parameters(model_config) < SMALL_MODEL else 0)
        device = device or open_device(config.device, threads)
    try:
        return _build_on(device, config, model_config, timer)
    except BaseException:
        device.close()
        raise


def _build_on(device: Device, config: EngineConfig, model_config: ModelConfig, timer: _Timer) -> EngineCore:
    kernels = choose(device.kind, dtype_of(config, model_config))
    with timer("weights"):
        model = _on_device(device, lambda: load_model(config, device.torch_device, kernels))
    with timer("memory"):
        sizes = choose_sizes(config, model_config, model, device)
        # Equal digests must mean equal KV, so the name holds everything that the KV depends on.
        name = f"{config.model}|{config.load_format}|{config.seed}|{model.dtype}"
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
                kernels=kernels,
                buckets=_buckets(config, sizes),
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
    )
    # The watchdog looks on from here: a device that hangs in its first step is a failed start, not an endless one.
    core = EngineCore(device, loop, info, config.watchdog_seconds)
    try:
        with timer("warm-up"):
            _warm_up(loop)
        with timer("graphs"):
            loop.capture()
    except BaseException:
        core.close()
        raise
    core.info = info._replace(startup_seconds=tuple(timer.spent))
    return core


def _buckets(config: EngineConfig, sizes: Sizes) -> tuple[int, ...]:
    """Rows of captured steps."""
    most = min(sizes.rows, config.max_cudagraph_capture_size or sizes.rows)
    return () if config.enforce_eager else buckets_up_to(most)


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
    return Sizes(rows, max_len, pages, size, step_tokens, config.max_num_queued_reqs)


def _kv_bytes(
    config: EngineConfig, model: DenseModel, device: Device, rows: int, step_tokens: int, max_len: int
) -> int:
    free, total = device.memory()
    if device.kind != "cuda":
        return min(CPU_KV_BYTES, int(free * CPU_KV_SHARE))
    # What one step needs at its peak: logits with the int64 keys of a full sort, and the widest activations.
    width = max(model.config.intermediate_size * 4, model.config.hidden_size * 8)
    # Log-probabilities take a piece of logits at a time: the logits, their logarithms, their keys, and a mask.
    logits = max(rows * model.vocab_size * 64, 8 * min(PIECE_BYTES, step_tokens * model.vocab_size * 4))
    step = logits + step_tokens * width * 4
    tables = (rows + 1) * (max_len + -(-max_len // config.block_size)) * 4
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - step - tables)


def _parameters(config: ModelConfig) -> int:
    """Parameters of the model, from its config."""
    wide = (config.heads + 2 * config.kv_heads) * config.head_dim
    layer = config.hidden_size * (wide + config.heads * config.head_dim + 3 * config.intermediate_size + 2)
    return config.layers * layer + config.vocab_size * config.hidden_size * (1 if config.tied else 2)


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


def _warm_up(loop: Loop) -> None:
    """One short request through the whole loop: allocators, thread pools and kernels wake up before ready."""
    length = min(8, loop.rows.tokens.shape[1] - 1)
    params = SamplingParams(temperature=0.5, top_k=5, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    loop.submit(Request(WARM_UP_KEY, np.zeros(length, np.int32), params, 0, (), 0, length + 1))
    while loop.has_work():
        loop.turn()
    loop.pool.forget()


class _Timer:
    """Where start-up time went."""

    def __init__(self) -> None:
        self.spent: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spent.append((what, round(time.perf_counter() - begin, 3)))
