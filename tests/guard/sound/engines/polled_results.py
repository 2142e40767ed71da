"""An asyncio engine that never waits: results in flight are polled between requests, and handed out in order."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import torch

ROWS, WIDTH, RING = 4, 8, 4


@dataclass
class InFlight:
    rows: torch.Tensor
    done: torch.cuda.Event
    answers: list[asyncio.Future[list[float]]]


@dataclass
class Engine:
    """Scores vectors. Its pinned ring has a slot for each batch that may be in flight, and one batch more waits."""

    flights: deque[InFlight] = field(default_factory=deque)
    waiting: list[tuple[list[float], asyncio.Future[list[float]]]] = field(default_factory=list)
    batches: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(80)
        self.weight = torch.randn(WIDTH, WIDTH, device="cuda")
        self.inputs = torch.zeros(RING, ROWS, WIDTH, pin_memory=True)
        self.outputs = torch.zeros(RING, ROWS, WIDTH, pin_memory=True)
        self.events = [torch.cuda.Event() for _ in range(RING)]

    def submit(self, values: list[float]) -> asyncio.Future[list[float]]:
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self.waiting.append((values, answer))
        return answer

    def launch(self) -> None:
        """Start a batch, if a slot of the ring is free and anything waits."""
        if not self.waiting or len(self.flights) == RING:
            return
        batch, self.waiting = self.waiting[:ROWS], self.waiting[ROWS:]
        slot = self.batches % RING
        self.batches += 1
        staged = self.inputs[slot]
        for row, (values, _) in enumerate(batch):
            staged[row].copy_(torch.tensor(values))
        x = staged.to("cuda", non_blocking=True)
        self.outputs[slot].copy_(torch.softmax(x @ self.weight, -1), non_blocking=True)
        self.events[slot].record()
        self.flights.append(InFlight(self.outputs[slot], self.events[slot], [answer for _, answer in batch]))

    def retire(self) -> None:
        """Answer the oldest batches that have ended; their slots are free then."""
        while self.flights and self.flights[0].done.query():
            flight = self.flights.popleft()
            rows = flight.rows[: len(flight.answers)].tolist()
            for answer, row in zip(flight.answers, rows, strict=True):
                answer.set_result(row)

    async def run(self) -> None:
        with torch.inference_mode():
            while not self.closed or self.flights or self.waiting:
                self.retire()
                self.launch()
                await asyncio.sleep(0)


async def client(engine: Engine, number: int) -> list[int]:
    """Send three vectors, each made of the answer to the one before."""
    best = []
    values = [float((number + place) % 5) for place in range(WIDTH)]
    for _ in range(3):
        values = await engine.submit(values)
        assert abs(sum(values) - 1) < 1e-4
        best.append(max(range(WIDTH), key=values.__getitem__))
        values = [value * WIDTH for value in values]
    return best


async def main() -> None:
    engine = Engine()
    loop = asyncio.create_task(engine.run())
    answers = await asyncio.gather(*(client(engine, number) for number in range(10)))
    engine.closed = True
    await loop
    for number, best in enumerate(answers):
        print(number, best)


if __name__ == "__main__":
    asyncio.run(main())
