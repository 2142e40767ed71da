"""The parts of a decoder: sizes, layers, and everything that differs from family to family. Imports no torch.

A family reads a config.json into a `ModelSpec`; `Decoder` computes it, and sizes, bytes and operations follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from gapless.base.share import Share
from gapless.kernels.kinds import Activation, Reach

TOKEN_BLOCK = 16
"""Tokens of a vocabulary that ranks divide by: products like multiples of it"""


class NormOrder(Enum):
    """The places of a layer's norms, and the input of its MLP. A layer adds to the hidden states x."""

    PRE = "pre"
    """x += attention(norm(x)); x += mlp(norm(x))"""
    SANDWICH = "sandwich"
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))"""
    POST = "post"
    """x += norm(attention(x)); x += norm(mlp(x))"""
    PARALLEL = "parallel"
    """y = norm(x); x += attention(y) + mlp(y)"""


class QKNorm(Enum):
    """The norm of queries and keys before their rotation."""

    NONE = ""
    HEAD = "head"
    """RMSNorm of each head"""
    ALL = "all"
    """RMSNorm of all queries together, and of all keys"""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings, as transformers names them; what a type does not use keeps its default."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """A factor of the period of each pair, for up to original_max tokens (longrope)"""
    long_factor: tuple[float, ...] = ()
    """The factors for more tokens"""
    share: float = 1.0
    """Part of a head's dimensions that is rotated, its first ones"""
    interleaved: bool = False
    """Neighbouring dimensions are rotated as a pair; else the two are half of the rotated dimensions apart."""

    def rotated(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.share)

    def order(self, head_dim: int) -> list[int]:
        """Return the dimensions of a head in the order of kernels, which rotate pairs half a head apart."""
        rotated = self.rotated(head_dim)
        pairs = [(2 * i, 2 * i + 1) if self.interleaved else (i, i + rotated // 2) for i in range(rotated // 2)]
        pairs += [(i, i + (head_dim - rotated) // 2) for i in range(rotated, rotated + (head_dim - rotated) // 2)]
        return [left for left, _ in pairs] + [right for _, right in pairs]


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of a layer."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    reach: Reach = Reach.CAUSAL
    size: int = 0
    """Tokens of a window or chunk"""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they do not"""
    rope: int | None = 0
    """Index of its rope among the model's; None: no rotation"""
    qk_norm: QKNorm = QKNorm.NONE
    bias: bool = False
    """The product of queries, keys and values has a bias."""
    output_bias: bool = False

    def own_keys(self, share: Share) -> tuple[int, int]:
        """Return the first of a rank's heads of keys and values, and the one after its last: ranks that outnumber them
        repeat them."""
        if self.kv_heads >= share.world:
            return share.part(self.kv_heads)
        first = share.rank * self.kv_heads // share.world
        return first, first + 1

    def shared(self, share: Share) -> AttentionSpec:
        """Return the attention of a rank's heads."""
        first, last = self.own_keys(share)
        return replace(self, heads=self.heads // share.world, kv_heads=last - first)


@dataclass(frozen=True)
class MlpSpec:
    """The MLP of a layer."""

    width: int
    activation: Activation = Activation.SILU
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer."""

    attention: AttentionSpec
    mlp: MlpSpec
    order: NormOrder = NormOrder.PRE
    residual: float = 1.0
    """Factor of the results of attention and MLP"""
    group: int = 0
    """The index of its page group"""

    @property
    def special(self) -> list[str]:
        """See `ModelSpec.special`."""
        mlp, found = self.mlp, [f"{self.order.value} norms"] * (self.order is not NormOrder.PRE)
        found += ["scaled residuals"] * (self.residual != 1)
        if mlp.activation is not Activation.SILU or not mlp.gated:
            found.append(f"an MLP with {mlp.activation.name}{'' if mlp.gated else ' without a gate'}")
        return found + ["a norm of all queries together"] * (self.attention.qk_norm is QKNorm.ALL)

    def within(self, length: int) -> LayerSpec:
        """Return the layer for sequences of at most this length, in tokens: a window that is as long is none."""
        at = self.attention
        return replace(self, attention=replace(at, reach=Reach.CAUSAL, size=0)) if at.size >= length else self

    def shared(self, share: Share) -> LayerSpec:
        """Return the layer of a rank's heads and its part of the MLP's width."""
        if share.world == 1:
            return self
        mlp = replace(self.mlp, width=self.mlp.width // share.world)
        return replace(self, attention=self.attention.shared(share), mlp=mlp)

    def products(self, hidden: int) -> dict[str, ProductSpec]:
        """Return its products by name; H is `hidden`."""
        at, mlp = self.attention, self.mlp
        queries, keys = at.heads * at.head_dim, at.kv_heads * at.head_dim
        return {
            "qkv": ProductSpec(hidden, (queries, keys, keys), at.bias),
            "output": ProductSpec(queries, (hidden,), at.output_bias),
            "gate_up": ProductSpec(hidden, (mlp.width,) * (2 if mlp.gated else 1), mlp.bias),
            "down": ProductSpec(mlp.width, (hidden,), mlp.bias),
        }

    def parts(self, share: Share) -> dict[str, ProductPart]:
        """Return a rank's parts of its products by name."""
        at = self.attention
        queries, keys = (
            (first * at.head_dim, last * at.head_dim) for first, last in (share.part(at.heads), at.own_keys(share))
        )
        width = share.part(self.mlp.width)
        return {
            "qkv": ProductPart((queries, keys, keys)),
            "output": ProductPart(inputs=queries, biased=share.leads),
            "gate_up": ProductPart((width,) * (2 if self.mlp.gated else 1)),
            "down": ProductPart(inputs=width, biased=share.leads),
        }


class ProductSpec(NamedTuple):
    """A product of a layer."""

    inputs: int
    outputs: tuple[int, ...]
    """Outputs of each of its projections"""
    bias: bool


class ProductPart(NamedTuple):
    """A rank's part of a product. Ranges are from the first to the one after the last."""

    outputs: tuple[tuple[int, int], ...] = ()
    """Range of outputs of each of its projections; () for all"""
    inputs: tuple[int, int] | None = None
    """Range of inputs, whose results are summed over ranks; None for all"""
    biased: bool = True
    """Whether it adds the bias"""


@dataclass(frozen=True)
class NormSpec:
    """The norms of a model."""

    eps: float
    centered: bool = False
    """LayerNorm, and not RMSNorm"""
    bias: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A decoder."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    ropes: tuple[RopeConfig, ...] = (RopeConfig(),)
    tied: bool = False
    positions: int = 0
    """Learned embeddings of positions; 0: none"""
    embedding_factor: float = 1.0
    factor_rounded: bool = False
    """The factor of embeddings is rounded to the model's dtype."""
    logits_factor: float = 1.0
    logits_cap: float = 0.0
    """Logits become cap * tanh(logit / cap); 0: they do not"""

    def __post_init__(self) -> None:
        shapes = {(one.attention.kv_heads, one.attention.head_dim, one.group) for one in self.layers}
        assert len(shapes) <= 1, "layers differ in heads of keys or page groups, and one KV memory has them all"
        assert self.norm.centered or not self.norm.bias, "RMSNorm has no bias"

    def shared(self, share: Share) -> ModelSpec:
        """Return the decoder of a rank: its heads and MLPs are its own, vocabulary and hidden size the whole."""
        return self if share.world == 1 else replace(self, layers=tuple(one.shared(share) for one in self.layers))

    def own_tokens(self, share: Share) -> tuple[int, int]:
        """Return the first token that a rank embeds and scores, and the one after its last: whole blocks of
        `TOKEN_BLOCK` if there are enough for all ranks."""
        count, world = self.vocab_size, share.world
        size = -(-count // (world * TOKEN_BLOCK)) * TOKEN_BLOCK
        if size * (world - 1) >= count:
            return share.rank * count // world, (share.rank + 1) * count // world
        return share.rank * size, min((share.rank + 1) * size, count)

    @property
    def layer(self) -> LayerSpec:
        """The first layer, for sizes that all layers share."""
        return self.layers[0]

    @cached_property
    def special(self) -> tuple[str, ...]:
        """Everything that fast ways do not compute, in words."""
        found = ["LayerNorm"] * self.norm.centered
        for layer in self.layers:
            found += layer.special
        found += ["scaled embeddings"] * (self.embedding_factor != 1) + ["learned positions"] * (self.positions > 0)
        return tuple(dict.fromkeys(found))

    @property
    def plain(self) -> bool:
        """Whether fast ways compute every layer: RMSNorm before each half, a gated SiLU, sums and embeddings as they
        are, and no norm across heads."""
        return not self.special

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes that an engine plans by."""
        hidden, vocab = self.hidden_size, self.vocab_size * self.hidden_size
        products = [product for layer in self.layers for product in layer.products(hidden).values()]
        weights = sum(one.inputs * sum(one.outputs) for one in products) + 2 * hidden * len(self.layers)
        widest = max(max(layer.mlp.width * 4, hidden * 8) for layer in self.layers)
        queries = sum(layer.attention.heads * layer.attention.head_dim for layer in self.layers)
        return ModelSizes(hidden, len(self.layers), weights + vocab * (1 if self.tied else 2), widest, queries)


@dataclass(frozen=True)
class CountedSpec(ModelSpec):
    """A decoder of transformers, without layers: its class is made to count the sizes."""

    digest: str = ""
    """Digest of its whole config"""
    count: Callable[[], ModelSizes] | None = field(default=None, repr=False, compare=False)
    """Makes the class, and counts its sizes"""

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes that an engine plans by. Imports transformers."""
        assert self.count is not None
        return self.count()


class ModelSizes(NamedTuple):
    """Sizes of a model."""

    hidden: int
    layers: int
    parameters: int
    widest: int
    """Numbers of a token's widest activations, four of them alive at once"""
    queries: int
    """Width of the queries of all layers together"""
