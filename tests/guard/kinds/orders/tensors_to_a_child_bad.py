"""A child process scores batches that come through a queue; it waits for the device to choose among them."""
# runs: process

import torch
import torch.multiprocessing as processes


def score(batches, scores, best, finished):
    for _ in range(3):
        batch = batches.get()
        value = batch.float().square().mean()
        assert batch.is_cuda and best.is_cuda
        if value > best:  # finds: host-read
            best.copy_(value)
        scores.put(value)
    finished.wait()


if __name__ == "__main__":
    context = processes.get_context("spawn")
    batches, scores, finished = context.Queue(), context.Queue(), context.Event()
    best = torch.zeros((), device="cuda")
    child = context.Process(target=score, args=(batches, scores, best, finished))
    child.start()
    for step in range(3):
        batches.put(torch.full((8,), float(step), device="cuda"))
        total = scores.get() + 1
        assert total.is_cuda
    finished.set()
    child.join()
