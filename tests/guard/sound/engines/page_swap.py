"""KV pages of paused requests are swapped to pinned memory and back, page by page, on a stream of their own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

PAGES, HOST_PAGES, LAYERS, PAGE, WIDTH = 8, 16, 2, 4, 8


@dataclass
class Request:
    name: str
    seed: int
    pages: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    moved: torch.cuda.Event | None = None
    """The end of the last transfer of its pages."""


class Pool:
    """Free pages of one memory. A page may be taken with the event that its last use ends with."""

    def __init__(self, count: int) -> None:
        self.free: list[tuple[int, torch.cuda.Event | None]] = [(page, None) for page in range(count)]

    def take(self, stream: torch.cuda.Stream) -> int:
        page, used = self.free.pop(0)
        if used is not None:
            stream.wait_event(used)
        return page

    def give(self, pages: list[int], used: torch.cuda.Event) -> None:
        self.free.extend((page, used) for page in pages)


class Cache:
    def __init__(self) -> None:
        self.device = torch.zeros(PAGES, LAYERS, PAGE, WIDTH, device="cuda")
        self.host = torch.zeros(HOST_PAGES, LAYERS, PAGE, WIDTH, pin_memory=True)
        self.device_pool, self.host_pool = Pool(PAGES), Pool(HOST_PAGES)
        self.transfers = torch.cuda.Stream()
        self.transfers.wait_stream(torch.cuda.current_stream())

    def allocate(self, request: Request, count: int) -> None:
        compute = torch.cuda.current_stream()
        request.pages = [self.device_pool.take(compute) for _ in range(count)]

    def swap_out(self, request: Request) -> None:
        self.transfers.wait_stream(torch.cuda.current_stream())  # what computes on the pages comes first
        with torch.cuda.stream(self.transfers):
            request.host = [self.host_pool.take(self.transfers) for _ in request.pages]
            for page, place in zip(request.pages, request.host, strict=True):
                self.host[place].copy_(self.device[page], non_blocking=True)
            request.moved = self.transfers.record_event()
        self.device_pool.give(request.pages, request.moved)
        request.pages = []

    def swap_in(self, request: Request) -> None:
        with torch.cuda.stream(self.transfers):
            request.pages = [self.device_pool.take(self.transfers) for _ in request.host]
            for page, place in zip(request.pages, request.host, strict=True):
                self.device[page].copy_(self.host[place], non_blocking=True)
            request.moved = self.transfers.record_event()
        self.host_pool.give(request.host, request.moved)
        request.host = []

    def compute(self, request: Request, step: int) -> torch.Tensor:
        """Write a value to each page of a request, and return what all of them hold."""
        stream = torch.cuda.current_stream()
        if request.moved is not None:
            stream.wait_event(request.moved)
            request.moved = None
        total = torch.zeros((), device="cuda")
        for number, page in enumerate(request.pages):
            self.device[page, :, step % PAGE].fill_(request.seed + number)
            total += self.device[page].sum()
        return total

    def finish(self, request: Request) -> None:
        self.device_pool.give(request.pages, torch.cuda.current_stream().record_event())
        request.pages = []


def clear(cache: Cache, request: Request) -> None:
    for page in request.pages:
        cache.device[page].zero_()


def main() -> None:
    cache = Cache()
    requests = [Request("a", 1), Request("b", 10), Request("c", 100)]
    totals: dict[str, list[torch.Tensor]] = {one.name: [] for one in requests}
    for one, other in ((0, 1), (1, 2), (2, 0), (0, 1)):
        first, second = requests[one], requests[other]
        for request in (first, second):
            if request.host:
                cache.swap_in(request)
            elif not request.pages:
                cache.allocate(request, 3)
                clear(cache, request)
        for step in range(2):
            for request in (first, second):
                totals[request.name].append(cache.compute(request, step + len(totals[request.name])))
        for request in (first, second):
            cache.swap_out(request)
    last = requests[0]
    cache.swap_in(last)
    totals[last.name].append(cache.compute(last, 3))
    cache.finish(last)
    for name, values in totals.items():
        print(name, torch.stack(values).tolist())  # san: ok(the result)


main()
