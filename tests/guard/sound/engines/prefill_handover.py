"""A prefiller hands KV to a decoder: both are threads with a stream each, and pages go through shared pinned memory.

A lease says who may write a page of that memory: the decoder gives it back when its copy to the device has ended.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import torch

PAGES, TOKENS, WIDTH, VOCAB = 3, 6, 8, 32


@dataclass(frozen=True)
class Lease:
    """A page of the shared memory with the keys of a request; `written` is the event of the copy to it."""

    request: int
    page: int
    last: int
    written: torch.cuda.Event


def embedding() -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(40)
    return torch.randn(VOCAB, WIDTH, device="cuda", generator=generator)


class Share:
    def __init__(self) -> None:
        self.memory = torch.zeros(PAGES, TOKENS, WIDTH, pin_memory=True)
        self.free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.leases: queue.Queue[Lease | None] = queue.Queue()
        for page in range(PAGES):
            self.free.put(page)


class Prefiller(threading.Thread):
    def __init__(self, share: Share, prompts: list[list[int]]) -> None:
        super().__init__(name="prefiller")
        self.share = share
        self.prompts = prompts

    def run(self) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            table = embedding()
            staging = torch.zeros(len(self.prompts), TOKENS, dtype=torch.int64, pin_memory=True)
            for request, prompt in enumerate(self.prompts):
                staging[request].copy_(torch.tensor(prompt))
                tokens = staging[request].to("cuda", non_blocking=True)
                keys = torch.tanh(table[tokens]).cumsum(0)
                page = self.share.free.get()
                self.share.memory[page].copy_(keys, non_blocking=True)
                written = torch.cuda.Event(blocking=True)
                written.record()
                self.share.leases.put(Lease(request, page, prompt[-1], written))
        stream.synchronize()  # san: ok(the end of the thread)
        self.share.leases.put(None)


class Decoder(threading.Thread):
    def __init__(self, share: Share, steps: int) -> None:
        super().__init__(name="decoder")
        self.share = share
        self.steps = steps
        self.outputs: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        self.stream = torch.cuda.Stream()
        pending: list[tuple[Lease, torch.cuda.Event]] = []
        with torch.cuda.stream(self.stream), torch.inference_mode():
            self.table = embedding()
            while (lease := self.share.leases.get()) is not None:
                self.stream.wait_event(lease.written)
                keys = self.share.memory[lease.page].to("cuda", non_blocking=True)
                pending.append((lease, self.stream.record_event()))
                self.outputs[lease.request] = self.decode(keys, lease.last)
                self.release(pending, keep=1)
        self.release(pending, keep=0)
        self.stream.synchronize()  # san: ok(the end of the thread)

    def decode(self, keys: torch.Tensor, last: int) -> torch.Tensor:
        hidden = self.table[last]
        tokens = []
        for _ in range(self.steps):
            scores = torch.softmax(keys @ hidden / WIDTH**0.5, 0)
            hidden = torch.tanh(hidden + scores @ keys)
            token = (self.table @ hidden).argmax(-1, keepdim=True)
            tokens.append(token)
            keys = torch.cat([keys, keys[-1:] + torch.tanh(self.table[token])])
        return torch.cat(tokens)

    def release(self, pending: list[tuple[Lease, torch.cuda.Event]], keep: int) -> None:
        while len(pending) > keep:
            lease, read = pending.pop(0)
            read.synchronize()  # san: ok(a copy that came before the decoding of this request)
            self.share.free.put(lease.page)


def main() -> None:
    share = Share()
    prompts = [[(3 * n + k * k) % VOCAB for k in range(TOKENS)] for n in range(7)]
    threads = [Prefiller(share, prompts), Decoder(share, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = threads[1].outputs
    for request in sorted(outputs):
        print(request, outputs[request].tolist())  # san: ok(the result)


main()
