"""Sizing: rows, pages and step budget, from the config and the available memory."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from gapless.base import host
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.progress import announce
from gapless.device import Caps, Device
from gapless.kernels.dtypes import CLEAR_GAIN, float32_gains
from gapless.kernels.layout import mask_words
from gapless.kernels.scores import PIECE_BYTES
from gapless.kernels.tables import slot_bytes
from gapless.loop.spec import Sizes
from gapless.model.config import ModelConfig, model_length
from gapless.model.loader import dtype_of
from gapless.model.seam import LoadedModel
from gapless.pace.draft_gate import ENDING
from gapless.step.graphs import CHUNK_COUNTS, CHUNK_TOKENS, MOST_GRAPHS

SLOT_BYTES = 128 << 20
"""Default memory for rows with adjusted logits."""
CPU_KV_BYTES = 4 << 30
CPU_KV_SHARE = 0.4
"""Default KV memory on a CPU: the smaller of these bytes and this share of free memory."""
GRAPH_BYTES = 2 << 20
"""GPU memory of one captured graph: some KB for each of several hundred kernels."""


def choose_sizes(
    config: EngineConfig, model_config: ModelConfig, model: LoadedModel, device: Device, others: int | None = None,
    peak: int = 0,
) -> Sizes:  # fmt: skip
    """Return rows, pages and step budget from the config and the memory left after the weights; `others` are the most
    pages that other ranks could hold, and `peak` is the most memory that a step was seen to take.

    Raises: ConfigError: the memory does not hold one sequence of max_model_len, the budget is below the rows, or a
    sequence has no room for a prompt and an output.
    """
    rows, step_tokens = _steps(config, device.caps)
    if step_tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens ({step_tokens}) must be at least max_num_seqs ({rows}), "
            "so that every running request fits into one step"
        )
    max_len = model_length(config, model_config)
    size, page_bytes = config.block_size, model.page_bytes(config.block_size)
    pages = could_hold(config, model_config, model, device, peak)
    if not config.num_gpu_blocks_override:
        wanted = rows * -(-max_len // size) + 1
        pages = min(wanted, pages, pages if others is None else others)
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


def _steps(config: EngineConfig, caps: Caps) -> tuple[int, int]:
    """Return rows and token budget of a step."""
    rows = config.max_num_seqs or caps.rows
    # A prefiller's pages leave while it computes the rest of their prompt.
    usual = 512 if config.role == "prefill" and not caps.slow else caps.step_tokens
    return rows, config.max_num_batched_tokens or max(rows, usual)


def could_hold(
    config: EngineConfig, model_config: ModelConfig, model: LoadedModel, device: Device, peak: int = 0
) -> int:  # fmt: skip
    """Return how many KV pages this rank has memory for, or the number that the config gives."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    max_len = model_length(config, model_config)
    budget = config.kv_cache_memory_bytes or _kv_bytes(config, model, device, max_len, peak)
    return budget // model.page_bytes(config.block_size)


def _slots(config: EngineConfig, rows: int, vocab: int) -> int:
    """Return the most rows with adjusted logits."""
    return min(rows, config.max_adjusted_seqs or max(1, SLOT_BYTES // slot_bytes(vocab, _places(config))))


def _places(config: EngineConfig) -> int:
    """Return the most tokens of a row in a step."""
    return 1 + (config.speculation.num_speculative_tokens if config.speculation else 0)


def _kv_bytes(config: EngineConfig, model: LoadedModel, device: Device, max_len: int, peak: int) -> int:
    free, total = device.memory()
    rows, step_tokens = _steps(config, device.caps)
    if not device.caps.own_memory:
        ranks = config.tensor_parallel_size * config.data_parallel_size
        return min(CPU_KV_BYTES, int(free * CPU_KV_SHARE)) // ranks
    words = max_len + len(model.groups()) * -(-max_len // config.block_size)
    tables = (rows + 1) * (words + _places(config) * mask_words(model.vocab_size)) * 4
    tables += (_slots(config, rows, model.vocab_size) + 1) * slot_bytes(model.vocab_size, _places(config))
    step = sum(step_bytes(config, model, device.caps, rows, step_tokens).at_least(peak))
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - step - tables)


class StepBytes(NamedTuple):
    """Peak GPU memory of steps, besides weights, KV and tables."""

    logits: int
    """The buffer of logits, kept as long as the engine."""
    eager: int
    graphs: int
    """Eager steps and graphs need the same from two pools of the allocator: the graphs share one."""
    driver: int
    """Driver memory of the graphs themselves"""

    def at_least(self, peak: int) -> StepBytes:
        """Return these for steps that were seen to take `peak` bytes besides their logits."""
        most = self.logits + peak
        return self._replace(eager=max(self.eager, most), graphs=max(self.graphs, most) if self.graphs else 0)


def step_bytes(config: EngineConfig, model: LoadedModel, caps: Caps, rows: int, step_tokens: int) -> StepBytes:
    drafted = (min(rows, caps.drafted_rows) + ENDING) * _places(config) if config.speculation else 0
    wide, vocab = max(rows + CHUNK_COUNTS[-1], drafted), model.vocab_size  # captured steps are filled up by chunks
    # The widest activations of one layer, four of them alive at once; `forward` frees them layer by layer. A head's
    # inputs from the model's layers stay until it runs.
    sizes = model.config.sizes
    width = sizes.widest + sizes.hidden * 4 * (model.spare_layers > 0)
    # The buffer of logits, and the model's own result before the copy.
    buffer = wide * vocab * model.dtype.itemsize
    # Sampling reads logits in place; cut and sample keep at most a float32 and an id for each block of them, which a
    # float32 copy of the logits amply covers.
    sampling = wide * vocab * 4
    # Scores take a piece of logits at a time: the logits, their logarithms, int64 keys and their inputs, masks.
    scores = 11 * min(PIECE_BYTES, max(step_tokens, wide) * vocab * 4)
    beside = buffer + max(sampling, scores)
    if config.enforce_eager:
        return StepBytes(buffer, (step_tokens + drafted) * width * 4 + beside, 0, 0)
    # A captured step is padded in decode rows and in prompt tokens separately, and runs eagerly once.
    filled = max(wide, most_captured(step_tokens) + max(rows, drafted))
    eager = max(step_tokens + drafted, filled) * width * 4 + beside
    return StepBytes(buffer, eager, filled * width * 4 + beside, MOST_GRAPHS * GRAPH_BYTES)


def settle_dtype(config: EngineConfig, model: ModelConfig, caps: Caps) -> EngineConfig:
    """Return the config with auto's dtype for such a device: the checkpoint's own, or float32 if a CPU without our own
    products computes clearly faster in it and has the memory."""
    if config.dtype != "auto" or caps.kernels != "native":
        return config
    if 2 * model.sizes.parameters * torch.float32.itemsize > host.memory()[0]:
        return config
    gain = float32_gains(dtype_of(config, model))
    if gain < CLEAR_GAIN:
        return config
    announce(f"computing in float32, {gain:.1f} x as fast here as {model.dtype}: --dtype {model.dtype} keeps that")
    return replace(config, dtype="float32")


def most_captured(step_tokens: int) -> int:
    """Return the prompt tokens of the largest captured step in an engine of that budget."""
    return next((tokens for tokens in CHUNK_TOKENS if tokens >= step_tokens), CHUNK_TOKENS[-1])
