"""The tensors of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gapless.kernels.kinds import BLOCK
from gapless.model.gguf_files import read_table

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The tensors of a GGUF file, mapped."""

    def __init__(self, path: Path) -> None:
        self.table, self.data = read_table(path.parent), np.memmap(path, np.uint8, "r")

    def get_tensor(self, name: str) -> Tensor:
        """Return a plain tensor in its shape, or the blocks of a weight, uint8 [N, bytes of a row]."""
        kind, shape, offset, nbytes = self.table[name]
        data = torch.from_numpy(self.data[offset : offset + nbytes].copy())
        return data.view(_PLAIN[kind]).view(shape) if kind in _PLAIN else data.view(shape[0], -1)


def turned_rows(outputs: int, heads: int) -> Tensor:
    """Return the converter's row of each of Hugging Face's, int64 [N]."""
    return torch.arange(outputs).view(heads, outputs // heads // 2, 2).mT.flatten()


def read_weight(found: Mapping[str, Tensor], kind: str, heads: int) -> tuple[Tensor, ...]:
    """Return the tensors of a weight's layout from its blocks uint8 [N, bytes of a row], or from a plain weight."""
    weight = found["weight"]
    if heads:
        weight = weight[turned_rows(len(weight), heads)]
    if kind in _PLAIN:
        return (weight,)
    if kind not in ("Q8_0", "Q4_0"):
        from gguf import GGMLQuantizationType, dequantize  # an extra

        return (torch.from_numpy(dequantize(weight.numpy(), GGMLQuantizationType[kind])),)
    blocks = weight.view(len(weight), -1, 2 + (BLOCK if kind == "Q8_0" else BLOCK // 2))
    scale = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0].float()
    numbers = blocks[:, :, 2:].reshape(len(weight), -1)
    if kind == "Q8_0":
        return numbers.view(torch.int8), scale
    return numbers, scale, torch.full(scale.shape, 8, dtype=torch.uint8)
