"""Steps of engines and training loops, each with one fault or none; a comment says what each line does to the host.

`# waits`: the host waits there, and torch's own sync debug mode reports it. `# waits unseen`: it waits, and that mode
does not report it. `# costs`: no wait on a quiet device, yet the line is one that a loop should not have. Everything
else only enqueues. tests/guard/test_step_programs.py holds no_sync against the comments on an emulated device,
tests/gpu/san_truth.py holds the comments against a real one.

Each program is a generator of its device: it sets up until its first `yield`, then does one step between two. Those of
one expression are rows of tables, with the function that sets them up above.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Exponential
from torch.nn import functional

Steps = Iterator[None]
Program = Callable[[str], Steps]
PROGRAMS: list[Program] = []


def marked_lines(program: Program) -> dict[int, str]:
    """Return the kinds of a program's marked lines: waits, waits unseen, costs."""
    code = getattr(program, "step", program).__code__
    lines = {line for *_, line in code.co_lines() if line}
    text = {line: linecache.getline(__file__, line).strip() for line in range(code.co_firstlineno, max(lines) + 1)}
    marks = {line: re.search(r"# (waits unseen|waits|costs)$", words) for line, words in text.items()}
    return {line: found[1] for line, found in marks.items() if found}


def generator(program: Program) -> Program:
    PROGRAMS.append(program)
    return program


def table(set_up: Callable[[str], Any], **steps: Callable[..., object]) -> None:
    """Add programs that do `step(*set_up(device))` over and over."""
    for name, step in steps.items():
        PROGRAMS.append(_repeating(set_up, step, name))


def _repeating(set_up: Callable[[str], Any], step: Callable[..., object], name: str) -> Program:
    def program(device: str) -> Steps:
        made = set_up(device)
        yield
        while True:
            step(*made)
            yield

    program.__name__ = name
    program.step = step  # type: ignore[attr-defined]
    return program


# Decoding: how a step ends, draws and takes its input.


def note_done_rows(logits: Tensor, done: Tensor) -> None:
    tokens = logits.argmax(-1)
    done |= tokens == 70
    tokens.masked_fill_(done, 0)


