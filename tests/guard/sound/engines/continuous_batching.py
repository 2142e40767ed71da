"""Continuous batching one step ahead: step n + 1 is launched before the tokens of step n are looked at."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

ROWS, VOCAB, WIDTH, DEPTH, STOP = 4, 40, 12, 2, 7


@dataclass
class Request:
    name: int
    prompt: int
    most: int
    output: list[int] = field(default_factory=list)
    launched: int = 0


@dataclass(frozen=True)
class Flight:
    """A launched step: the requests of its rows, and where their tokens arrive."""

    rows: tuple[Request, ...]
    slot: int


class Lane:
    """A pinned buffer for the tokens of a step, by turns, each with the event of its copy."""

    def __init__(self) -> None:
        self.tokens = torch.zeros(DEPTH + 1, ROWS, dtype=torch.int64, pin_memory=True)
        self.arrived = [torch.cuda.Event(blocking=True) for _ in range(DEPTH + 1)]
        self.turn = 0

    def send(self, tokens: torch.Tensor) -> int:
        slot, self.turn = self.turn, (self.turn + 1) % (DEPTH + 1)
        self.tokens[slot].copy_(tokens, non_blocking=True)
        self.arrived[slot].record()
        return slot

    def receive(self, slot: int) -> list[int]:
        self.arrived[slot].synchronize()  # san: ok(the step before the one that is running)
        return self.tokens[slot].tolist()


class Model:
    """One layer with a state for each row; the last tokens stay on the device."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.embed = torch.randn(VOCAB, WIDTH, device="cuda")
        self.mix = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH
        self.state = torch.zeros(ROWS, WIDTH, device="cuda")
        self.last = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.starts = torch.full((DEPTH + 1, ROWS), -1, pin_memory=True)
        self.read = [torch.cuda.Event(blocking=True) for _ in range(DEPTH + 1)]
        self.turn = 0

    @torch.no_grad()
    def step(self, started: dict[int, int]) -> torch.Tensor:
        slot, self.turn = self.turn, (self.turn + 1) % (DEPTH + 1)
        self.read[slot].synchronize()  # san: ok(used three steps ago)
        staged = self.starts[slot]
        staged.fill_(-1)
        for row, token in started.items():
            staged[row] = token
        new = staged.to("cuda", non_blocking=True)
        self.read[slot].record()
        begins = new >= 0
        tokens = torch.where(begins, new, self.last)
        self.state = torch.where(begins[:, None], torch.zeros_like(self.state), self.state)
        self.state = torch.tanh(self.state @ self.mix + self.embed[tokens])
        self.last = (self.state @ self.embed.T).argmax(-1)
        return self.last


class Engine:
    def __init__(self, requests: list[Request]) -> None:
        self.waiting = deque(requests)
        self.rows: list[Request | None] = [None] * ROWS
        self.model, self.lane = Model(), Lane()
        self.flights: deque[Flight] = deque()
        self.done: list[Request] = []

    def launch(self) -> None:
        started = {}
        for row in range(ROWS):
            if self.rows[row] is None and self.waiting:
                self.rows[row] = self.waiting.popleft()
                started[row] = self.rows[row].prompt
        present = tuple(self.rows)
        slot = self.lane.send(self.model.step(started))
        for one in present:
            if one is not None:
                one.launched += 1
        self.flights.append(Flight(present, slot))

    def commit(self) -> None:
        flight = self.flights.popleft()
        for one, token in zip(flight.rows, self.lane.receive(flight.slot), strict=True):
            if one is None or one in self.done:
                continue  # it ended in a step before, and this one was launched too early
            one.output.append(token)
            if token == STOP or len(one.output) == one.most:
                self.done.append(one)
                self.rows[self.rows.index(one)] = None

    def run(self) -> list[Request]:
        while self.waiting or any(self.rows) or self.flights:
            if self.waiting or any(self.rows):
                self.launch()
            if len(self.flights) == DEPTH or not any(self.rows):
                self.commit()
        return sorted(self.done, key=lambda one: one.name)


if __name__ == "__main__":
    for one in Engine([Request(n, 4 * n + 1, 4 + n % 5) for n in range(9)]).run():
        print(one.name, one.output)
