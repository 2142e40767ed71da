"""Weights in one of a few layouts, and the products by them.

A checkpoint's format is read into one of these (`model.formats`), whatever its own form. Kernels have products by the
kind of a layout (`Kernels.products`); a weight that they have none for is multiplied out at load.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from gapless.kernels.kinds import BLOCK, DENSE, WeightKind, WeightLayout

LARGEST_NUMBERS = {WeightKind.FP8: 448.0, WeightKind.INT8: 127.0, WeightKind.INT4: 15.0}
"""Largest number of each kind; 15 of INT4 is the span of its nibbles"""


class Matrix(NamedTuple):
    """The parameters of a product: N outputs, K inputs, G groups of them. Projections of one input are one matrix."""

    tensors: tuple[Tensor, ...]
    """The weight and its scales, in each kind of layout:

    - DENSE: weight [N, K]
    - FP8: weight float8_e4m3fn [N, K], scale float32 [N, G]
    - INT8: weight int8 [N, K], scale float32 [N, G]
    - INT4: weight uint8 [N, K / 2], scale float32 [N, G], zero uint8 [N, G]; byte j of block b of 32 columns has the
      column 32 b + j in its low half, and 32 b + 16 + j in its high half. A value is (half - zero) * scale."""
    bias: Tensor | None = None
    """[N]; None where the family has none"""
    layout: WeightLayout = DENSE
    dtype: torch.dtype = torch.float32
    """The model's; of a dense weight its own"""

    @classmethod
    def empty(cls, layout: WeightLayout, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Return a matrix of uninitialised tensors without a bias."""
        shapes = tensor_shapes(layout, outputs, inputs, dtype)
        return cls(tuple(torch.empty(*shape, dtype=kind, device=device) for shape, kind in shapes), None, layout, dtype)

    @property
    def outputs(self) -> int:
        return len(self.tensors[0])

    @property
    def inputs(self) -> int:
        return self.tensors[0].shape[1] * (2 if self.layout.kind is WeightKind.INT4 else 1)

    def rows(self, first: int, last: int) -> Matrix:
        """Return the outputs `first` to `last`, a view: any cut is exact."""
        bias = None if self.bias is None else self.bias[first:last]
        return self._replace(tensors=tuple(tensor[first:last] for tensor in self.tensors), bias=bias)

    def columns(self, first: int, last: int) -> Matrix:
        """Return the inputs `first` to `last`, a view without the bias. Cuts are at multiples of `layout.step`."""
        step, group = self.layout.step, self.layout.group
        assert not first % step and (last == self.inputs or not last % step), "cut between groups"
        half = 2 if self.layout.kind is WeightKind.INT4 else 1
        weight, *rest = self.tensors
        if group:
            rest = [tensor[:, first // group : -(-last // group)] for tensor in rest]
        return self._replace(tensors=(weight[:, first // half : last // half], *rest), bias=None)

    def multiplied_out(self) -> Matrix:
        """Return the same weight as a dense one, rounded once to the model's dtype."""
        if self.layout.kind is WeightKind.DENSE:
            return self
        return Matrix((self.values().to(self.dtype),), self.bias, DENSE, self.dtype)

    def values(self) -> Tensor:
        """Return the weight, float32 [N, K]."""
        weight, *rest = self.tensors
        if self.layout.kind is WeightKind.DENSE:
            return weight.float()
        if self.layout.kind is WeightKind.INT4:
            return (halves(weight) - self._wide(rest[1])) * self._wide(rest[0])
        return weight.float() * self._wide(rest[0])

    def _wide(self, by_group: Tensor) -> Tensor:
        """Return numbers by group as ones by columns, float32."""
        size = min(self.layout.group or self.inputs, self.inputs)
        return by_group.float().repeat_interleave(size, dim=1)[:, : self.inputs]


def tensor_shapes(
    layout: WeightLayout, outputs: int, inputs: int, dtype: torch.dtype
) -> list[tuple[tuple[int, int], torch.dtype]]:
    """Return shape and dtype of each tensor of a weight."""
    scale = (outputs, layout.groups(inputs)), torch.float32
    match layout.kind:
        case WeightKind.DENSE:
            return [((outputs, inputs), dtype)]
        case WeightKind.FP8:
            return [((outputs, inputs), torch.float8_e4m3fn), scale]
        case WeightKind.INT8:
            return [((outputs, inputs), torch.int8), scale]
        case WeightKind.INT4:
            assert not inputs % BLOCK and not layout.group % BLOCK, "blocks of 32 columns"
            return [((outputs, inputs // 2), torch.uint8), scale, (scale[0], torch.uint8)]


def halves(packed: Tensor) -> Tensor:
    """Return the numbers 0 to 15 of an INT4 weight [N, K / 2], float32 [N, K]."""
    blocks = packed.view(len(packed), -1, 1, BLOCK // 2)
    return torch.cat((blocks & 15, blocks >> 4), dim=2).view(len(packed), -1).float()


def packed(numbers: Tensor) -> Tensor:
    """Return the INT4 weight uint8 [N, K / 2] of numbers from 0 to 15, of any dtype [N, K]."""
    blocks = numbers.to(torch.uint8).view(len(numbers), -1, 2, BLOCK // 2)
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).view(len(numbers), -1)


def round_to(layout: WeightLayout, weight: Tensor) -> tuple[Tensor, ...]:
    """Round a weight [N, K] of any float dtype to the nearest numbers of a layout; scales come from each group's
    largest, or of INT4 from both ends."""
    if layout.kind is WeightKind.DENSE:
        return (weight,)
    outputs, inputs = weight.shape
    size, most = layout.group or inputs, LARGEST_NUMBERS[layout.kind]
    wide = torch.nn.functional.pad(weight.float(), (0, -inputs % size)).view(outputs, -1, size)
    if layout.kind is WeightKind.INT4:
        low, high = (end.clamp(max=0.0) if i == 0 else end.clamp(min=0.0) for i, end in enumerate(wide.aminmax(dim=2)))
        scale = _scale((high - low) / most).to(weight.dtype).float()  # as checkpoints store it
        zero = (-low / scale).round().clamp(0, most)
        numbers = ((wide / scale[:, :, None]).round() + zero[:, :, None]).clamp(0, most)
        return packed(numbers.view(outputs, -1)[:, :inputs].contiguous()), scale, zero.to(torch.uint8)
    scale = _scale(wide.abs().amax(dim=2) / most)
    numbers = (wide / scale[:, :, None]).view(outputs, -1)[:, :inputs]
    if layout.kind is WeightKind.FP8:
        return numbers.clamp(-most, most).to(torch.float8_e4m3fn), scale
    return numbers.round().clamp(-most, most).to(torch.int8), scale


def _scale(found: Tensor) -> Tensor:
    """Return the scale of each group; 1 for a group of zeros."""
    return torch.where(found > 0, found, 1.0)


class Linear(Protocol):
    """x [T, in] -> x @ weight.T + bias [T, out], with the weight in the form that its device likes best.

    The result is written to `out` (contiguous) if given, and returned. An implementation that can also return the
    weight's rows `ids` int64 [T] has a method `rows(ids) -> [T, in]`.
    """

    kind: WeightKind
    """The kind of the weights that it is made of"""

    @classmethod
    def of(cls, matrix: Matrix) -> Self | None:
        """Make the product by a weight of this kind; None if it does not serve this one."""
        ...

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


def dense(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """Return the matrix of a plain weight [outputs, inputs]."""
    return Matrix((weight,), bias, DENSE, weight.dtype)


def refill(product: Linear, matrix: Matrix) -> None:
    """Replace the weight of a product by one of the same layout and shape, from any device, in the memory known to
    graphs."""
    new = type(product).of(matrix if product.kind is matrix.layout.kind else matrix.multiplied_out())
    assert new is not None, "a product serves every weight of its shape"
    _copy(product, new)


def _copy(product: object, other: object) -> None:
    """Copy the tensors of `other` into the memory of `product`."""
    for name, found in vars(other).items():
        if isinstance(found, Tensor):
            own = getattr(product, name)
            own.copy_(found if found.layout is own.layout else found.to_dense())  # the host's layout is its own
        elif hasattr(found, "weight"):
            _copy(getattr(product, name), found)
