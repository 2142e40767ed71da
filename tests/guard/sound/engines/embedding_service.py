"""Embeddings for asyncio clients: one thread owns the device, batches what has come, and answers by futures."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

WIDTH, BUCKETS, MOST = 16, 64, 8


@dataclass
class Job:
    words: list[int]
    answer: Future[list[float]] = field(default_factory=Future)


class Worker(threading.Thread):
    """Takes jobs in batches. It alone makes tensors, so nothing on the device is shared between threads."""

    def __init__(self) -> None:
        super().__init__(name="embedder")
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self.batches = 0

    def run(self) -> None:
        torch.manual_seed(21)
        self.bag = torch.nn.EmbeddingBag(BUCKETS, WIDTH, device="cuda")
        self.inputs = torch.zeros(MOST * 8, dtype=torch.int64, pin_memory=True)
        self.starts = torch.zeros(MOST, dtype=torch.int64, pin_memory=True)
        self.outputs = torch.zeros(MOST, WIDTH, pin_memory=True)
        self.done = torch.cuda.Event(blocking=True)
        with torch.inference_mode():
            while batch := self.collect():
                self.embed(batch)
                self.batches += 1

    def collect(self) -> list[Job]:
        """Return what has come, at least one job; an empty list once the service has closed."""
        batch: list[Job] = []
        while len(batch) < MOST:
            try:
                job = self.jobs.get(block=not batch)
            except queue.Empty:
                break
            if job is None:
                if batch:
                    self.jobs.put(None)  # for the next turn
                break
            batch.append(job)
        return batch

    def embed(self, batch: list[Job]) -> None:
        words = [word for job in batch for word in job.words]
        begin = 0
        for row, job in enumerate(batch):
            self.starts[row] = begin
            begin += len(job.words)
        self.inputs[: len(words)] = torch.tensor(words)
        ids = self.inputs[: len(words)].to("cuda", non_blocking=True)
        offsets = self.starts[: len(batch)].to("cuda", non_blocking=True)
        vectors = torch.nn.functional.normalize(self.bag(ids, offsets), dim=-1)
        self.outputs[: len(batch)].copy_(vectors, non_blocking=True)
        self.done.record()
        self.done.synchronize()  # san: ok(the clients wait for it, and this thread for clients)
        for job, row in zip(batch, self.outputs.tolist(), strict=False):
            job.answer.set_result(row)


class Service:
    async def __aenter__(self) -> Service:
        self.worker = Worker()
        self.worker.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.worker.jobs.put(None)
        await asyncio.to_thread(self.worker.join)

    async def embed(self, text: str) -> list[float]:
        job = Job([sum(map(ord, word)) % BUCKETS for word in text.split()])
        self.worker.jobs.put(job)
        return await asyncio.wrap_future(job.answer)


async def client(service: Service, name: int, texts: list[str]) -> tuple[int, list[list[float]]]:
    vectors = []
    for text in texts:
        vectors.append(await service.embed(text))
        await asyncio.sleep(0)
    return name, vectors


async def main() -> None:
    texts = ["the cat sat", "a dog ran home", "the cat sat", "rain"]
    async with Service() as service:
        answers = await asyncio.gather(*(client(service, name, texts[name % 2 :]) for name in range(5)))
    by_text = {}
    for name, vectors in answers:
        for text, vector in zip(texts[name % 2 :], vectors, strict=True):
            length = sum(value * value for value in vector)
            assert abs(length - 1) < 1e-4
            assert all(abs(a - b) < 1e-5 for a, b in zip(by_text.setdefault(text, vector), vector, strict=True))
    print(f"{sum(len(vectors) for _, vectors in answers)} answers, {len(by_text)} texts")


asyncio.run(main())
