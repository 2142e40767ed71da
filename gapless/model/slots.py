"""Which part of a model's parameters each tensor of a checkpoint fills."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError
from gapless.base.share import WHOLE_SHARE, Share
from gapless.kernels.kinds import DENSE
from gapless.kernels.matrix import Matrix
from gapless.kernels.views import NormWeights
from gapless.model.config import ModelConfig
from gapless.model.family import TensorNames
from gapless.model.formats.of_model import format_of
from gapless.model.formats.seam import FLOATS, StoredWeight, WeightFormat
from gapless.model.params import NORMS, PRODUCTS, Layer, Params
from gapless.model.shares import ALL, NOTHING, Cut, module_cuts, token_cut
from gapless.model.spec import LayerSpec, ModelSpec, QKNorm

_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
WHOLE = {torch.int64: ("I64",), torch.int32: ("I32",)}
"""Numbers of token ids, which are not cast"""


class Slot(NamedTuple):
    """The place of a checkpoint's tensor."""

    target: Tensor
    shape: tuple[int, ...]
    """The tensor's shape in the checkpoint"""
    arrange: Callable[[Tensor], Tensor] | None = None
    """Makes the contents of `target` of it; None if they are a copy, or repeat it"""
    optional: bool = False
    others: tuple[tuple[int, ...], ...] = ()
    """Other shapes that it may have"""

    @classmethod
    def of(cls, target: Tensor) -> Slot:
        """Return the slot of a tensor that is copied as it is."""
        return cls(target, tuple(target.shape))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Names that safetensors has for the dtypes it is cast from."""
        return WHOLE.get(self.target.dtype, FLOATS)

    @property
    def part(self) -> None:
        return None

    def fill(self, read: Tensor) -> None:
        self.target.copy_(read if self.arrange is None else self.arrange(read))


class StoredRows:
    """The rows of a matrix that the tensors of a stored weight fill, once all have been read."""

    def __init__(
        self, module: str, matrix: Matrix, stored: StoredWeight, cut: Cut, order: Tensor | None = None,
        turned: bool = False, plain: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """The weight is read whole, and `cut` as a layout. plain: the shape that the checkpoint's weight has if it is
        not quantised, which it may be."""
        self.module, self.matrix, self.stored, self.cut = module, matrix, stored, cut
        self.order, self.turned, self.plain = order, turned, plain
        self.read: dict[str, Tensor] = {}

    def put(self) -> None:
        """Fill the rows. Raises CheckpointError."""
        read = {name: tensor.mT if self.turned else tensor for name, tensor in self.read.items()}
        self.read = {}
        if self.plain and read.keys() == {"weight"} and read["weight"].dtype in _PLAIN:
            self.matrix.tensors[0].copy_(self.cut.of(read["weight"]))
            return
        for name, stored in self.stored.tensors.items():
            if name not in read and not stored.optional:
                raise CheckpointError(f"tensor '{self.module}.{name}' is missing, beside {sorted(read)}")
        cut = self.cut
        if self.stored.by_rows:
            read, cut = {name: cut.of_rows.of(tensor) for name, tensor in read.items()}, cut.of_columns
        found = Matrix(self.stored.read(read), None, self.stored.layout, self.matrix.dtype)
        if any(one.is_floating_point() and not bool(one.isfinite().all()) for one in found.tensors[1:]):
            raise CheckpointError(f"the scales of '{self.module}' must be finite numbers: fetch its file again")
        if found.layout != self.matrix.layout:
            found = found.multiplied_out()
        found = cut.of_matrix(found)
        for target, tensor in zip(self.matrix.tensors, found.tensors, strict=True):
            target.copy_(tensor if self.order is None else tensor[self.order])


class StoredTensor(NamedTuple):
    """One of the tensors of a stored weight. Has the fields of a `Slot` that loading asks for."""

    part: StoredRows
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool
    others: tuple[tuple[int, ...], ...] = ()

    def fill(self, read: Tensor) -> None:
        self.part.read[self.name] = read


TensorSlot = Slot | StoredTensor
"""The place of any tensor of a checkpoint"""


def _pieces(part: StoredRows) -> dict[str, TensorSlot]:
    """Return the tensors of a module's stored weight, by name."""
    found: dict[str, TensorSlot] = {}
    for name, (shape, dtypes, optional, others) in part.stored.tensors.items():
        shape, optional = shape[::-1] if part.turned else shape, optional or bool(part.plain)
        found[f"{part.module}.{name}"] = StoredTensor(part, name, shape, dtypes, optional, others)
    if part.plain:
        name, rest = f"{part.module}.weight", part.stored.tensors.get("weight")
        dtypes = FLOATS + (rest.dtypes if rest else ())
        found[name] = StoredTensor(part, "weight", part.plain, dtypes, True)
    return found


