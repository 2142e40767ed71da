"""Steps of engines and training loops, each with one fault or none; a comment says what each line does to the host.

`# waits`: the host waits there, and torch's own sync debug mode reports it. `# waits unseen`: it waits, and that mode
does not report it. `# costs`: no wait on a quiet device, yet the line is one that a loop should not have. Everything
else only enqueues. tests/guard/test_step_programs.py holds no_sync against the comments on an emulated device,
tests/gpu/san_truth.py holds the comments against a real one.

Each program is a generator of its device: it sets up until its first `yield`, then does one step between two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Steps = Iterator[None]
Program = Callable[[str], Steps]


def marked_lines(program: Program) -> dict[int, str]:
    """Return the kinds of a program's marked lines: waits, waits unseen, costs."""
    lines, start = inspect.getsourcelines(program)
    marks = {
        start + number: re.search(r"# (waits unseen|waits|costs)$", line.strip()) for number, line in enumerate(lines)
    }
    return {line: found[1] for line, found in marks.items() if found}


# Decoding: how a step ends, draws and takes its input.


def stops_when_all_rows_are_done(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        tokens = logits.argmax(-1)
        if (tokens == 70).all():  # waits
            break
        yield


def notes_done_rows_on_the_device(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    done = torch.zeros(4, dtype=torch.bool, device=device)
    yield
    while True:
        tokens = logits.argmax(-1)
        done |= tokens == 70
        tokens.masked_fill_(done, 0)
        yield


def reads_the_flag_of_the_step_before(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    home, passed = torch.zeros(2, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
    passed.record()
    yield
    for step in count():
        tokens = logits.argmax(-1)
        if passed.query():
            home[step % 2].copy_((tokens == 70).all(), non_blocking=True)
            passed.record()
        yield


def draws_by_multinomial(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        torch.multinomial(logits.softmax(-1), 1)
        yield


def draws_by_exponential_noise(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        noise = torch.empty_like(logits).exponential_()
        (logits.softmax(-1) / noise).argmax(-1)
        yield


def draws_by_a_checked_distribution(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        torch.distributions.Exponential(logits.exp(), validate_args=True).rsample()  # waits
        yield


def draws_by_an_unchecked_distribution(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        torch.distributions.Exponential(logits.exp(), validate_args=False).rsample()
        yield


def filters_by_top_p(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        ordered, index = logits.softmax(-1).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered > 0.9
        logits.masked_fill(beyond.scatter(-1, index, beyond), float("-inf"))
        yield


def filters_by_a_mask_of_values(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        kept = logits > 0
        logits[kept].mean()  # waits
        yield


def uploads_tokens_from_a_list(device: str) -> Steps:
    table = torch.randn(64, 8, device=device)
    yield
    while True:
        tokens = torch.tensor([1, 2, 3], device=device)  # waits
        table[tokens]
        yield


def uploads_tokens_through_a_pinned_ring(device: str) -> Steps:
    table = torch.randn(64, 8, device=device)
    ring, tokens = torch.zeros(4, 3, dtype=torch.long, pin_memory=True), torch.zeros(3, dtype=torch.long, device=device)
    yield
    for step in count():
        tokens.copy_(ring[step % 4], non_blocking=True)
        table.index_select(0, tokens)
        yield


def uploads_from_pinned_memory_by_a_blocking_copy(device: str) -> Steps:
    home, tokens = torch.zeros(3, pin_memory=True), torch.zeros(3, device=device)
    yield
    while True:
        tokens.copy_(home)  # waits
        yield


def gets_tokens_by_cpu(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        logits.argmax(-1).cpu()  # waits
        yield


def gets_tokens_through_pinned_memory(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    home, event = torch.zeros(4, dtype=torch.long, pin_memory=True), torch.cuda.Event()
    yield
    while True:
        home.copy_(logits.argmax(-1), non_blocking=True)
        event.record()
        yield


def gets_tokens_as_a_list(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    yield
    while True:
        logits.argmax(-1).tolist()  # waits
        yield


def counts_accepted_drafts_on_the_host(device: str) -> Steps:
    drafts, tokens = torch.ones(5, device=device), torch.ones(5, device=device)
    yield
    while True:
        accepted = int((drafts == tokens).sum())  # waits
        drafts.mul_(accepted)
        yield


def counts_accepted_drafts_on_the_device(device: str) -> Steps:
    drafts, tokens = torch.ones(5, device=device), torch.ones(5, device=device)
    yield
    while True:
        kept = (drafts == tokens).cumprod(-1)
        drafts.mul_(kept)
        yield


# Tables, lengths and caches.


def assigns_one_length(device: str) -> Steps:
    lengths = torch.zeros(4, device=device)
    yield
    while True:
        lengths[1] = 7  # waits
        yield


def fills_a_slice_of_lengths(device: str) -> Steps:
    lengths = torch.zeros(4, device=device)
    yield
    while True:
        lengths[1:2].fill_(7)
        yield


def sizes_a_batch_by_its_longest_row(device: str) -> Steps:
    lengths = torch.tensor([3, 5, 2], device=device)
    yield
    while True:
        torch.zeros(3, lengths.max().item(), device=device)  # waits
        yield


def sizes_a_batch_by_a_bound(device: str) -> Steps:
    lengths = torch.tensor([3, 5, 2], device=device)
    yield
    while True:
        torch.lt(torch.arange(8, device=device), lengths[:, None])
        yield


def slices_by_a_device_scalar(device: str) -> Steps:
    cache, length = torch.zeros(16, 8, device=device), torch.tensor(5, device=device)
    yield
    while True:
        cache[:length]  # waits
        yield


def indexes_a_cache_by_a_list(device: str) -> Steps:
    cache = torch.zeros(16, 8, device=device)
    yield
    while True:
        cache[[1, 4, 2]]  # waits
        yield


def writes_a_static_cache(device: str) -> Steps:
    cache, new = torch.zeros(16, 8, device=device), torch.ones(2, 8, device=device)
    slots = torch.tensor([3, 9], device=device)
    yield
    while True:
        cache.index_copy_(0, slots, new)
        yield


def repeats_rows_by_their_lengths(device: str) -> Steps:
    rows, lengths = torch.arange(3, device=device), torch.tensor([3, 5, 2], device=device)
    yield
    while True:
        rows.repeat_interleave(lengths)  # waits
        yield


def repeats_rows_to_a_known_size(device: str) -> Steps:
    rows, lengths = torch.arange(3, device=device), torch.tensor([3, 5, 2], device=device)
    yield
    while True:
        rows.repeat_interleave(lengths, output_size=10)
        yield


def plans_from_lengths_on_the_device(device: str) -> Steps:
    lengths = torch.tensor([3, 5, 2], device=device)
    yield
    while True:
        lengths.cumsum(0).tolist()  # waits
        yield


def attends_with_a_mask(device: str) -> Steps:
    q, k, v = (torch.randn(1, 2, 4, 8, device=device) for _ in range(3))
    yield
    while True:
        functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        yield


# Experts and other sizes that depend on data.


def routes_by_nonzero(device: str) -> Steps:
    chosen = torch.arange(8, device=device) % 3
    yield
    while True:
        (chosen == 1).nonzero()  # waits
        yield


def routes_by_sorting(device: str) -> Steps:
    chosen, x = torch.arange(8, device=device) % 3, torch.randn(8, 4, device=device)
    yield
    while True:
        x.index_select(0, chosen.argsort(stable=True))
        yield


def counts_experts_by_bincount(device: str) -> Steps:
    chosen = torch.arange(8, device=device) % 3
    yield
    while True:
        torch.bincount(chosen, minlength=3)  # waits
        yield


def counts_experts_by_scatter(device: str) -> Steps:
    chosen = torch.arange(8, device=device) % 3
    yield
    while True:
        torch.zeros(3, device=device).scatter_add_(0, chosen, torch.ones(8, device=device))
        yield


def finds_unique_tokens(device: str) -> Steps:
    tokens = torch.arange(8, device=device) % 3
    yield
    while True:
        tokens.unique()  # waits
        yield


def finds_hits_by_where(device: str) -> Steps:
    mask = torch.arange(8, device=device) % 2 == 0
    yield
    while True:
        torch.where(mask)  # waits
        yield


def assigns_under_a_mask(device: str) -> Steps:
    x, mask = torch.zeros(8, device=device), torch.arange(8, device=device) % 2 == 0
    yield
    while True:
        x[mask] = torch.ones(4, device=device)  # waits
        yield


def fills_under_a_mask(device: str) -> Steps:
    x, mask = torch.zeros(8, device=device), torch.arange(8, device=device) % 2 == 0
    yield
    while True:
        x[mask] = 1.0
        yield


def encodes_classes_that_it_must_count(device: str) -> Steps:
    index = torch.arange(4, device=device)
    yield
    while True:
        functional.one_hot(index)  # waits
        yield


def encodes_a_known_number_of_classes(device: str) -> Steps:
    index = torch.arange(4, device=device)
    yield
    while True:
        functional.one_hot(index, 4)
        yield


def compares_by_equal(device: str) -> Steps:
    x = torch.ones(4, device=device)
    yield
    while True:
        torch.equal(x, x + 0)  # waits
        yield


def factors_with_a_check(device: str) -> Steps:
    x = torch.eye(3, device=device)
    yield
    while True:
        torch.linalg.cholesky(x)  # waits
        yield


def factors_without_a_check(device: str) -> Steps:
    x = torch.eye(3, device=device)
    yield
    while True:
        torch.linalg.cholesky_ex(x)
        yield


# Training.


def _training(device: str) -> tuple[Any, Any, Tensor, Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.randn(6, 8, device=device), torch.arange(6, device=device) % 4


def trains_and_logs_every_loss(device: str) -> Steps:
    model, optimizer, x, wanted = _training(device)
    yield
    while True:
        loss = functional.cross_entropy(model(x), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits
        yield


def trains_and_adds_losses_up(device: str) -> Steps:
    model, optimizer, x, wanted = _training(device)
    total = torch.zeros((), device=device)
    yield
    while True:
        loss = functional.cross_entropy(model(x), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        yield


def trains_and_checks_the_norm(device: str) -> Steps:
    model, optimizer, x, wanted = _training(device)
    yield
    while True:
        functional.cross_entropy(model(x), wanted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # waits
        optimizer.step()
        optimizer.zero_grad()
        yield


def trains_with_fused_steps(device: str) -> Steps:
    model, _, x, wanted = _training(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    yield
    while True:
        functional.cross_entropy(model(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def trains_and_prints_the_loss(device: str) -> Steps:
    model, _, x, wanted = _training(device)
    yield
    while True:
        loss = functional.cross_entropy(model(x), wanted)
        f"{loss}"  # waits
        yield


# Streams, events and memory.


def waits_for_the_device(device: str) -> Steps:
    x = torch.zeros(4, device=device)
    yield
    while True:
        x.add_(1)
        torch.cuda.synchronize()  # waits unseen
        yield


def waits_for_an_event(device: str) -> Steps:
    x, event = torch.zeros(4, device=device), torch.cuda.Event()
    yield
    while True:
        x.add_(1)
        event.record()
        event.synchronize()  # waits unseen
        yield


def orders_two_streams_on_the_device(device: str) -> Steps:
    x, side = torch.zeros(4, device=device), torch.cuda.Stream()
    yield
    while True:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        yield


def records_a_stream(device: str) -> Steps:
    side = torch.cuda.Stream()
    yield
    while True:
        x = torch.zeros(4, device=device)
        side.wait_stream(torch.cuda.current_stream())
        x.record_stream(side)  # costs
        torch.cuda.current_stream().wait_stream(side)
        yield


def empties_the_cache(device: str) -> Steps:
    x = torch.zeros(4, device=device)
    yield
    while True:
        x.add_(1)
        torch.cuda.empty_cache()  # costs
        yield


def pins_memory_in_the_loop(device: str) -> Steps:
    x = torch.zeros(4, device=device)
    yield
    while True:
        home = torch.zeros(4, pin_memory=True)  # costs
        x.copy_(home, non_blocking=True)
        yield


def uploads_small_pageable_memory_without_a_wait(device: str) -> Steps:
    x, home = torch.zeros(4, device=device), torch.zeros(4)
    yield
    while True:
        x.copy_(home, non_blocking=True)  # costs
        yield


def shuffles_on_the_device(device: str) -> Steps:
    keys = torch.randn(64, device=device)
    yield
    while True:
        keys.uniform_().argsort()
        yield


PROGRAMS: list[Program] = [
    value for name, value in list(globals().items()) if inspect.isgeneratorfunction(value) and not name.startswith("_")
]
