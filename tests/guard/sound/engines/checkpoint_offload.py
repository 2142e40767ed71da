"""Snapshots of serving state are offloaded beside the steps, and written by a thread once their events have passed."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from queue import Queue

import torch

BUFFERS = 2


class Snapshot:
    """Pinned copies of named tensors, with the event that says they are whole."""

    def __init__(self, like: Mapping[str, torch.Tensor]) -> None:
        sizes = [tensor.numel() for tensor in like.values()]
        flat = torch.empty(sum(sizes), pin_memory=True)
        parts = flat.split(sizes)
        self.tensors = {name: part.view(like[name].shape) for name, part in zip(like, parts, strict=True)}
        self.whole = torch.cuda.Event(blocking=True)
        self.step = -1


class Writer:
    """Serialises snapshots on a thread, in the order in which they were taken."""

    def __init__(self) -> None:
        self.files: list[tuple[int, bytes]] = []
        self._jobs: Queue[Snapshot | None] = Queue()
        self._free: Queue[Snapshot] = Queue()
        self._thread = threading.Thread(target=self._run)

    def start(self, like: Mapping[str, torch.Tensor]) -> None:
        for _ in range(BUFFERS):
            self._free.put(Snapshot(like))
        self._thread.start()

    def borrow(self) -> Snapshot:
        return self._free.get()

    def submit(self, snapshot: Snapshot) -> None:
        self._jobs.put(snapshot)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (snapshot := self._jobs.get()) is not None:
            snapshot.whole.synchronize()  # san: ok(on the thread that writes files)
            file = io.BytesIO()
            torch.save({"step": snapshot.step, "state": snapshot.tensors}, file)
            self.files.append((snapshot.step, file.getvalue()))
            self._free.put(snapshot)


class State:
    """What the engine would lose: running averages and counters on the device."""

    def __init__(self) -> None:
        torch.manual_seed(50)
        self.tensors = {
            "mean": torch.zeros(4, 8, device="cuda"),
            "power": torch.ones(8, device="cuda"),
            "count": torch.zeros(1, device="cuda"),
        }
        self.noise = torch.randn(16, 4, 8, device="cuda")

    def step(self, number: int) -> None:
        mean, power, count = self.tensors.values()
        seen = self.noise[number % 16]
        count += 1
        mean.lerp_(seen, 0.1)
        power.mul_(0.9).add_(seen.square().mean(0), alpha=0.1)


class Offloader:
    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.stream = torch.cuda.Stream()

    def take(self, state: State, step: int) -> None:
        snapshot = self.writer.borrow()
        snapshot.step = step
        compute = torch.cuda.current_stream()
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            for name, tensor in state.tensors.items():
                snapshot.tensors[name].copy_(tensor, non_blocking=True)
            snapshot.whole.record()
        compute.wait_event(snapshot.whole)  # the next step changes the tensors in place
        self.writer.submit(snapshot)


def main() -> None:
    writer, state = Writer(), State()
    writer.start(state.tensors)
    offloader = Offloader(writer)
    for step in range(12):
        state.step(step)
        if step % 3 == 2:
            offloader.take(state, step)
    writer.close()
    for step, data in writer.files:
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert loaded["step"] == step and float(loaded["state"]["count"]) == step + 1
    print([step for step, _ in writer.files], round(float(loaded["state"]["power"].mean()), 3))


main()
