"""A decoder with a paged KV cache: block tables on the device, one pinned buffer for each step's inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

DEVICE = torch.device("cuda")
VOCAB, WIDTH, PAGE, PAGES, MOST_ROWS, MOST_PAGES = 48, 16, 4, 24, 4, 6


class PagePool:
    """Hands out page numbers. A page is freed when its sequence ends."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


@dataclass
class Sequence:
    name: str
    tokens: list[int]
    limit: int
    pages: list[int] = field(default_factory=list)

    @property
    def slot(self) -> int:
        last = len(self.tokens) - 1
        return self.pages[last // PAGE] * PAGE + last % PAGE


class Inputs:
    """The inputs of one step, written on the host and copied in one piece."""

    COLUMNS = 3 + MOST_PAGES  # token, slot, length, then the block table

    def __init__(self) -> None:
        self.host = torch.zeros(MOST_ROWS, self.COLUMNS, dtype=torch.int64, pin_memory=True)
        self.device = torch.zeros(MOST_ROWS, self.COLUMNS, dtype=torch.int64, device=DEVICE)
        self.copied = torch.cuda.Event()

    def fill(self, running: list[Sequence]) -> torch.Tensor:
        self.copied.synchronize()  # san: ok(the copy of the step before has read the buffer long ago)
        rows = self.host.numpy()
        for row, one in zip(rows, running, strict=False):
            row[:3] = one.tokens[-1], one.slot, len(one.tokens)
            row[3 : 3 + len(one.pages)] = one.pages
        self.device.copy_(self.host, non_blocking=True)
        self.copied.record()
        return self.device[: len(running)]


class Decoder:
    def __init__(self) -> None:
        torch.manual_seed(7)
        self.embed = torch.randn(VOCAB, WIDTH, device=DEVICE)
        self.head = torch.randn(WIDTH, VOCAB, device=DEVICE)
        self.keys = torch.zeros(PAGES * PAGE, WIDTH, device=DEVICE)
        self.offsets = torch.arange(PAGE, device=DEVICE)
        self.places = torch.arange(PAGE * MOST_PAGES, device=DEVICE)
        self.inputs = Inputs()
        self.results = torch.zeros(MOST_ROWS, dtype=torch.int64, pin_memory=True)
        self.done = torch.cuda.Event()

    @torch.inference_mode()
    def step(self, running: list[Sequence]) -> list[int]:
        rows = self.inputs.fill(running)
        tokens, slots, lengths, table = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:]
        hidden = self.embed[tokens]
        self.keys.index_copy_(0, slots, hidden)
        keys = self.keys[(table[:, :, None] * PAGE + self.offsets).flatten(1)]
        scores = (keys @ hidden[:, :, None]).squeeze(-1) / WIDTH**0.5
        scores = scores.masked_fill(self.places >= lengths[:, None], float("-inf"))
        mixed = (scores.softmax(-1)[:, None] @ keys).squeeze(1)
        chosen = ((hidden + mixed) @ self.head).argmax(-1)
        self.results[: len(running)].copy_(chosen, non_blocking=True)
        self.done.record()
        self.done.synchronize()  # san: ok(the next step needs the tokens)
        return self.results[: len(running)].tolist()


def main() -> None:
    decoder, pool = Decoder(), PagePool(PAGES)
    waiting = [Sequence(f"s{n}", [n + 1, 2 * n + 3], 9 + n) for n in range(6)]
    running: list[Sequence] = []
    while waiting or running:
        while waiting and len(running) < MOST_ROWS:
            running.append(waiting.pop(0))
        for one in running:
            while len(one.pages) * PAGE < len(one.tokens):
                one.pages.append(pool.take())
        for one, token in zip(running, decoder.step(running), strict=True):
            one.tokens.append(token)
        for one in [one for one in running if len(one.tokens) >= one.limit]:
            print(one.name, one.tokens)
            pool.give_back(one.pages)
            running.remove(one)


main()
