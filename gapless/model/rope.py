"""Rotary position embedding: default, linear, dynamic, llama3, yarn and longrope, as one table of cosines and sines.

Frequencies are computed in float32 by the same formulas as transformers, so the tables agree to the last bits.

`dynamic` (NTK) is the one type whose definition in transformers depends on how a sequence is fed: the base grows
with the longest position of the *call*, and keys cached earlier keep the base of their time, so one shot and chunked
runs disagree. A cache that is shared between requests needs a function of the position alone, and attention needs one
base for both sides of a product. Here the base is fixed by `max_model_len`: up to the model's max_position_embeddings
(the default) nothing is scaled, which is what transformers gives for every sequence of that length or less; a larger
max_model_len stretches the base for all positions, as if every sequence were that long.

`longrope` is alike: transformers takes its long factors as soon as a sequence is longer than the original length, and
the keys cached before keep the short ones. Here max_model_len decides, as in vLLM: if it exceeds the original length,
the long factors serve all positions, which is what transformers gives for sequences above that length; else the
short ones are. The attention factor is the same for both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gapless.base.progress import warn
from gapless.model.config import ModelConfig
from gapless.model.spec import RopeConfig


def rope_tables(config: ModelConfig, max_model_len: int, device: torch.device) -> dict[int | None, Tensor]:
    """Return the table of each rope that layers use, by its index; by None a row that turns nothing, for the others."""
    found: dict[int | None, Tensor] = {}
    for layer in config.spec.layers:
        rope, dim = layer.attention.rope, layer.attention.head_dim
        if rope is None:
            found[None] = torch.cat((torch.ones(1, dim // 2), torch.zeros(1, dim // 2)), dim=1).to(device)
        elif rope not in found:
            longest, kind = config.max_position_embeddings, config.spec.ropes[rope]
            if kind.type == "longrope" and max_model_len > kind.original_max:
                warn(
                    f"longrope: its long factors serve prompts of any length, since max_model_len ({max_model_len}) is "
                    f"above original_max_position_embeddings: --max-model-len {kind.original_max} gives the short ones"
                )
            found[rope] = rope_table(kind, dim, max_model_len, longest).to(device)
    return found


def rope_table(rope: RopeConfig, head_dim: int, max_model_len: int, longest: int) -> Tensor:
    """Return [max_model_len, head_dim] float32: cosines in the left half, sines in the right.

    longest: the model's max_position_embeddings.
    """
    frequencies, scale = frequencies_of(rope, rope.rotated(head_dim), max_model_len, longest)
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
    kept = torch.zeros(max_model_len, head_dim // 2 - len(frequencies))
    parts = (angles.cos() * scale, kept + 1, angles.sin() * scale, kept)
    return torch.cat(parts, dim=1)


def frequencies_of(rope: RopeConfig, dim: int, max_model_len: int, longest: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] float32 on the CPU, and the factor of cosines and sines."""
    if rope.type == "linear":
        return _plain(rope.theta, dim) / rope.factor, 1.0
    if rope.type == "dynamic":
        return _plain(_stretched_base(rope, dim, max_model_len, longest), dim), 1.0
    if rope.type == "llama3":
        return _llama3(rope, _plain(rope.theta, dim)), 1.0
    if rope.type == "yarn":
        return _yarn(rope, dim), _yarn_attention(rope)
    if rope.type == "longrope":
        factors = rope.long_factor if max_model_len > rope.original_max else rope.short_factor
        return 1.0 / (torch.tensor(factors) * _periods(rope.theta, dim)), _longrope_attention(rope)
    assert rope.type == "default", rope.type
    return _plain(rope.theta, dim), 1.0


def _periods(base: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return torch.pow(base, exponents)


def _plain(base: float, dim: int) -> Tensor:
    return 1.0 / _periods(base, dim)


def _stretched_base(rope: RopeConfig, dim: int, length: int, original: int) -> float:
    if length <= original or dim <= 2:
        return rope.theta
    return float(rope.theta * (rope.factor * length / original - (rope.factor - 1)) ** (dim / (dim - 2)))


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, middle ones blended."""
    waves = 2 * math.pi / plain
    low_wave, high_wave = rope.original_max / rope.low_freq_factor, rope.original_max / rope.high_freq_factor
    slowed = torch.where(waves > low_wave, plain / rope.factor, plain)
    blend = (rope.original_max / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * slowed / rope.factor + blend * slowed
    return torch.where((waves >= high_wave) & (waves <= low_wave), blended, slowed)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    """Dimensions that turn more than `beta_fast` times in the original length are kept, slow ones interpolated."""
    low, high = (_turning_dim(rope, dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    kept = 1 - ramp
    periods = _periods(rope.theta, dim)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _turning_dim(rope: RopeConfig, dim: int, turns: float) -> float:
    """The (fractional) dimension that turns `turns` times within the original length."""
    return dim * math.log(rope.original_max / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_attention(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max))
