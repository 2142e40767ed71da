"""Faults in the style of real engines and their corrected twins, none of them taken from a catalogue.

Each function is one decode loop of three steps. A comment `bad: RULES` names what `gapless san` finds in that line; a
twin has none. Races are named by the line that comes second.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

STEPS = 3
device = "cuda"


def pinned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, pin_memory=True)  # san: ok(once, at set-up)


def beams_bad() -> None:
    scores, cache = torch.randn(4, 32, device=device), torch.randn(4, 8, device=device)
    for _ in range(STEPS):
        top = scores.log_softmax(-1).flatten().topk(4)
        order = sorted(range(4), key=lambda beam: top.values[beam])  # bad: host-read
        cache = cache[order]  # bad: index-by-host


def beams_good() -> None:
    scores, cache = torch.randn(4, 32, device=device), torch.randn(4, 8, device=device)
    for _ in range(STEPS):
        parents = scores.log_softmax(-1).flatten().topk(4).indices // 32
        cache = cache.index_select(0, parents)


def experts_bad() -> None:
    x, gate = torch.randn(16, 8, device=device), torch.randn(8, 4, device=device)
    weights = torch.randn(4, 8, 8, device=device)
    for _ in range(STEPS):
        route, out = (x @ gate).argmax(-1), torch.zeros_like(x)
        for expert in range(4):
            rows = torch.where(route == expert)[0]  # bad: data-size
            out[rows] = x[rows] @ weights[expert]
        x = out


def experts_good() -> None:
    x, gate = torch.randn(16, 8, device=device), torch.randn(8, 4, device=device)
    weights = torch.randn(4, 8, 8, device=device)
    for _ in range(STEPS):
        route, out = (x @ gate).argmax(-1), torch.zeros_like(x)
        for expert in range(4):
            out = torch.where((route == expert)[:, None], x @ weights[expert], out)
        x = out


def lengths_bad() -> None:
    q = torch.randn(10, 8, device=device)
    for step in range(STEPS):
        starts = np.cumsum([0, 3 + step, 5, 2]).astype(np.int32)
        on_device = torch.from_numpy(starts).to(device, non_blocking=True)  # bad: pageable-async
        q = q * on_device[-1]


def lengths_good() -> None:
    q, on_device = torch.randn(10, 8, device=device), torch.empty(4, dtype=torch.int32, device=device)
    slots = [pinned(4, dtype=torch.int32) for _ in range(STEPS)]
    for step in range(STEPS):
        slots[step].numpy()[:] = np.cumsum([0, 3 + step, 5, 2])
        on_device.copy_(slots[step], non_blocking=True)
        q = q * on_device[-1]


def _two_slots(waits: bool) -> None:
    slots, done = [pinned(64), pinned(64)], [torch.cuda.Event(), torch.cuda.Event()]
    targets = [torch.zeros(64, device=device), torch.zeros(64, device=device)]
    side, total = torch.cuda.Stream(), torch.zeros(64, device=device)
    side.wait_stream(torch.cuda.current_stream())
    for step in range(4):
        slot = step % 2
        if waits and step >= 2:
            done[slot].synchronize()  # san: ok(the slot is filled again)
        slots[slot].fill_(step)  # bad: race
        with torch.cuda.stream(side):
            targets[slot].copy_(slots[slot], non_blocking=True)
            done[slot].record()
        torch.cuda.current_stream().wait_event(done[slot])
        total += targets[slot]
        side.wait_stream(torch.cuda.current_stream())


def slots_bad() -> None:
    _two_slots(False)


def slots_good() -> None:
    _two_slots(True)


def _swaps(waits: bool) -> None:
    pages, home = torch.randn(8, 16, device=device), pinned(8, 16)
    swap = torch.cuda.Stream()
    for _ in range(STEPS):
        swap.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(swap):
            home[:4].copy_(pages[:4], non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(swap)
        pages[:4] = pages[4:] + 1  # bad: race


def swaps_bad() -> None:
    _swaps(False)


def swaps_good() -> None:
    _swaps(True)


def penalties_bad() -> None:
    logits, counts = torch.randn(2, 32, device=device), torch.zeros(2, 32, device=device)
    for _ in range(STEPS):
        token = (logits - counts).argmax(-1, keepdim=True)
        counts.scatter_add_(1, token, torch.ones_like(token, dtype=counts.dtype))
        if (token == 99).any() or len(token.unique()) == 1:  # bad: host-read counted-size
            break
        logits[counts > 1] = logits[counts > 1] - 1  # bad: mask-index


def penalties_good() -> None:
    logits, counts = torch.randn(2, 32, device=device), torch.zeros(2, 32, device=device)
    for _ in range(STEPS):
        token = (logits - counts).argmax(-1, keepdim=True)
        counts.scatter_add_(1, token, torch.ones_like(token, dtype=counts.dtype))
        logits = torch.where(counts > 1, logits - 1, logits)


def _readers(waits: bool) -> None:
    taken: queue.Queue[Any] = queue.Queue()

    def reader() -> None:
        for home, done in iter(taken.get, None):
            if waits:
                done.synchronize()  # san: ok(a thread of its own)
            home.numpy().sum()  # bad: race

    thread = threading.Thread(target=reader)
    thread.start()
    x = torch.ones(8, device=device)
    for step in range(STEPS):
        home, done = pinned(8), torch.cuda.Event()
        home.copy_(x * step, non_blocking=True)
        done.record()
        taken.put((home, done))
    taken.put(None)
    thread.join()


def readers_bad() -> None:
    _readers(False)


def readers_good() -> None:
    _readers(True)


def adapters_bad() -> None:
    x, ids = torch.randn(4, 8, device=device), torch.arange(4, device=device)
    down, up = torch.randn(4, 8, 2, device=device), torch.randn(4, 2, 8, device=device)
    for _ in range(STEPS):
        rows = [x[row] @ down[int(one)] @ up[int(one)] for row, one in enumerate(ids)]  # bad: host-read
        x = x + torch.stack(rows)


def adapters_good() -> None:
    x, ids = torch.randn(4, 8, device=device), torch.arange(4, device=device)
    down, up = torch.randn(4, 8, 2, device=device), torch.randn(4, 2, 8, device=device)
    for _ in range(STEPS):
        x = x + torch.einsum("nd,ndr,nrk->nk", x, down[ids], up[ids])


def drafts_bad() -> None:
    draft, target = torch.arange(4, device=device), torch.arange(4, device=device)
    history = torch.zeros(64, dtype=torch.int64, device=device)
    for step in range(STEPS):
        count = (draft == target).cumprod(0).sum()
        history[step : step + 4][:count] = draft[:count]  # bad: host-index


def drafts_good() -> None:
    draft, target = torch.arange(4, device=device), torch.arange(4, device=device)
    history, end = torch.zeros(64, dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(STEPS):
        kept = (draft == target).cumprod(0).bool()
        history.index_copy_(0, torch.where(kept, end + draft, 63), draft)
        end += kept.sum()


def lengths_of_speech_bad() -> None:
    scores = torch.randn(5, 2, 4, device=device).log_softmax(-1)
    texts, frames = torch.ones(2, 3, dtype=torch.int64, device=device), torch.full((2,), 5, device=device)
    for _ in range(STEPS):
        torch.nn.functional.ctc_loss(scores, texts, frames, frames - 3)  # bad: host-read


def lengths_of_speech_good() -> None:
    scores = torch.randn(5, 2, 4, device=device).log_softmax(-1)
    frames, times = torch.full((2,), 5, device=device), torch.arange(5, device=device)
    for _ in range(STEPS):
        torch.where(times[:, None] < frames, scores.amax(-1), 0.0).sum()


def sparse_bad() -> None:
    pairs, values = torch.ones(2, 3, dtype=torch.int64, device=device), torch.ones(3, device=device)
    for _ in range(STEPS):
        torch.sparse_coo_tensor(pairs, values, check_invariants=False)  # bad: host-size


def sparse_good() -> None:
    pairs, values = torch.ones(2, 3, dtype=torch.int64, device=device), torch.ones(3, device=device)
    for _ in range(STEPS):
        torch.sparse_coo_tensor(pairs, values, (4, 4), check_invariants=False)


PAIRS: list[tuple[Callable[[], None], Callable[[], None]]] = [
    (beams_bad, beams_good), (experts_bad, experts_good), (lengths_bad, lengths_good), (slots_bad, slots_good),
    (swaps_bad, swaps_good), (penalties_bad, penalties_good), (readers_bad, readers_good),
    (adapters_bad, adapters_good), (drafts_bad, drafts_good), (lengths_of_speech_bad, lengths_of_speech_good),
    (sparse_bad, sparse_good),
]  # fmt: skip
