"""Fields that families read alike from a config.json: sizes, activations, windows and ropes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from gapless.kernels.kinds import Activation, Reach
from gapless.model.fields import Fields
from gapless.model.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, RopeConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}
"""Names of functions in transformers"""


class CommonSizes(NamedTuple):
    """CommonSizes by the names that most families give them."""

    vocab: int
    hidden: int
    middle: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, fields: Fields, head_dim: int = 0, kv_heads: int = 0) -> CommonSizes:
        """Read them. Defaults: head_dim, 0 for hidden_size / num_attention_heads; kv_heads, 0 for as many as heads, as
        null is."""
        heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
        kv_heads = fields.whole(
            "num_key_value_heads", heads if fields.null("num_key_value_heads") else kv_heads or heads
        )
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({heads})")
        head_dim = fields.whole("head_dim", head_dim or hidden // heads, low=2)
        if head_dim % 2:
            raise fields.error("head_dim", "must be even")
        middle, layers = fields.whole("intermediate_size"), fields.whole("num_hidden_layers")
        return cls(fields.whole("vocab_size"), hidden, middle, layers, heads, kv_heads, head_dim)

    @property
    def heads(self) -> tuple[int, int, int]:
        """The first fields of an `AttentionSpec`."""
        return self.query_heads, self.kv_heads, self.head_dim

    @staticmethod
    def activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> Activation:
        """Read the function of the MLP."""
        value = fields.text(name, default)
        if value not in ACTIVATIONS:
            raise fields.foreign(name, f"must be one of {', '.join(ACTIVATIONS)}", value)
        return ACTIVATIONS[value]

    def model(
        self, fields: Fields, layers: Iterable[LayerSpec], norm: NormSpec, tied: bool = False, **more: Any
    ) -> ModelSpec:
        """Return the model of these layers, with its rope unless `more` has `ropes`. tied: the default."""
        if "ropes" not in more:
            more["ropes"] = (read_rope(fields),)
        for rope in more["ropes"]:
            _check_lengths(fields, rope, self.head_dim)
        tied = fields.flag("tie_word_embeddings", tied)
        return ModelSpec(self.vocab, self.hidden, tuple(layers), norm, tied=tied, **more)


def window_size(fields: Fields, default: int = 4096) -> int:
    """Return the tokens of a model's windows, which null does not take away."""
    if fields.values.get("sliding_window", default) is None:
        raise fields.foreign("sliding_window", "must be a whole number: layers of this family have windows", "null")
    return fields.whole("sliding_window", default)


