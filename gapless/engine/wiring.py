"""Builds the core of an engine from its config: device, model, loop, and everything around the loop, in this order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

from gapless.base.config import EngineConfig, parse_depth
from gapless.base.errors import EngineError
from gapless.base.part import Part
from gapless.base.progress import announce
from gapless.comm.alone import ONE_RANK
from gapless.device import Caps, Device, device_class
from gapless.engine import checkers
from gapless.engine.adapters import AdapterChanges, AdapterFiles
from gapless.engine.capabilities import refuse_lacking
from gapless.engine.core import CoreParts, EngineCore
from gapless.engine.frontdoor import open_assets
from gapless.engine.on_device import on_device
from gapless.engine.processors import import_processors, try_out
from gapless.engine.rank_messages import RankPlan
from gapless.engine.rank_process import RankProcess, start_ranks
from gapless.engine.ranks import FollowingRanks
from gapless.engine.seam import EngineInfo
from gapless.engine.share import check_devices, check_sum, choose_kernels, facts_of, head_of, open_rank_device
from gapless.engine.sizing import choose_sizes, most_captured, settle_dtype, step_bytes
from gapless.engine.tiers import EngineTiers, host_sizes
from gapless.engine.updates import WeightUpdates
from gapless.engine.warm_up import warm_up
from gapless.grammar.compiler import Compiler
from gapless.kernels import native
from gapless.kernels.plain import KERNELS as PLAIN
from gapless.kernels.seam import Kernels
from gapless.loop import mask_threads
from gapless.loop.build import build_loop, executor_without_pages, step_sizes
from gapless.loop.loop import Loop
from gapless.loop.spec import LoopSpec, Sizes
from gapless.loop.watchdog import Watchdog, patience
from gapless.model.config import ModelConfig, load_config
from gapless.model.drafting import DRAFTERS
from gapless.model.loader import load_model, refuse_shares
from gapless.model.seam import LoadedModel
from gapless.pace.controllers import Controllers
from gapless.step.adapters import Adapters
from gapless.step.graphs import ALONE, FILLING, ON_GPU, MixedSizes, buckets_up_to
from gapless.step.keys import ForwardKey
from gapless.step.kinds import largest
from gapless.step.processors import Processor
from gapless.step.speculation import Speculation

if TYPE_CHECKING:
    from gapless.grammar.vocabulary import Vocabulary

TINY_MODEL = 8_000_000
"""[parameters] Parameters below which launching a short prompt on a CPU takes longer than the four padding tokens of an
average graph. At 12 million both take the same."""
FILLED_MODEL = 2_000_000_000
"""[parameters] Largest model whose prompts a GPU pads by FILLING rows and tokens in the time of launching a step.
Larger ones get less padding."""
LEAST_FILLING = 64
"""[rows and tokens] Most padding of such a step in any model."""
FURTHER_SECONDS = 8.0
"""[s] Time limit for capturing stand-ins, and lanes of many rows, at a GPU's start; the others are captured at rest."""
CAPTURE_SECONDS = 2.0
"""[s] Time limit for recording steps at a CPU's start: recording takes as long as running, and an eager step only a few
milliseconds more than a replay. On a GPU a later capture would stall all requests for many of their steps."""

Times = list[tuple[str, float]]
"""Parts of a start, and their seconds."""


class Loaded(NamedTuple):
    """A model on its device, and everything that was read for it."""

    config: EngineConfig
    """The user's config, with the dtype in use"""
    device: Device
    ranks: FollowingRanks | None
    kernels: Kernels
    processors: tuple[Processor, ...]
    model: LoadedModel
    drafting: Speculation | None
    files: AdapterFiles | None
    adapters: Adapters | None
    tiers: EngineTiers
    """The tiers, which `attach` opens"""


