"""What the lint knows of names: across lines, functions, fields and loops, and by the names themselves."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from gapless.guard.lint import lint

HEAD = """
import math
from collections import deque
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
"""

FOUND = {
    "a result two lines later": """
        model = nn.Linear(8, 8).cuda()
        for ids in range(3):
            x = model(torch.zeros(3, device="cuda"))
            y = x.argmax(-1)
            z = y + 1
            tokens = z.tolist()  # here
    """,
    "parts of a tuple": """
        def step(logits: Tensor, table):
            values, index = logits.topk(2)
            first, (second, _) = index, (values, 3)
            return first.tolist()  # here
    """,
    "an argument of a function of this file": """
        def finished(tokens, end):
            return bool((tokens == end).all())  # here
        tokens = torch.zeros(3, device="cuda")
        while not finished(tokens, 3):
            tokens += 1
    """,
    "a result of a helper": """
        def draw(logits):
            return logits.argmax(-1)
        def step():
            ids = draw(torch.randn(4, 8, device="cuda"))
            for row in range(4):
                print(ids[row])  # here
    """,
    "both results of a helper": """
        def draw(logits):
            return logits.argmax(-1), logits.amax(-1)
        logits = torch.randn(4, 8, device="cuda")
        ids, best = draw(logits)
        best.max().item()  # here
    """,
    "a field that another method sets": """
        class Runner:
            def __init__(self, device):
                self.last = None
                self.tokens = torch.zeros(4, device=device)
            def launch(self):
                self.last = self.tokens * 2
            def finish(self):
                return self.last.cpu()  # here
    """,
    "a field of another object": """
        class State:
            def __init__(self):
                self.lengths = torch.zeros(4, device="cuda")
        def plan(state: State):
            return state.lengths.tolist()  # here
    """,
    "a record": """
        from typing import NamedTuple
        class Batch(NamedTuple):
            ids: object
            size: int
        batch = Batch(torch.zeros(4, device="cuda"), 4)
        print(batch.size)
        batch.ids.tolist()  # here
    """,
    "a queue of results": """
        waiting = deque()
        logits = torch.randn(4, 8, device="cuda")
        for step in range(4):
            waiting.append((step, logits.argmax(-1)))
            if len(waiting) > 1:
                at, tokens = waiting.popleft()
                tokens.tolist()  # here
    """,
    "a list of results": """
        losses = []
        x = torch.randn(4, device="cuda")
        for _ in range(3):
            losses.append(x.mean())
        means = [loss.item() for loss in losses]  # here
    """,
    "what the loop brings back": """
        last = None
        for _ in range(3):
            if last is not None:
                float(last)  # here
            last = torch.randn(3, device="cuda").sum()
    """,
    "an augmented name": """
        total = 0.0
        for _ in range(3):
            total += torch.randn(3, device="cuda").sum()
            print(total)  # here
    """,
    "the batches of a loader": """
        loader = DataLoader(dataset, batch_size=4)
        model = Net().to("cuda")
        for x, y in loader:
            x, y = x.to("cuda"), y.to("cuda")
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            running = loss.item()  # here
    """,
    "the loss of a criterion": """
        def train(model, loader, device):
            criterion = nn.CrossEntropyLoss()
            for step, (x, y) in enumerate(loader):
                x, y = (part.to(device) for part in (x, y))
                loss = criterion(model(x), y)
                if not math.isfinite(loss):  # here
                    raise ValueError(step)
    """,
    "a batch of named tensors": """
        for batch in loader:
            batch = {name: value.to("cuda") for name, value in batch.items()}
            labels = batch["labels"]
            loss = model(**batch).loss
            labels.sum().item()  # here
    """,
    "a module of this file": """
        class Gate(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 4))
            def forward(self, x):
                scores = x @ self.weight
                return scores.topk(2, dim=-1)
        class Experts(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate = Gate()
            def forward(self, x):
                weight, chosen = self.gate(x)
                return [int((chosen == expert).sum()) for expert in range(4)]  # here
    """,
    "a device by its name": """
        where = "cuda:0"
        dev = torch.device(where)
        counts = torch.zeros(4, device=dev)
        counts.tolist()  # here
    """,
    "a device that is picked": """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        x = torch.zeros(3).to(device)  # here
    """,
    "a device of another tensor": """
        def step(x: Tensor, rows: list):
            return x + torch.tensor(rows, device=x.device)  # here
    """,
    "a blocking copy into a buffer": """
        staging = torch.zeros(4, pin_memory=True)
        tokens = torch.zeros(4, device="cuda")
        for _ in range(3):
            tokens.copy_(staging)  # here
    """,
    "an asynchronous copy of plain memory": """
        lengths = torch.zeros(4)
        for _ in range(3):
            there = lengths.to("cuda", non_blocking=True)  # here
    """,
    "an assignment of a name": """
        lengths = torch.zeros(4, device="cuda")
        for row in range(4):
            lengths[row] = row  # here
    """,
    "a condition of a comprehension": """
        def live(rows: Tensor):
            return [row for row in range(4) if rows[row] > 0]  # here
    """,
    "a part of a condition": """
        def more(rows: Tensor, left: int):
            return rows.any() and left > 0  # here
    """,
    "pinned memory at every step": """
        class Runner:
            def step(self, ids):
                home = torch.empty(4, pin_memory=True)  # here
                return home
    """,
    "pinned memory in what a loop calls": """
        def stage(rows):
            return torch.empty(rows, pin_memory=True)  # here
        for step in range(3):
            stage(step)
    """,
    "a mask of what a model gives": """
        def keep(model, ids: Tensor):
            hidden = model(ids)
            alive = ids > 0
            return hidden[alive.any(1)]  # here
    """,
    "a gradient in a hook": """
        def watch(grad):
            print("norm", grad.norm())  # here
        weight.register_hook(watch)
    """,
    "a mask by its name": """
        def compact(rows: Tensor, done: Tensor):
            return rows[~done]  # here
    """,
    "a tensor by what is done with it": """
        def gate(scores):
            best = scores.softmax(-1).amax(-1)
            return best.tolist()  # here
    """,
}  # fmt: skip

SILENT = {
    "names of the host": """
        def plan(batch, seq_lens_cpu: Tensor, host_ids: Tensor, starts_np: Tensor, counts_cpu_upper_bound: Tensor):
            seq_lens_cpu.tolist(), host_ids.tolist(), starts_np[0].item(), int(counts_cpu_upper_bound.max())
    """,
    "fields named for the host": """
        class Batch:
            seq_lens_cpu: Tensor
            ids_host: Tensor
        def plan(batch: Batch):
            return int(batch.seq_lens_cpu.sum()), batch.ids_host[:3].tolist(), torch.where(batch.seq_lens_cpu)
    """,
    "a function named for the host": """
        def _mask_cpu(ids: Tensor, lengths: Tensor):
            return [int(length) for length in lengths]
    """,
    "a named pin_memory argument": """
        def upload(rows, device, _pin):
            a = torch.tensor(rows, pin_memory=_pin).to(device, non_blocking=True)
            b = torch.zeros(4, pin_memory=PIN_MEMORY).to(device, non_blocking=True)
            return a, b, torch.tensor(rows, pin_memory=is_pin_memory_available()).to(device, non_blocking=True)
    """,
    "a loader that pins": """
        loader = DataLoader(dataset, batch_size=4, pin_memory=True)
        for x, y in loader:
            x = x.to("cuda", non_blocking=True)
    """,
    "fields on the host": """
        class Home:
            def __init__(self, rows):
                self.tokens = torch.empty(rows, dtype=torch.long, pin_memory=True)
                self.lengths = torch.zeros(rows, device="cpu")
                self.array = self.tokens.numpy()
            def read(self):
                return self.tokens.tolist(), self.lengths.numpy(), self.array.tolist(), self.lengths[0].item()
    """,
    "constructors": """
        class Model:
            def __init__(self, device):
                self.table = torch.tensor([1, 2], device=device)
                self.longest = self.table.max().item()
                self.home = torch.zeros(4, pin_memory=True)
                torch.cuda.synchronize()
            def warmup(self):
                torch.cuda.synchronize()
    """,
    "a ring of pinned buffers": """
        def make(rows):
            return [torch.empty(rows, pin_memory=True) for _ in range(2)]
        ring = make(4)
        home = torch.zeros(8, pin_memory=True)
    """,
    "an argument that is on the host": """
        def pack(rows: Tensor):
            return rows.tolist()
        pack(torch.tensor([1, 2]))
    """,
    "an argument whose array is taken": """
        def pack(rows: Tensor):
            array = rows.numpy()
            return rows.tolist(), array.sum()
    """,
    "a result that was downloaded": """
        home = torch.zeros(4, pin_memory=True)
        done = torch.cuda.Event()
        for _ in range(3):
            home.copy_(torch.ones(4, device="cuda"), non_blocking=True)
            done.record()
        tokens = home.tolist()
    """,
    "either side": """
        def show(x, on_host):
            y = x.cpu() if on_host else x.cuda()  # san: ok(asked for)
            return y.tolist()
    """,
    "a device by its name on the host": """
        device = torch.device("cpu")
        x = torch.zeros(3, device=device)
        x.tolist()
    """,
    "a device that defaults to the host": """
        def batch(rows, device="cpu"):
            return torch.tensor(rows, device=device).tolist()
    """,
    "a queue of host tensors": """
        waiting = deque()
        waiting.append((torch.zeros(4, pin_memory=True), torch.cuda.Event()))
        home, event = waiting.popleft()
        home.tolist()
    """,
    "a plain value by its annotation": """
        def count(rows: Tensor) -> int:
            return rows.my_size
        def more(rows: Tensor, left: int):
            return count(rows) > left and left > 0
    """,
    "numbers": """
        def plan(rows: Tensor):
            longest = rows.shape[1]
            if longest > 3 and len(rows) > 2:
                return float(longest), range(longest), rows.numel() > 3
    """,
    "a collective of the host's group": """
        def stop(self):
            torch.distributed.barrier(self.tp_cpu_group)
            torch.distributed.barrier(group=self.cpu_group)
    """,
    "synchronize of this file": """
        class Clock:
            def synchronize(self):
                pass
        clock = Clock()
        clock.synchronize()
    """,
    "host augmentation": """
        def augment(rows):
            picked = torch.stack([torch.from_numpy(row) for row in rows])
            flipped = torch.where(picked > 0, picked, -picked)
            return flipped[flipped > 1].tolist()
    """,
    "memory that the program pins itself": """
        host = torch.zeros(8)
        torch.cuda.cudart().cudaHostRegister(host.data_ptr(), 32, 0)
        there = torch.zeros(8, device="cuda")
        there.copy_(host, non_blocking=True)
    """,
    "the default device": """
        torch.set_default_device("cuda")
        x = torch.zeros(3)
        x += torch.ones(3)
    """,
}  # fmt: skip


def reported(tmp_path: Path, body: str) -> tuple[list[int], list[int], str]:
    """Return the lines that are marked, those that are reported, and the reports."""
    source = HEAD + textwrap.dedent(body)
    (tmp_path / "program.py").write_text(source)
    marked = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# here")]
    entries = [entry for entry in lint([str(tmp_path / "program.py")]).entries() if entry.excuse is None]
    return marked, [entry.finding.site.line for entry in entries], "\n".join(one.finding.text() for one in entries)


@pytest.mark.parametrize("body", FOUND.values(), ids=list(FOUND))
def test_a_wait_is_found_by_following_its_tensor(tmp_path, body):
    marked, lines, said = reported(tmp_path, body)
    assert lines == marked, said


@pytest.mark.parametrize("body", SILENT.values(), ids=list(SILENT))
def test_values_of_the_host_are_not_reported(tmp_path, body):
    assert reported(tmp_path, body)[2] == ""
