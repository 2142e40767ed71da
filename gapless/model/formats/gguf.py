"""GGUF: llama.cpp's files. Q8_0 and Q4_0 are kept, other blocks are multiplied out by the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gapless.kernels.kinds import BLOCK, DENSE, WeightKind, WeightLayout
from gapless.model.formats.seam import FLOATS, Stored, StoredWeight
from gapless.model.gguf_files import read_table
from gapless.model.quantization import Quantization

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYOUTS = {"Q8_0": WeightLayout(WeightKind.INT8, BLOCK), "Q4_0": WeightLayout(WeightKind.INT4, BLOCK)}


class GgufFormat:
    """Implements `WeightFormat`."""

    def __init__(self, asked: Quantization) -> None:
        self.types: Mapping[str, str] = asked.values["types"]
        self.heads: Mapping[str, int] = asked.values.get("turned") or {}
        """Heads of the modules whose rows the converter turns, since llama's rope has its pairs side by side there"""

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        kind = self.types.get(module, "F32")
        rows = _turned_rows(outputs, self.heads.get(module.rpartition(".layers.")[2].partition(".")[2], 0))
        if kind in FLOATS and rows is None:
            return None
        read = partial(_read, kind=kind, rows=rows)
        return StoredWeight(_LAYOUTS.get(kind, DENSE), {"weight": Stored((outputs, inputs), (kind,))}, read)


class GgufTensors:
    """The tensors of a GGUF file, mapped."""

    def __init__(self, path: Path) -> None:
        self.table, self.data = read_table(path.parent), np.memmap(path, np.uint8, "r")

    def get_tensor(self, name: str) -> Tensor:
        """Return a plain tensor in its shape, or the blocks of a weight, uint8 [N, bytes of a row]."""
        kind, shape, offset, nbytes = self.table[name]
        data = torch.from_numpy(self.data[offset : offset + nbytes].copy())
        return data.view(_PLAIN[kind]).view(shape) if kind in _PLAIN else data.view(shape[0], -1)


def _turned_rows(outputs: int, heads: int) -> Tensor | None:
    """Return the converter's row of each of Hugging Face's; None for the same order."""
    if not heads:
        return None
    return torch.arange(outputs).view(heads, outputs // heads // 2, 2).mT.flatten()


def _read(found: Mapping[str, Tensor], kind: str, rows: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensors of a weight's layout from its blocks uint8 [N, bytes of a row], or from a plain weight."""
    weight = found["weight"] if rows is None else found["weight"][rows]
    if kind in FLOATS:
        return (weight,)
    if kind not in _LAYOUTS:
        from gguf import GGMLQuantizationType, dequantize  # an extra

        return (torch.from_numpy(dequantize(weight.numpy(), GGMLQuantizationType[kind])),)
    blocks = weight.view(len(weight), -1, 2 + (BLOCK if kind == "Q8_0" else BLOCK // 2))
    scale = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0].float()
    numbers = blocks[:, :, 2:].reshape(len(weight), -1)
    if kind == "Q8_0":
        return numbers.view(torch.int8), scale
    return numbers, scale, torch.full(scale.shape, 8, dtype=torch.uint8)