def build_core(
    config: EngineConfig,
    device: Device | None = None,
    spent: Sequence[tuple[str, float]] = (),
    parts: Sequence[Part] = (),
    processes: Sequence[RankProcess] = (),
) -> EngineCore:
    """Load the model, size the memory, warm up. `device` is already open, for tests.

    `spent` are the earlier parts of the start, and their seconds; `parts` are further ones of the loop. `processes`
    belong to the other ranks, if they are started.

    Raises:
        ConfigError, CheckpointError: the user can mend it.
    """
    checkers.connect()
    processes = processes or start_ranks(config)
    ranks = FollowingRanks(processes) if processes else None
    try:
        return _build(config, device, list(spent), parts, ranks)
    except BaseException as error:
        if ranks is not None:
            ranks.close()
            if ranks.failure is not None and isinstance(error, EngineError):
                raise ranks.failure from None  # which `error` is, or has as its cause
        raise


def _build(
    config: EngineConfig, device: Device | None, times: Times, parts: Sequence[Part], ranks: FollowingRanks | None
) -> EngineCore:
    with _timed(times, "device", "opening the device"):
        model_config = load_config(config)
        refuse_shares(config, model_config, config.tensor_parallel_size)
        found = device or device_class(config.device)
        refuse_lacking(config, found.kind, found.caps)
        if device is None and found.caps.kernels == "native":
            Thread(target=native.load, name="gapless-build", daemon=True).start()  # while the streams' C++ builds
        device = device or open_rank_device(config, model_config)
    try:
        loaded = _load(device, config, model_config, times, ranks)
        with _timed(times, "memory", "sizing KV memory"):
            others = _agree(loaded) if ranks else None
            sizes = choose_sizes(loaded.config, loaded.model.config, loaded.model, device, others)
            name = loaded.tiers.name(loaded.model.config, loaded.model, device.kind)
            spec = _spec(loaded, sizes, name, parts)
            peak = _step_peak(loaded, spec)
            if peak:
                sizes = choose_sizes(loaded.config, loaded.model.config, loaded.model, device, others, peak)
                spec = spec._replace(sizes=sizes)
            if ranks is not None:
                ranks.build(_plan(loaded, sizes, spec))
            loop = on_device(device, lambda: build_loop(device, loaded.model, spec))
            if ranks is not None:
                check_sum(device, ranks.group)
        info = _info(loaded, sizes)
        built = _surround(loop, loaded, name, info.watchdog_seconds)
        try:
            try_out(loop.launcher.program, device, exact=config.batch_invariant)
            _prepare(loop, loaded, sizes, peak, times)
            loaded.tiers.attach(loop)
        except BaseException:
            built.close()
            raise
    except BaseException:
        if ranks is not None:
            ranks.stop()  # a sum would not end by itself
        device.close()
        raise
    return EngineCore(built, info._replace(startup_seconds=tuple(times)))


def _agree(loaded: Loaded) -> int:
    """Wait until all ranks have loaded; return the most pages that each could hold. Raises ConfigError."""
    ranks, config = loaded.ranks, loaded.config
    assert ranks is not None
    return ranks.agree(facts_of(config, loaded.device, loaded.kernels, loaded.model, ranks.group.share))


def _plan(loaded: Loaded, sizes: Sizes, spec: LoopSpec) -> RankPlan:
    """Return what the other ranks are to build."""
    device, drafting = loaded.device, loaded.drafting
    step = step_bytes(loaded.config, loaded.model, device.caps, sizes.rows, sizes.step_tokens)
    drafts = (drafting.drafts, drafting.rows) if drafting else (0, 0)
    return RankPlan(step_sizes(device, loaded.model, spec), *drafts, (step.eager, step.graphs))


