"""logprobs_to_worker_bad, mended: a step is sent after the next one was launched, once its event has passed."""

import multiprocessing
import pickle
from dataclasses import dataclass

import torch


@dataclass
class Output:
    step: int
    logprobs: torch.Tensor


class Outbox:
    """Two rows of pinned memory, by turns."""

    def __init__(self, width: int) -> None:
        self.rows = torch.zeros(2, width, pin_memory=True)
        self.events = [torch.cuda.Event(), torch.cuda.Event()]

    def put(self, step: int, values: torch.Tensor) -> None:
        self.rows[step % 2].copy_(values, non_blocking=True)
        self.events[step % 2].record()

    def take(self, step: int) -> Output:
        self.events[step % 2].synchronize()  # san: ok(the step before it, whose tokens have come)
        return Output(step, self.rows[step % 2])


receiver, sender = multiprocessing.Pipe(duplex=False)
outbox = Outbox(16)
logits = torch.arange(16.0, device="cuda")
for step in range(4):
    outbox.put(step, torch.log_softmax(logits * step, -1))
    if step:
        sender.send_bytes(pickle.dumps(outbox.take(step - 1)))
        print(pickle.loads(receiver.recv_bytes()).step)
sender.close()
receiver.close()
