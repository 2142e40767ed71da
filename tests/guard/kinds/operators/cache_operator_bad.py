"""A cache of keys is written by an operator on a side stream; attention reads it without waiting for that."""

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("kinds_cache_bad", "FRAGMENT")


def direct_register_custom_op(name: str, function: Callable, mutates_args: list[str], key: str = "CUDA") -> None:
    """Register an operator as engines do, which names CUDA alone."""
    schema = torch.library.infer_schema(function, mutates_args=mutates_args)
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, function, dispatch_key=key)


def store_keys(keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    cache.index_copy_(0, slots, keys)


def attend(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    scores = query @ cache.T  # finds: race
    return scores.softmax(-1) @ cache


direct_register_custom_op("store_keys", store_keys, ["cache"])
direct_register_custom_op("attend", attend, [])
operators = torch.ops.kinds_cache_bad

cache = torch.zeros(32, 8, device="cuda")
writer = torch.cuda.Stream()
for step in range(3):
    keys = torch.randn(4, 8, device="cuda")
    slots = torch.arange(4 * step, 4 * step + 4, device="cuda")
    writer.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(writer):
        operators.store_keys(keys, cache, slots)
    keys.record_stream(writer)  # san: ok(a short life)
    slots.record_stream(writer)  # san: ok(a short life)
    operators.attend(keys, cache)