def slots(config: ModelConfig, params: Params) -> dict[str, TensorSlot]:
    """Return where each tensor goes that the checkpoint must hold, by its Hugging Face name."""
    names, spec, form = config.names, config.spec, format_of(config)
    shape, cut = (spec.vocab_size, spec.hidden_size), token_cut(spec, params.share)
    found = plain_slots(form, names.embedding, params.embedding, shape, cut)
    found |= _norm_slots(names.norm, params.norm, names)
    if params.positions is not None:
        found[f"{names.positions}.weight"] = Slot.of(params.positions)
    if not spec.tied:
        found |= plain_slots(form, names.head, params.head, shape, cut)
    if params.kv_scales is not None:
        found |= _kv_scale_slots(names, params.kv_scales)
    for i, layer in enumerate(params.layers):
        found |= _layer_slots(_Read(config, form, spec.layers[i], names.layer.format(i), params.share), layer)
    return found


def _kv_scale_slots(names: TensorNames, scales: Tensor) -> dict[str, TensorSlot]:
    """Return the slots of the scales of keys and values, [layers, 2], by the names that programs give them."""
    found: dict[str, TensorSlot] = {}
    for layer, pair in enumerate(scales):
        for place, letter in enumerate("kv"):
            module = f"{names.layer.format(layer)}.{names.qkv[0].rpartition('.')[0]}"
            slot = Slot(pair[place], (), partial(torch.reshape, shape=()), optional=True, others=((1,),))
            for name in (f"{letter}_scale", f"{letter}_proj.{letter}_scale", f"{letter}_proj.output_scale"):
                found[f"{module}.{name}"] = slot
    return found


def layer_slots(
    config: ModelConfig, layer: Layer, prefix: str, share: Share = WHOLE_SHARE
) -> dict[str, TensorSlot]:  # fmt: skip
    """Return where each tensor of a layer like the first goes that the checkpoint must hold, by its name after
    `prefix`."""
    return _layer_slots(_Read(config, format_of(config), config.spec.layer, prefix, share), layer)


class _Read(NamedTuple):
    """A layer that is read."""

    config: ModelConfig
    format: WeightFormat | None
    kind: LayerSpec
    """The layer of one rank that has the whole"""
    prefix: str
    share: Share = WHOLE_SHARE


def plain_slots(
    form: WeightFormat | None, module: str, target: Tensor, shape: tuple[int, ...], cut: Cut = ALL
) -> dict[str, TensorSlot]:
    """Return the slots of a matrix that is plain here, a part of one of this shape, whether or not the checkpoint
    quantises it."""
    stored = form.weight(module, *shape) if form else None
    if stored is None:
        return {f"{module}.weight": _row_slot(target, shape, cut)}
    return _pieces(StoredRows(module, Matrix((target,), None, DENSE, target.dtype), stored, cut, plain=shape))


def _layer_slots(read: _Read, layer: Layer) -> dict[str, TensorSlot]:
    names, found = read.config.names, dict[str, TensorSlot]()
    for name in NORMS:
        if (norm := getattr(layer, name)) is not None:
            found |= _norm_slots(getattr(names, name), norm, names)
    if layer.qk_norm is not None:
        found |= _qk_norm_slots(read, layer.qk_norm)
    found = {f"{read.prefix}.{name}": slot for name, slot in found.items()}
    for name in PRODUCTS:
        found |= _product_slots(read, name, getattr(layer, name))
    return found