def cut_by_top_p(logits: Tensor) -> None:
    ordered, index = logits.softmax(-1).sort(dim=-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered > 0.9
    logits.masked_fill(beyond.scatter(-1, index, beyond), float("-inf"))


def average_kept(logits: Tensor) -> None:
    kept = logits > 0
    logits[kept].mean()  # waits


table(
    lambda device: [torch.randn(4, 64, device=device)],
    stops_when_all_rows_are_done=lambda logits: bool((logits.argmax(-1) == 70).all()),  # waits
    draws_by_multinomial=lambda logits: torch.multinomial(logits.softmax(-1), 1),
    draws_by_exponential_noise=lambda x: (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1),
    draws_by_a_checked_distribution=lambda x: Exponential(x.exp(), validate_args=True).rsample(),  # waits
    draws_by_an_unchecked_distribution=lambda x: Exponential(x.exp(), validate_args=False).rsample(),
    filters_by_top_p=cut_by_top_p,
    filters_by_a_mask_of_values=average_kept,
    gets_tokens_by_cpu=lambda logits: logits.argmax(-1).cpu(),  # waits
    gets_tokens_as_a_list=lambda logits: logits.argmax(-1).tolist(),  # waits
)
table(
    lambda device: [torch.randn(4, 64, device=device), torch.zeros(4, dtype=torch.bool, device=device)],
    notes_done_rows_on_the_device=note_done_rows,
)
table(
    lambda device: [torch.randn(64, 8, device=device)],
    uploads_tokens_from_a_list=lambda table: table[torch.tensor([1, 2, 3], device=table.device)],  # waits
)
table(
    lambda device: [torch.zeros(3, pin_memory=True), torch.zeros(3, device=device)],
    uploads_from_pinned_memory_by_a_blocking_copy=lambda home, tokens: tokens.copy_(home),  # waits
)
table(
    lambda device: [torch.ones(5, device=device), torch.ones(5, device=device)],
    counts_accepted_drafts_on_the_host=lambda drafts, tokens: drafts.mul_(int((drafts == tokens).sum())),  # waits
    counts_accepted_drafts_on_the_device=lambda drafts, tokens: drafts.mul_((drafts == tokens).cumprod(-1)),
)


@generator
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


@generator
def uploads_tokens_through_a_pinned_ring(device: str) -> Steps:
    table = torch.randn(64, 8, device=device)
    ring, tokens = torch.zeros(4, 3, dtype=torch.long, pin_memory=True), torch.zeros(3, dtype=torch.long, device=device)
    yield
    for step in count():
        tokens.copy_(ring[step % 4], non_blocking=True)
        table.index_select(0, tokens)
        yield


@generator
def gets_tokens_through_pinned_memory(device: str) -> Steps:
    logits = torch.randn(4, 64, device=device)
    home, event = torch.zeros(4, dtype=torch.long, pin_memory=True), torch.cuda.Event()
    yield
    while True:
        home.copy_(logits.argmax(-1), non_blocking=True)
        event.record()
        yield


# Tables, lengths and caches.


def assign_one(lengths: Tensor) -> None:
    lengths[1] = 7  # waits


table(
    lambda device: [torch.zeros(4, device=device)],
    assigns_one_length=assign_one,
    fills_a_slice_of_lengths=lambda lengths: lengths[1:2].fill_(7),
)
table(
    lambda device: [torch.tensor([3, 5, 2], device=device), torch.arange(8, device=device)],
    sizes_a_batch_by_its_longest_row=lambda lengths, _: lengths.new_zeros(3, lengths.max().item()),  # waits
    sizes_a_batch_by_a_bound=lambda lengths, places: torch.lt(places, lengths[:, None]),
    repeats_rows_by_their_lengths=lambda lengths, rows: rows[:3].repeat_interleave(lengths),  # waits
    repeats_rows_to_a_known_size=lambda lengths, rows: rows[:3].repeat_interleave(lengths, output_size=10),
    plans_from_lengths_on_the_device=lambda lengths, _: lengths.cumsum(0).tolist(),  # waits
)
table(
    lambda device: [torch.zeros(16, 8, device=device), torch.tensor(5, device=device)],
    slices_by_a_device_scalar=lambda cache, length: cache[:length],  # waits
    indexes_a_cache_by_a_list=lambda cache, _: cache[[1, 4, 2]],  # waits
)
table(
    lambda device: [
        torch.zeros(16, 8, device=device), torch.tensor([3, 9], device=device), torch.ones(2, 8, device=device)
    ],
    writes_a_static_cache=lambda cache, slots, new: cache.index_copy_(0, slots, new),
)  # fmt: skip
table(
    lambda device: [torch.randn(1, 2, 4, 8, device=device) for _ in range(3)],
    attends_with_a_mask=lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
)


# Experts and other sizes that depend on data.


def assign_under_a_mask(x: Tensor, mask: Tensor) -> None:
    x[mask] = torch.ones(4, device=x.device)  # waits


def fill_under_a_mask(x: Tensor, mask: Tensor) -> None:
    x[mask] = 1.0


table(
    lambda device: [torch.arange(8, device=device) % 3, torch.ones(8, device=device)],
    routes_by_nonzero=lambda chosen, _: (chosen == 1).nonzero(),  # waits
    routes_by_sorting=lambda chosen, x: x.index_select(0, chosen.argsort(stable=True)),
    counts_experts_by_bincount=lambda chosen, _: torch.bincount(chosen, minlength=3),  # waits
    counts_experts_by_scatter=lambda chosen, ones: ones.new_zeros(3).scatter_add_(0, chosen, ones),
    finds_unique_tokens=lambda tokens, _: tokens.unique(),  # waits
)
table(
    lambda device: [torch.zeros(8, device=device), torch.arange(8, device=device) % 2 == 0],
    finds_hits_by_where=lambda _, mask: torch.where(mask),  # waits
    assigns_under_a_mask=assign_under_a_mask,
    fills_under_a_mask=fill_under_a_mask,
)
table(
    lambda device: [torch.arange(4, device=device)],
    encodes_classes_that_it_must_count=lambda index: functional.one_hot(index),  # waits
    encodes_a_known_number_of_classes=lambda index: functional.one_hot(index, 4),
    compares_by_equal=lambda x: torch.equal(x, x + 0),  # waits
)
table(
    lambda device: [torch.eye(3, device=device)],
    factors_with_a_check=lambda x: torch.linalg.cholesky(x),  # waits
    factors_without_a_check=lambda x: torch.linalg.cholesky_ex(x),
)


# Training.


def training(device: str, **options: Any) -> tuple[Any, ...]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    total = torch.zeros((), device=device)
    return model, optimizer, torch.randn(6, 8, device=device), torch.arange(6, device=device) % 4, total


def log_every_loss(model: Any, optimizer: Any, x: Tensor, wanted: Tensor, total: Tensor) -> None:
    loss = functional.cross_entropy(model(x), wanted)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()  # waits


def add_losses_up(model: Any, optimizer: Any, x: Tensor, wanted: Tensor, total: Tensor) -> None:
    loss = functional.cross_entropy(model(x), wanted)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total += loss.detach()


def check_the_norm(model: Any, optimizer: Any, x: Tensor, wanted: Tensor, total: Tensor) -> None:
    functional.cross_entropy(model(x), wanted).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)  # waits
    optimizer.step()
    optimizer.zero_grad()


