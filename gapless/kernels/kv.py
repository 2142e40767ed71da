"""Formats of a KV memory: its shapes and bytes, and the numbers in them, in plain torch: the reference of all kernels.

The dtype of a memory is its format. FP8 stores keys and values as e4m3, divided by the layer's scales. K8V4 does that
with keys; a value of one head is nibbles, with a scale and a least value of its own as float16. Its pages are bytes,
and one page of a layer is three sections, one after the other: keys [page_size, K, D], nibbles [page_size, K, D / 2]
(byte j: value j low, value j + D / 2 high), and pairs [page_size, K, 2] of scale and least value.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import ConfigError
from gapless.kernels.views import KV

LARGEST_E4M3 = 448.0
"""Largest number of e4m3"""
LARGEST_HALF = 65504.0
"""Largest number of float16"""
LEVELS = 15
"""Steps of a nibble"""


class KVFormat(StrEnum):
    """The numbers of a KV memory, as `--kv-cache-dtype` names them."""

    AUTO = "auto"
    """The model's dtype"""
    FP8 = "fp8"
    K8V4 = "k8v4"


class KVLayout(NamedTuple):
    """One layer of a KV memory."""

    format: KVFormat
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Data type of the model"""

    @property
    def stored(self) -> torch.dtype:
        """Data type of the memory"""
        return {KVFormat.FP8: torch.float8_e4m3fn, KVFormat.K8V4: torch.uint8}.get(self.format, self.dtype)

    def shape(self, pages: int, layers: int, page_size: int) -> tuple[int, ...]:
        """Shape of a memory. Raises ConfigError if the format has no such pages."""
        if self.format is not KVFormat.K8V4:
            return pages, layers, 2, page_size, self.kv_heads, self.head_dim
        if self.head_dim % 2 or page_size * self.kv_heads * self.head_dim % 8:
            raise ConfigError(
                f"kv_cache_dtype: k8v4 needs heads of an even size, and a multiple of 8 numbers in a page; this model "
                f"has {self.kv_heads} KV heads of {self.head_dim}, and block_size is {page_size}: take fp8 or auto"
            )
        return pages, layers, 1, page_size, self.kv_heads, self.head_dim * 3 // 2 + 4

    @property
    def entry_bytes(self) -> int:
        """Bytes of the key and value of one token"""
        if self.format is KVFormat.K8V4:
            return self.kv_heads * (self.head_dim * 3 // 2 + 4)
        return 2 * self.kv_heads * self.head_dim * self.stored.itemsize

    def layer_bytes(self, page_size: int) -> int:
        """Bytes of one page of one layer. Raises ConfigError if the format has no such pages."""
        self.shape(1, 1, page_size)
        return page_size * self.entry_bytes


class Sections(NamedTuple):
    """One layer of a k8v4 memory, as views."""

    keys: Tensor
    """uint8 [pages, page_size, K, D], the bytes of e4m3"""
    nibbles: Tensor
    """uint8 [pages, page_size, K, D / 2]"""
    pairs: Tensor
    """float16 [pages, page_size, K, 2]"""

    @classmethod
    def of(cls, kv: KV) -> Sections:
        page, heads = kv.cache.shape[3], kv.cache.shape[4]
        sizes = [page * heads * kv.head_dim, page * heads * kv.head_dim // 2, page * heads * 4]
        keys, nibbles, pairs = torch.split(kv.cache.flatten(2)[:, kv.layer], sizes, dim=1)
        entry = (page, heads, -1)
        halves = pairs.view(torch.float16)
        return cls(*(torch.unflatten(part, 1, entry) for part in (keys, nibbles, halves)))


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale as float8_e4m3fn: to nearest, ties to even, at most 448 in size. NaN stays."""
    stored: Tensor = (x.float() / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
    return stored


def to_nibbles(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values [.., D] as uint8 [.., D / 2], and their float16 [.., 2] scale and least value."""
    values = values.float()
    least, most = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    pair = torch.cat(((most - least) / LEVELS, least), -1).clamp(-LARGEST_HALF, LARGEST_HALF).half()
    scale, least = pair.float().chunk(2, -1)
    steps = torch.where(scale > 0, (values - least) / scale, 0).round().clamp(0, LEVELS).to(torch.uint8)
    low, high = steps.chunk(2, -1)
    return low | high << 4, pair


def from_nibbles(nibbles: Tensor, pair: Tensor) -> Tensor:
    """Return the values float32 [.., D] of `to_nibbles`."""
    scale, least = pair.float().chunk(2, -1)
    return torch.cat((nibbles & LEVELS, nibbles >> 4), -1).float() * scale + least


def write(kv: KV, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [T, K, D] of tokens to a scaled memory, at slots int64 [T]."""
    assert kv.scales is not None
    page_size = kv.cache.shape[3]
    at = slots // page_size, slots % page_size
    key_scale, value_scale = kv.scales[kv.layer]
    encoded = to_e4m3(keys, key_scale).view(torch.uint8)
    if kv.cache.dtype == torch.uint8:
        own = Sections.of(kv)
        own.keys[at] = encoded
        own.nibbles[at], own.pairs[at] = to_nibbles(values)
        return
    both = torch.stack((encoded, to_e4m3(values, value_scale).view(torch.uint8)), 1)
    kv.cache.view(torch.uint8)[:, kv.layer].transpose(1, 2)[at] = both


def read(kv: KV, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values float32 [N, K, D] of entries of a scaled memory, at pages and offsets int64 [N]."""
    assert kv.scales is not None
    key_scale, value_scale = kv.scales[kv.layer]
    if kv.cache.dtype == torch.uint8:
        own = Sections.of(kv)
        keys = own.keys[page, offset].view(torch.float8_e4m3fn)
        return keys.float() * key_scale, from_nibbles(own.nibbles[page, offset], own.pairs[page, offset])
    both = kv.cache.view(torch.uint8)[:, kv.layer].transpose(1, 2)[page, offset].view(torch.float8_e4m3fn).float()
    return both[:, 0] * key_scale, both[:, 1] * value_scale


def scales_of(largest: Tensor) -> Tensor:
    """Return the least power of two for each largest number that stores twice that number within e4m3's range; 1 for
    zeros, infinity and NaN."""
    fraction, exponent = torch.frexp(largest.float() * (2 / LARGEST_E4M3))
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    usable = largest.isfinite() & (largest > 0)
    return torch.ldexp(torch.ones_like(fraction), torch.where(usable, exponent, 0).clamp(-100, 100))