def _product_slots(read: _Read, name: str, matrix: Matrix) -> dict[str, TensorSlot]:
    """Return the slots of the modules of a product."""
    (config, form, kind, prefix, share), found = read, dict[str, TensorSlot]()
    names, hidden, own, start = config.names, config.spec.hidden_size, kind.shared(share), 0
    modules, (inputs, _, biased) = names.modules(name), kind.products(hidden)[name]
    sizes, own_sizes = (names.outputs(name, layer, hidden) for layer in (kind, own))
    cuts = module_cuts(name, kind, hidden, share, len(modules))
    inputs = inputs if cuts[0].columns else matrix.inputs  # a head that drafts has its own
    for i, (module, size, own_size, cut) in enumerate(zip(modules, sizes, own_sizes, cuts, strict=True)):
        order, module = rope_rows(config.spec, own, names, name, i), f"{prefix}.{module}"
        rows, start = slice(start, start + own_size), start + own_size
        part = matrix._replace(tensors=tuple(tensor[rows] for tensor in matrix.tensors))
        stored = form.weight(module, size, inputs) if form else None
        if stored is None:
            found[f"{module}.weight"] = _row_slot(part.tensors[0], (size, inputs), cut, order, names.transposed)
        else:
            asked = config.quantization
            turned = names.transposed and asked is not None and asked.at_load  # formats have their own order
            found |= _pieces(StoredRows(module, part, stored, cut, order, turned))
        if matrix.bias is not None:
            found[f"{module}.bias"] = _row_slot(matrix.bias[rows], (size,), cut.of_rows, order)
        elif biased:  # another rank's
            found[f"{module}.bias"] = _row_slot(torch.empty(0), (size,), NOTHING)
    return found


def _row_slot(
    part: Tensor, shape: tuple[int, ...], cut: Cut, order: Tensor | None = None, turned: bool = False
) -> Slot:
    """Return the slot of a rank's cut of one module, whose weight has this shape."""

    def arrange(read: Tensor) -> Tensor:
        read = cut.of(read.mT if turned else read)
        return read if order is None else read[order]

    plain = not turned and order is None and cut == ALL
    return Slot(part, shape[::-1] if turned else shape, None if plain else arrange)


def _norm_slots(name: str, norm: NormWeights, names: TensorNames) -> dict[str, TensorSlot]:
    slot = Slot.of(norm.weight)
    slot = slot._replace(arrange=_plus_one) if names.norms_lack_one else slot
    found: dict[str, TensorSlot] = {f"{name}.weight": slot}
    if norm.bias is not None:
        found[f"{name}.bias"] = Slot.of(norm.bias)
    return found


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1


def rope_rows(spec: ModelSpec, kind: LayerSpec, names: TensorNames, name: str, number: int) -> Tensor | None:
    """Return the kernels' order of a module's outputs, int64; None for the checkpoint's own. See `RopeConfig.order`."""
    at = kind.attention
    if name != "qkv" or at.rope is None or number == 2:
        return None
    rope = spec.ropes[at.rope]
    if not rope.interleaved and rope.rotated(at.head_dim) == at.head_dim:
        return None
    queries, keys = at.heads * at.head_dim, at.kv_heads * at.head_dim
    within = torch.tensor(rope.order(at.head_dim))
    heads = at.heads + at.kv_heads if len(names.qkv) == 1 else (at.heads, at.kv_heads)[number]
    rows = (torch.arange(heads)[:, None] * at.head_dim + within).flatten()
    return torch.cat((rows, torch.arange(queries + keys, queries + 2 * keys))) if len(names.qkv) == 1 else rows


def _qk_norm_slots(read: _Read, norm: Tensor) -> dict[str, TensorSlot]:
    """Return the slots of the norms of queries and keys: the weight of one head, or of all together."""
    spec, names, at, share = read.config.spec, read.config.names, read.kind.attention, read.share
    order = None if at.rope is None else torch.tensor(spec.ropes[at.rope].order(at.head_dim))
    heads, found = at.shared(share).heads, dict[str, TensorSlot]()
    for name, part, many, own in (
        (names.q_norm, norm[:heads], at.heads, share.part(at.heads)),
        (names.k_norm, norm[heads:], at.kv_heads, at.own_keys(share)),
    ):
        alike = at.qk_norm is QKNorm.HEAD
        rows = slice(None) if alike else slice(*own)

        def arrange(read: Tensor, rows: slice = rows) -> Tensor:
            heads = read.float().view(-1, at.head_dim)[rows]
            return (heads if order is None else heads[:, order]) + (1 if names.norms_lack_one else 0)

        found[f"{name}.weight"] = Slot(part, ((1 if alike else many) * at.head_dim,), arrange)
    return found