def _step_peak(loaded: Loaded, spec: LoopSpec) -> int:
    """Return the most memory of a device of its own that a step of plain kernels takes, by running the largest ones:
    what torch's operators need differs from backend to backend. 0 elsewhere: `step_bytes` counts our own kernels."""
    device, sizes, drafting = loaded.device, spec.sizes, loaded.drafting
    if not device.caps.own_memory or loaded.kernels.name != PLAIN.name:
        return 0
    executor = on_device(device, lambda: executor_without_pages(device, loaded.model, spec))
    places, rows = (drafting.places, min(sizes.rows, drafting.rows)) if drafting else (1, sizes.rows)
    keys = largest(sizes.rows, sizes.step_tokens, sizes.max_len, places, rows)
    adapted = spec.adapters is not None
    return executor.peak([key.adapted if adapted and isinstance(key, ForwardKey) else key for key in keys])


def _load(
    device: Device, config: EngineConfig, model_config: ModelConfig, times: Times, ranks: FollowingRanks | None
) -> Loaded:
    """Read the model, its drafter, the adapters and the processors, while the other ranks read theirs."""
    config = on_device(device, lambda: settle_dtype(config, model_config, device.caps))
    if ranks is not None:
        check_devices(config, device)
        announce(f"{ranks.world} ranks share the model: this process and {', '.join(map(str, ranks.pids))}")
        ranks.fails(device)
        ranks.load(config)
    tiers = EngineTiers(config)
    Thread(target=mask_threads.load, name="gapless-build", daemon=True).start()  # while the model loads
    kernels = choose_kernels(device, config, model_config)
    processors = import_processors(config.processors, device)
    group = ranks.join(device) if ranks else ONE_RANK
    with _timed(times, "weights"):
        tiers.look_at_weights()
        model = on_device(device, lambda: load_model(config, device.torch_device, kernels, group))
        drafting = on_device(device, lambda: speculation(config, device, model))
    files = adapters = None
    if (config.lora_modules or config.lora_dir) and model.adapters is not None:
        files = AdapterFiles(config, model.config, model.adapters, device)
        with _timed(times, "adapters", "reading adapters"):
            adapters = Adapters(model.adapters, files.named())
    return Loaded(config, device, ranks, kernels, processors, model, drafting, files, adapters, tiers)


def _spec(loaded: Loaded, sizes: Sizes, name: str, parts: Sequence[Part]) -> LoopSpec:
    config, caps = loaded.config, loaded.device.caps
    return LoopSpec(
        sizes,
        parse_depth(config.depth),
        model_name=name,
        prefix_caching=config.enable_prefix_caching,
        by_priority=config.scheduling_policy == "priority",
        # A user's budget is kept. A GPU takes less than 0.1 s for a usual one.
        bounds_stalls=caps.slow and not config.max_num_batched_tokens,
        max_itl_ns=int((config.max_itl or 0) * 1e6),
        kernels=loaded.kernels,
        buckets=_buckets(config, sizes),
        mixed=_mixed(caps, loaded.model.config.sizes.parameters, sizes.step_tokens),
        adapters=loaded.adapters,
        speculation=loaded.drafting,
        processors=loaded.processors,
        host=host_sizes(config),
        controllers=Controllers.named(config.controllers),
        mask_polls=caps.polled if caps.real_time else None,
        parts=tuple(parts),
        ranks=loaded.ranks,
        group=loaded.ranks.group if loaded.ranks else ONE_RANK,
    )


def _info(loaded: Loaded, sizes: Sizes) -> EngineInfo:
    config, device, model = loaded.config, loaded.device, loaded.model
    longest = patience(config.watchdog_seconds, _operations(model.config, sizes), device.caps.operations)
    return EngineInfo(
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
        parameters=model.config.sizes.parameters,
        adapters=tuple(config.adapters),
        processors=tuple(config.processors),
        tiers=tuple(loaded.tiers.kinds),
        kv_bytes=sizes.pages * model.page_bytes(sizes.page_size),
        watchdog_seconds=longest,
        kv_cache_dtype=config.kv_cache_dtype,
        ranks=config.tensor_parallel_size,
        own_memory=device.caps.own_memory,
    )