def print_the_loss(model: Any, optimizer: Any, x: Tensor, wanted: Tensor, total: Tensor) -> None:
    _ = f"{functional.cross_entropy(model(x), wanted)}"  # waits


table(
    training,
    trains_and_logs_every_loss=log_every_loss,
    trains_and_adds_losses_up=add_losses_up,
    trains_and_checks_the_norm=check_the_norm,
    trains_and_prints_the_loss=print_the_loss,
)
table(lambda device: training(device, fused=True), trains_with_fused_steps=add_losses_up)


# Streams, events and memory.


def wait_for_an_event(x: Tensor, event: torch.cuda.Event) -> None:
    x.add_(1)
    event.record()
    event.synchronize()  # waits unseen


def order_two_streams(x: Tensor, side: torch.cuda.Stream) -> None:
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)


def record_a_stream(like: Tensor, side: torch.cuda.Stream) -> None:
    x = torch.zeros_like(like)
    side.wait_stream(torch.cuda.current_stream())
    x.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)


def pin_memory(x: Tensor) -> None:
    home = torch.zeros(4, pin_memory=True)  # costs
    x.copy_(home, non_blocking=True)


table(
    lambda device: [torch.zeros(4, device=device)],
    waits_for_the_device=lambda x: (x.add_(1), torch.cuda.synchronize()),  # waits unseen
    empties_the_cache=lambda x: (x.add_(1), torch.cuda.empty_cache()),  # costs
    pins_memory_in_the_loop=pin_memory,
    shuffles_on_the_device=lambda keys: keys.uniform_().argsort(),
)
table(lambda device: [torch.zeros(4, device=device), torch.cuda.Event()], waits_for_an_event=wait_for_an_event)
table(
    lambda device: [torch.zeros(4, device=device), torch.cuda.Stream()],
    orders_two_streams_on_the_device=order_two_streams,
    records_a_stream=record_a_stream,
)
table(
    lambda device: [torch.zeros(4, device=device), torch.zeros(4)],
    uploads_small_pageable_memory_without_a_wait=lambda x, home: x.copy_(home, non_blocking=True),  # costs
)
