"""A rank's share of a model's weights, cut from whole ones.

Heads and widths of MLPs are divided: queries, keys, values, gates and ups by their outputs, `output` and `down` by
their inputs, whose results are summed over ranks. Embedding and head are divided by tokens. Norms and learned positions
are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import ConfigError
from gapless.base.share import Share
from gapless.kernels.matrix import Matrix
from gapless.model.config import ModelConfig
from gapless.model.formats.of_model import format_of, product_layout
from gapless.model.spec import LayerSpec, ModelSpec


class Cut(NamedTuple):
    """A part of a weight [N, K] or a bias [N]."""

    rows: tuple[tuple[int, int], ...] = ()
    """Ranges of rows, which become neighbours, each from its first to the one after its last; () for all"""
    columns: tuple[int, int] | None = None
    """A range of columns; None for all"""

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of a tensor: a view if it is one range."""
        parts = [whole[first:last] for first, last in self.rows] or [whole]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found if self.columns is None else found[:, slice(*self.columns)]

    def of_matrix(self, whole: Matrix) -> Matrix:
        """Return the part of a matrix without a bias. Columns are cut at multiples of `WeightLayout.step`."""
        found = whole._replace(tensors=tuple(self.of_rows.of(tensor) for tensor in whole.tensors))
        return found if self.columns is None else found.columns(*self.columns)

    @property
    def of_rows(self) -> Cut:
        """The cut of rows alone, as of a bias."""
        return Cut(self.rows)

    @property
    def of_columns(self) -> Cut:
        """The cut of columns alone."""
        return Cut((), self.columns)


ALL, NOTHING = Cut(), Cut(((0, 0),))


def module_cuts(name: str, layer: LayerSpec, hidden: int, share: Share, modules: int) -> list[Cut]:
    """Return a rank's part of each of the `modules` that hold a product: one for each projection, or one for all."""
    if share.world == 1:
        return [ALL] * modules
    outputs, inputs, _ = layer.parts(share)[name]
    if not outputs or modules == len(outputs):
        return [Cut((one,), inputs) for one in outputs] or [Cut((), inputs)]
    begin, ranges = 0, list[tuple[int, int]]()
    for size, (first, last) in zip(layer.products(hidden)[name].outputs, outputs, strict=True):
        ranges.append((begin + first, begin + last))
        begin += size
    return [Cut(tuple(ranges), inputs)]


def token_cut(spec: ModelSpec, share: Share) -> Cut:
    """Return a rank's part of embedding and head."""
    return ALL if share.world == 1 else Cut((spec.own_tokens(share),))


def check_share(config: ModelConfig, world: int, field: str = "tensor_parallel_size") -> None:
    """Raise ConfigError, naming the field and what can be, unless `world` ranks can share a native model."""
    if world == 1 or not (why := next(_obstacles(config, world), "")):
        return
    most = max(layer.attention.heads for layer in config.spec.layers)
    known = [count for count in range(1, most + 1) if next(_obstacles(config, count), None) is None]
    can = " or ".join(filter(None, (", ".join(map(str, known[:-1])), str(known[-1]))))
    raise ConfigError(f"{field}: {why} cannot be shared by {world} ranks: {can} can")


def _obstacles(config: ModelConfig, world: int) -> Iterator[str]:
    """Yield the parts of a model that `world` ranks cannot share."""
    for layer in dict.fromkeys(config.spec.layers):
        heads, keys, width = layer.attention.heads, layer.attention.kv_heads, layer.mlp.width
        if heads % world:
            yield f"{heads} heads"
        if keys % world and world % keys:
            yield f"{keys} heads of keys and values"
        if width % world:
            yield f"an MLP of width {width}"
    if config.spec.vocab_size < world:
        yield f"a vocabulary of {config.spec.vocab_size} tokens"
    if (form := format_of(config)) is None or world == 1:
        return
    for number, layer in enumerate(config.spec.layers):
        for name in ("output", "down"):
            layout = product_layout(form, config, name, layer, config.names.layer.format(number))
            inputs = layer.products(config.spec.hidden_size)[name].inputs
            if inputs // world % layout.step:
                yield f"{inputs} inputs of {name} in {layout}, cut at multiples of {layout.step},"