def _surround(loop: Loop, loaded: Loaded, name: str, watchdog_seconds: float) -> CoreParts:
    """Return the loop with everything around it. The watchdog runs: a device that hangs in its first step is a failed
    start, not an endless one."""
    config, device, vocab, files = loaded.config, loaded.device, loaded.model.vocab_size, loaded.files
    compiler = Compiler(lambda: _vocabulary(config, vocab), loop.bell.ring, loop.planner.limits.queue)
    changes = AdapterChanges(config.lora_dir, files, loop) if files and config.lora_dir else None
    updates = WeightUpdates(loop, loaded.model, device, name)
    ranks = loaded.ranks
    if ranks is not None:
        ranks.serve(loop.wants_steps)
    dog = watch(loop, watchdog_seconds, ranks)
    return CoreParts(device, loop, compiler, loaded.tiers, updates, changes, dog, ranks)


def watch(loop: Loop, seconds: float, ranks: FollowingRanks | None = None) -> Watchdog | None:
    """Start a watchdog over the loop; None without a bound, or in simulated time."""
    if not seconds or not loop.device.caps.real_time:
        return None
    fail = ranks.fail if ranks else loop.device.fail
    dog = Watchdog(seconds, lambda: loop.counters.steps, loop.wants_steps, fail, ranks)
    dog.start()
    return dog


def _prepare(loop: Loop, loaded: Loaded, sizes: Sizes, peak: int, times: Times) -> None:
    """Compile, warm up and capture, so that the first request finds everything ready."""
    config, device = loaded.config, loaded.device
    if loaded.kernels.ahead is not None:
        with _timed(times, "kernels", "loading kernels (the first start compiles them)"):
            loop.launcher.compile()
    if device.caps.own_memory:  # after libraries have allocated their workspaces: torch's products, 32 MiB
        step = step_bytes(config, loaded.model, device.caps, sizes.rows, sizes.step_tokens).at_least(peak)
        device.reserve(step.eager, step.graphs)
    if loaded.ranks is not None:
        loaded.ranks.built()
    with _timed(times, "warm-up", "warming up"):
        warm_up(loop, sizes, largest=device.caps.own_memory)
    with _timed(times, "graphs"):
        seconds = (CAPTURE_SECONDS, 0.0) if device.caps.slow else (inf, FURTHER_SECONDS)
        loop.capture(*seconds)


def speculation(config: EngineConfig, device: Device, model: LoadedModel) -> Speculation | None:
    asked = config.speculation
    if asked is None:
        return None
    drafts, most = asked.num_speculative_tokens, min(config.max_num_seqs or device.caps.rows, device.caps.drafted_rows)
    if make := DRAFTERS.get(asked.method):
        drafter, learner = make(asked, device.torch_device)
        return Speculation(drafts, drafter, most, learner=learner)
    return Speculation(drafts, None, most, head_of(config, device, model))


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
    stand_ins = tuple(tokens for tokens in ON_GPU.stand_ins if tokens <= most_captured(step_tokens))
    filling = max(LEAST_FILLING, FILLING * FILLED_MODEL // max(parameters, FILLED_MODEL))
    return ON_GPU._replace(stand_ins=stand_ins, filling=filling)


def _operations(config: ModelConfig, sizes: Sizes) -> float:
    """Return the operations of the longest step: every token meets all parameters, and a whole context in attention."""
    attention = 2 * config.sizes.queries * sizes.max_len
    return 2.0 * sizes.step_tokens * (config.sizes.parameters + attention)


@contextmanager
def _timed(spent: list[tuple[str, float]], what: str, text: str = "") -> Iterator[None]:
    """Add the seconds of a part of the start, and show `text`; without it, the code inside reports progress."""
    if text:
        announce(text)
    begin = time.perf_counter()
    yield
    spent.append((what, round(time.perf_counter() - begin, 3)))
