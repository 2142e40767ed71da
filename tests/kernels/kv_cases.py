"""Batches whose KV memory has fewer bits, and what they hold, decoded by written-out formulas in float64."""

from __future__ import annotations

import torch
from attend_cases import Given
from paged import Paged
from torch import Tensor

from gapless.kernels.kv import KVFormat, to_e4m3, to_nibbles

FORMATS = (KVFormat.FP8, KVFormat.K8V4)
SCALES = torch.tensor([[3.0, 7.0], [0.25, 0.5]])
"""Those of the layer that tests fill are the last."""


def e4m3_values() -> Tensor:
    """The number of each byte, float64 [256]: sign, 4 bits of exponent with a bias of 7, 3 of fraction; no infinity."""
    found = []
    for byte in range(256):
        sign, exponent, fraction = byte >> 7, byte >> 3 & 15, byte & 7
        size = 2.0 ** (exponent - 7) * (1 + fraction / 8) if exponent else 2.0**-6 * fraction / 8
        found.append(float("nan") if byte & 127 == 127 else -size if sign else size)
    return torch.tensor(found, dtype=torch.float64)


def in_format(made: Paged, kind: KVFormat, scales: Tensor = SCALES) -> tuple[Paged, Paged]:
    """A batch whose memory is stored as `kind`, and the same with float64 numbers of what is stored."""
    plain, device = made.cache.cpu(), made.cache.device
    stored = []
    for layer in range(plain.shape[1]):
        (keys, values), (key_scale, value_scale) = plain[:, layer].unbind(1), scales[layer]
        parts = [to_e4m3(keys, key_scale).view(torch.uint8)]
        if kind is KVFormat.FP8:
            parts.append(to_e4m3(values, value_scale).view(torch.uint8))
        else:
            nibbles, pairs = to_nibbles(values)
            parts += [nibbles, pairs.view(torch.uint8)]
        stored.append(torch.cat([part.flatten(1) for part in parts], 1))
    raw = torch.stack(stored, 1)
    pages, layers, _, page_size, heads, dim = plain.shape
    if kind is KVFormat.FP8:
        raw = raw.view(torch.float8_e4m3fn).view(plain.shape)
    else:
        raw = raw.view(pages, layers, 1, page_size, heads, dim * 3 // 2 + 4)
    cache = raw.to(device)
    own = made._replace(cache=cache, scales=scales.to(device))
    return own, made._replace(cache=decoded(cache, dim, scales).to(device))


def decoded(cache: Tensor, dim: int, scales: Tensor = SCALES) -> Tensor:
    """The numbers of a memory, float64 [pages, layers, 2, page_size, K, dim]."""
    pages, layers, _, page_size, heads, _ = cache.shape
    numbers, raw = e4m3_values(), cache.cpu().view(torch.uint8).flatten(2)
    entries, scales = page_size * heads, scales.double()
    keys = numbers[raw[..., : entries * dim].long()] * scales[:, 0, None]
    if cache.dtype == torch.float8_e4m3fn:
        values = numbers[raw[..., entries * dim :].long()] * scales[:, 1, None]
    else:
        nibbles = raw[..., entries * dim : entries * dim * 3 // 2].view(pages, layers, entries, dim // 2)
        pairs = raw[..., entries * dim * 3 // 2 :].contiguous().view(torch.float16).view(pages, layers, entries, 2)
        whole = torch.cat((nibbles % 16, nibbles // 16), -1).double()
        values = (whole * pairs[..., :1].double() + pairs[..., 1:].double()).flatten(2)
    return torch.stack((keys, values), 2).view(pages, layers, 2, page_size, heads, dim)


def given_in(given: Given, kind: KVFormat) -> tuple[Given, Tensor]:
    """The arguments of an operation over such a memory, and the answer."""
    own, plain = in_format(given.made, kind)
    return given._replace(made=own), given._replace(made=plain).wanted()