def windows(
    fields: Fields, layers: int, window: int = 0, is_windowed: Callable[[int], bool] = lambda layer: False
) -> list[int]:
    """Return the tokens of each layer's window, 0 for none, by layer_types or else `is_windowed`.

    window: the model's, 0 for none. Raises Foreign for other kinds of layers, CheckpointError for a list that does not
    fit.
    """
    kinds = fields.get("layer_types")
    if kinds is None:
        return [window if is_windowed(layer) else 0 for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error("layer_types", f"must be a list of {layers} kinds, one for each of num_hidden_layers")
    if strange := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise fields.foreign("layer_types", "must be full_attention or sliding_attention", strange[0])
    if "sliding_attention" in kinds and not window:
        raise fields.foreign("layer_types", "must be full_attention in every layer of a model without a window")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def windowed(attention: AttentionSpec, window: int) -> AttentionSpec:
    """Return attention with a window of this many tokens, 0 for none."""
    return replace(attention, reach=Reach.WINDOW, size=window) if window else attention


def read_rope(fields: Fields, partial: bool = False, theta: float = 10_000.0) -> RopeConfig:
    """Read the only rope of a model, in both spellings: `rope_parameters` of transformers 5, and `rope_scaling` of
    before, which counts beside it. partial: part of a head may be rotated. theta: the default base. Raises Foreign for
    other ropes."""
    names = ["rope_scaling", "rope_parameters"]
    name, other = names if fields.values.get(names[0]) else names[::-1]
    rope = fields.sub(name)
    if "full_attention" in rope:
        raise rope.foreign("full_attention", "must not be there: one rope for all layers is supported")
    found = _rope(fields, rope, _base(fields, rope, "rope_theta", theta), partial)
    _check_other_rope(fields, rope, other, {"rope_type": found.type, "type": found.type, "rope_theta": found.theta})
    return found


def read_ropes(
    fields: Fields, theta: float, local_theta: float, local: str = "rope_local_base_freq"
) -> tuple[RopeConfig, RopeConfig]:
    """Read the ropes of layers without a window and with one, in both spellings: `rope_parameters` by kinds of layers,
    and `rope_theta`, `rope_scaling` (of the first) and the field `local`, if the family has one, of before. Defaults:
    the bases. Raises Foreign for other ropes."""
    both, scaling = fields.sub("rope_parameters"), fields.sub("rope_scaling")
    full, windowed = both.sub("full_attention"), both.sub("sliding_attention")
    if both.values and not (full.values or windowed.values):
        raise fields.foreign("rope_parameters", "must have full_attention and sliding_attention")
    if scaling.values and full.values:
        raise fields.foreign("rope_scaling", "must not be there beside rope_parameters.full_attention")
    full = scaling if scaling.values else full
    base = _base(fields, windowed, local, local_theta) if local else windowed.real("rope_theta", local_theta, above=0.0)
    whole = _rope(fields, full, _base(fields, full, "rope_theta", theta), nested=True)
    return whole, _rope(fields, windowed, base, nested=True)


def _base(fields: Fields, rope: Fields, name: str, default: float) -> float:
    """Return the base of a rope, which a field of the model gives if its own object does not."""
    theta = rope.real("rope_theta", fields.real(name, default, above=0.0), above=0.0)
    if fields.real(name, theta) != theta:
        fields.unused(name, f"{rope.prefix}rope_theta counts")
    return theta


def _rope(fields: Fields, rope: Fields, theta: float, partial: bool = False, nested: bool = False) -> RopeConfig:
    kind = rope.text("rope_type" if "rope_type" in rope else "type", "default")
    if rope.text("type", kind) != kind:
        rope.unused("type", "rope_type counts")
    if kind in ("su", "yarn") and "short_factor" in rope:  # its names of before
        kind = "longrope"
    if kind not in ROPE_TYPES:
        raise rope.foreign("rope_type", f"must be one of {', '.join(ROPE_TYPES)}", kind)
    share = fields.real("partial_rotary_factor", 1.0, above=0.0, high=1.0)
    share = rope.real("partial_rotary_factor", share, above=0.0, high=1.0)
    if share != 1.0 and not partial:
        raise fields.foreign("partial_rotary_factor", "must be 1: heads of this family are rotated whole", share)
    found = RopeConfig(theta=theta) if kind == "default" else _scaled_rope(fields, rope, kind, theta, nested)
    return replace(found, share=share)


def _check_lengths(fields: Fields, rope: RopeConfig, head_dim: int) -> None:
    """Refuse parts of a head that have no pairs, and lists of factors that are not one for each pair."""
    rotated = rope.rotated(head_dim)
    if rotated < 2 or rotated % 2:
        raise fields.foreign("partial_rotary_factor", f"must rotate an even part of head_dim ({head_dim})", rope.share)
    for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if rope.type == "longrope" and len(factors) != rotated // 2:
            owner = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
            raise fields.error(f"{owner}.{name}", f"must be a list of {rotated // 2} numbers", len(factors))


def _check_other_rope(fields: Fields, rope: Fields, other: str, counts: dict[str, Any]) -> None:
    """Tell of the spelling that does not count. A base that it alone has is refused: either may be meant."""
    values = fields.get(other) or {}
    if not isinstance(values, dict):
        raise fields.error(other, "must be an object")
    theta = values.get("rope_theta")
    if theta not in (None, counts["rope_theta"]) and "rope_theta" not in rope:
        rule = f"is not the base that counts, {counts['rope_theta']:g}: write it as {rope.prefix}rope_theta too"
        raise fields.error(f"{other}.rope_theta", rule, theta)
    if any(value not in (None, {**counts, **rope.values}.get(name)) for name, value in values.items()):
        fields.unused(other, f"{rope.prefix.rstrip('.')} counts")


def _scaled_rope(fields: Fields, rope: Fields, kind: str, theta: float, nested: bool) -> RopeConfig:
    longest = fields.whole("max_position_embeddings")
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, rope.real("factor", above=0.0))
    name = "original_max_position_embeddings"
    original = rope.whole(name, longest) if nested else fields.whole(name, rope.whole(name, longest))
    if nested and fields.whole(name, original) != original:
        raise fields.foreign(name, f"must not differ from the rope's own ({original})")
    if rope.whole(name, original) != original:
        rope.unused(name, f"{name} beside {rope.prefix.rstrip('.')} counts")
    factor = rope.real("factor", None if kind == "llama3" else longest / original, above=0.0)
    attention_factor = rope.real("attention_factor", above=0.0) if "attention_factor" in rope else None
    if kind == "longrope":
        if original < 2:
            raise fields.error(name, "must be above 1", original)
        short, long = rope.reals("short_factor"), rope.reals("long_factor")
        return RopeConfig(
            kind, theta, factor, original, attention_factor=attention_factor, short_factor=short, long_factor=long
        )
    if kind == "llama3":
        low, high = rope.real("low_freq_factor", above=0.0), rope.real("high_freq_factor", above=0.0)
        if high <= low:
            raise rope.error("high_freq_factor", f"must be above low_freq_factor ({low})")
        return RopeConfig(kind, theta, factor, original, low, high)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        attention_factor=attention_factor,
        beta_fast=rope.real("beta_fast", 32.0, above=0.0),
        beta_slow=rope.real("beta_slow", 1.0, above=0.0),
        mscale=rope.real("mscale", 0.0),
        mscale_all_dim=rope.real("mscale_all_dim", 0.0),
        truncate=rope.flag("truncate", True),
    )
