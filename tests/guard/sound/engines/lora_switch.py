"""Adapters are kept on the host and loaded into slots on the device; a batch mixes rows of several adapters."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch

WIDTH, RANK, SLOTS, ADAPTERS, ROWS = 24, 4, 3, 6, 5


class Slot(NamedTuple):
    number: int
    loaded: torch.cuda.Event


class AdapterCache:
    """The least recently used adapter gives its slot away, once the steps that read it are done."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(12)
        self.down_host = torch.empty(ADAPTERS, WIDTH, RANK, pin_memory=True)
        self.up_host = torch.empty(ADAPTERS, RANK, WIDTH, pin_memory=True)
        for weights in (self.down_host, self.up_host):
            weights.normal_(std=0.1, generator=generator)
        self.down = torch.zeros(SLOTS, WIDTH, RANK, device="cuda")
        self.up = torch.zeros(SLOTS, RANK, WIDTH, device="cuda")
        self.stream = torch.cuda.Stream(priority=-1)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.slots: OrderedDict[int, Slot] = OrderedDict()
        self.last_use = [torch.cuda.Event() for _ in range(SLOTS)]
        self.loads = 0

    def slot_of(self, adapter: int, needed: set[int]) -> int:
        """Return the slot of an adapter, loading it if it is not there; `needed` ones keep theirs."""
        if adapter in self.slots:
            self.slots.move_to_end(adapter)
        else:
            self._load(adapter, self._free_slot(needed))
        slot = self.slots[adapter]
        torch.cuda.current_stream().wait_event(slot.loaded)
        return slot.number

    def _free_slot(self, needed: set[int]) -> int:
        if len(self.slots) < SLOTS:
            return len(self.slots)
        oldest = next(one for one in self.slots if one not in needed)
        return self.slots.pop(oldest).number

    def _load(self, adapter: int, number: int) -> None:
        self.stream.wait_event(self.last_use[number])
        with torch.cuda.stream(self.stream):
            self.down[number].copy_(self.down_host[adapter], non_blocking=True)
            self.up[number].copy_(self.up_host[adapter], non_blocking=True)
            self.slots[adapter] = Slot(number, self.stream.record_event())
        self.loads += 1

    def used(self, adapters: set[int]) -> None:
        for adapter in adapters:
            self.last_use[self.slots[adapter].number].record()


class Layer:
    def __init__(self, cache: AdapterCache) -> None:
        torch.manual_seed(13)
        self.cache = cache
        self.weight = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5
        self.staged = torch.zeros(2, ROWS, dtype=torch.int64, pin_memory=True)
        self.sent = [torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)]
        self.batch = 0

    def __call__(self, x: torch.Tensor, adapters: list[int]) -> torch.Tensor:
        turn, needed = self.batch % 2, set(adapters)
        self.batch += 1
        slots = {one: self.cache.slot_of(one, needed) for one in sorted(needed)}
        self.sent[turn].synchronize()  # san: ok(two batches ago)
        for row, adapter in enumerate(adapters):
            self.staged[turn, row] = slots[adapter]
        index = self.staged[turn].to("cuda", non_blocking=True)
        self.sent[turn].record()
        shrunk = torch.bmm(x[:, None], self.cache.down[index])
        result = x @ self.weight + torch.bmm(shrunk, self.cache.up[index]).squeeze(1)
        self.cache.used(needed)
        return result


def check(layer: Layer, x: torch.Tensor, adapters: list[int], result: torch.Tensor) -> torch.Tensor:
    cache = layer.cache
    host = torch.stack([cache.down_host[one] @ cache.up_host[one] for one in adapters]).pin_memory()  # san: ok(a check)
    product = host.to("cuda", non_blocking=True)
    return (x @ layer.weight + torch.bmm(x[:, None], product).squeeze(1) - result).abs().max()


def main() -> None:
    layer = Layer(AdapterCache())
    differences = []
    for batch in ([0, 0, 1, 1, 2], [3, 0, 0, 2, 3], [4, 5, 4, 5, 4], [0, 1, 2, 0, 1], [0, 1, 2, 2, 2]):
        x = torch.linspace(-1, 1, ROWS * WIDTH, device="cuda").view(ROWS, WIDTH)
        differences.append(check(layer, x, batch, layer(x, batch)))
    worst = torch.stack(differences).max().item()  # san: ok(the result)
    assert worst < 1e-4, worst
    print(f"{layer.cache.loads} loads for {layer.batch} batches of {ADAPTERS} adapters in {SLOTS} slots")


main()
