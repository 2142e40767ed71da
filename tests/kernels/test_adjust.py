"""Adjusted logits, against their definition, token by token, and other libraries' processors."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from implementations import CPU, made, runs
from sampling_oracle import ALL, Setting
from sampling_oracle import tables_of as sampling_tables
from torch import Tensor

from gapless.base.params import SamplingParams
from gapless.base.records import NO_TOKEN, Request
from gapless.kernels import layout as L
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Adjustments, Tables
from gapless.step.lanes.adjust import AdjustLane

MAX_LEN = 600
PLACES = 3


def asked(rng: random.Random, vocab: int) -> Request:
    """A request for some of everything, whose prompt may be long."""
    params: dict[str, Any] = {}
    if rng.random() < 0.7:
        params |= {"repetition_penalty": rng.choice((1.0, 1.3, 0.7)), "frequency_penalty": rng.choice((0.0, 0.3, -1.1))}
        params |= {"presence_penalty": rng.choice((0.0, 0.7))}
    if rng.random() < 0.5:
        some = rng.sample(range(vocab), rng.choice((1, min(vocab, 300))))
        params["logit_bias"] = {token: rng.uniform(-5, 5) for token in some}
    if rng.random() < 0.3:
        params["allowed_token_ids"] = rng.sample(range(vocab), rng.choice((1, min(vocab // 2, 700), min(vocab, 1024))))
    words = tuple(
        tuple(rng.randrange(min(4, vocab)) for _ in range(rng.choice((1, 2, 2, 3, 7))))
        for _ in range(rng.choice((0, 0, 1, 40)))
    )
    prompt = [rng.randrange(vocab) for _ in range(rng.choice((1, 5, 300)))]
    tokens = np.array(prompt, np.int32)
    processors = ((rng.randrange(8), (1.5,)),) if rng.random() < 0.4 else ()
    return Request(0, tokens, SamplingParams(**params), 0, (), 0, MAX_LEN, bad_words=words, processors=processors)


def by_definition(logits: Tensor, tokens: list[int], request: Request) -> Tensor:
    """float32 [vocab] adjusted logits of a request whose known tokens are these."""
    params, output = request.params, tokens[len(request.tokens) :]
    x = logits.float().cpu().numpy().copy()  # NumPy's float32 numbers take a tenth of the time of torch's
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(tokens):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count, said = np.float32(output.count(token)), np.float32(token in output)
        x[token] = x[token] - params.frequency_penalty * count - params.presence_penalty * said
    if params.allowed_token_ids:
        left = np.full_like(x, -np.inf)
        left[list(params.allowed_token_ids)] = x[list(params.allowed_token_ids)]
        x = left
    for *before, last in request.bad_words:
        if not before or output[-len(before) :] == before:
            x[last] = min(x[last], L.BANNED)
    return torch.from_numpy(x)


PENALTIES = [name for name in L.PARAM_OF if name.endswith("_penalty")]


def tables_of(requests: list[Request | None], vocab: int, device: str) -> tuple[Tables, Adjustments]:
    """Row i + 1 serves request i, in slots counted down; None asks for nothing and has no slot."""
    tables = Tables.new(len(requests), MAX_LEN, 4, torch.device("cpu"))
    slots = Adjustments.new(len(requests), vocab, torch.device("cpu"), PLACES)
    slots.adjusted.fill_(7.5)
    tables.params[:, L.STOP_IDS : L.FIRST_PARAM] = NO_TOKEN
    reals = tables.params.view(torch.float32)
    for row, request in enumerate(requests, 1):
        if request is None:
            continue
        tables.params[row, L.ADJUST_SLOT] = slot = len(requests) + 1 - row
        for name in PENALTIES:
            reals[row, L.PARAM_OF[name]] = getattr(request.params, name)
        words = AdjustLane().wishes(request)
        slots.wishes[slot, : len(words)] = torch.from_numpy(words)
        slots.owners[slot] = row
    return Tables(*(one.to(device) for one in tables)), Adjustments(*(one.to(device) for one in slots))


def check_adjust(kernels: Kernels, vocab: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """Over several steps, in which rows grow by none to a few tokens: each slot has its row's logits by definition.
    So it has after each draft. Rows without a slot, and padding, write nothing."""
    rng = random.Random(seed)
    count = rng.choice((1, 3, 5))
    requests = [asked(rng, vocab) if i == 0 or rng.random() < 0.8 else None for i in range(count)]
    tables, slots = tables_of(requests, vocab, device)
    known = [request.tokens.tolist() if request else [1, 2] for request in requests]
    generator = torch.Generator().manual_seed(seed)
    for places in (1, PLACES, 1, PLACES):
        drafts = [[rng.randrange(min(4, vocab)) for _ in range(rng.randrange(PLACES))] for _ in known]
        for row, (tokens, more) in enumerate(zip(known, drafts, strict=True), 1):
            whole = torch.tensor([*tokens, *more], dtype=torch.int32, device=device)
            tables.history[row, : len(whole)] = whole
            tables.state[row, L.LENGTH], tables.state[row, L.DRAFTED] = len(tokens), len(whole)
        logits = (torch.randn(places, count + 1, vocab, generator=generator) * 4).to(dtype)
        rows = torch.tensor([*range(count, 0, -1), 0], dtype=torch.int32, device=device)  # the last is the null row
        listed = [sample for sample in range(count + 1) if sample == 0 or rng.random() < 0.7]
        index = torch.tensor([*listed, listed[-1], listed[-1]], dtype=torch.int32, device=device)
        before = slots.adjusted.clone()
        kernels.adjust(logits.to(device).flatten(0, 1), index, rows, tables, slots)
        for place in range(places):
            pairs = zip(known, drafts, strict=True)
            then = [[*tokens, *more[:place]] if place <= len(more) else None for tokens, more in pairs]
            _check(listed, requests, then, logits[place], (before[place].cpu(), slots.adjusted[place].cpu()))
        _check_counts(listed, requests, known, slots.counts.cpu())
        for tokens, request in zip(known, requests, strict=True):
            most = rng.choice((0, 1, 1, 1, 6)) if request else 0
            tokens += [rng.randrange(min(4, vocab)) for _ in range(most)]


def _check_counts(listed: list[int], requests: list[Request | None], known: list[list[int]], counts: Tensor) -> None:
    """Processors are given the counts of their rows."""
    for sample in set(listed) - {len(requests)}:
        request, tokens = requests[-1 - sample], known[-1 - sample]
        if request is not None and request.processors:
            prompt, output = tokens[: len(request.tokens)], tokens[len(request.tokens) :]
            expected = torch.tensor(output, dtype=torch.int64).bincount(minlength=counts.shape[1]).int()
            expected[prompt] += L.IN_PROMPT
            assert torch.equal(counts[sample + 1], expected)


def _check(
    listed: list[int], requests: list[Request | None], known: list[list[int] | None], logits: Tensor,
    made: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    count, (before, after) = len(requests), made
    for sample in range(count):
        request, tokens, slot = requests[count - 1 - sample], known[count - 1 - sample], sample + 1
        if tokens is None:  # what comes after its last draft means nothing
            continue
        if request is not None and sample in listed:
            expected = by_definition(logits[sample], tokens, request)
            torch.testing.assert_close(after[slot], expected, rtol=3e-7, atol=1e-6)
        else:
            assert torch.equal(after[slot], before[slot])


def check_draws(kernels: Kernels, vocab: int, dtype: torch.dtype, device: str) -> None:
    """A row with a slot is cut and drawn as a row whose own logits are those of the slot; rows beside it as ever."""
    asked = [Setting(0.8, seed=3, top_k=20), Setting(0.0), Setting(0.7, seed=5, top_p=0.8), Setting(0.9, seed=8)]
    generator = torch.Generator().manual_seed(vocab)
    raw, own = (torch.randn(4, vocab, generator=generator) * 3 for _ in range(2))
    slots = Adjustments.new(4, vocab, torch.device("cpu"))
    rows, tables = sampling_tables(asked, device)
    plain_rows, plain = sampling_tables(asked, device)
    used = {0: 2, 1: 4, 2: 1}  # sample -> slot
    for sample, slot in used.items():
        row = int(rows[sample])
        tables.params[row, L.ADJUST_SLOT], slots.owners[slot], slots.adjusted[0, slot] = slot, row, own[sample]
    slots = Adjustments(*(one.to(device) for one in slots))
    mixed = torch.stack([own[i] if i in used else raw[i].to(dtype).float() for i in range(4)]).to(device)
    listed = torch.tensor([*used.values(), 1], dtype=torch.int32, device=device)
    kernels.cut(slots.adjusted[0], listed, slots.owners, tables, ALL)
    kernels.cut(mixed, torch.tensor([*used, 2], dtype=torch.int32, device=device), plain_rows, plain, ALL)
    assert torch.equal(tables.state, plain.state)
    tokens, finite = kernels.sample(raw.to(dtype).to(device), rows, tables, slots.adjusted)
    expected, _ = kernels.sample(mixed, plain_rows, plain, None)
    assert tokens.tolist() == expected.tolist() and bool(finite.all())


@runs("vocab", [131, 5, 2500], cpu=[70_001], keep=1, cuda=[151_936])
def test_slots_hold_the_logits_of_the_definition(implementation, vocab):
    for dtype in implementation.dtypes:
        for seed in range(8 if implementation.name != "interpreter" and vocab < 70_000 else 3):
            check_adjust(implementation.kernels, vocab, dtype, implementation.device, seed)


@runs("vocab", [1500], cuda=[151_936])
def test_rows_with_a_slot_are_cut_and_drawn_from_it(implementation, vocab):
    for dtype in implementation.dtypes:
        check_draws(implementation.kernels, vocab, dtype, implementation.device)


def test_torch_and_cpp_agree_to_the_bit() -> None:
    """Any other result would make tokens depend on where an engine runs."""
    request = Request(
        0, np.arange(40, dtype=np.int32),
        SamplingParams(repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.7, logit_bias={3: 1.7}),
        0, (), 0, 64,
    )  # fmt: skip
    logits, found = torch.randn(1, 131, generator=torch.Generator().manual_seed(0)) * 5, []
    for kernels in (made(name).kernels for name in CPU):
        tables, slots = tables_of([request], 131, "cpu")
        tables.history[1, :60] = torch.arange(60) % 43
        tables.state[1, L.LENGTH] = 60
        one = torch.ones(1, dtype=torch.int32)
        kernels.adjust(logits, one - 1, one, tables, slots)
        found.append(slots.adjusted[0, 1])
    assert torch.equal(*found)


@pytest.mark.parametrize("penalty", [0.6, 1.2, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    tokens = torch.randint(131, (1, 50), generator=torch.Generator().manual_seed(1))
    logits = torch.randn(1, 131, generator=torch.Generator().manual_seed(2)) * 5
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    request = Request(
        0, tokens[0, :20].int().numpy(), SamplingParams(repetition_penalty=penalty), 0, (), 0, 64
    )  # fmt: skip
    for kernels in (made(name).kernels for name in CPU):
        tables, slots = tables_of([request], 131, "cpu")
        tables.history[1, :50] = tokens[0]
        tables.state[1, L.LENGTH] = 50
        one = torch.ones(1, dtype=torch.int32)
        kernels.adjust(logits, one - 1, one, tables, slots)
        # A float32 penalty here, a double there.
        torch.testing.assert_close(slots.adjusted[0, 1], expected[0], rtol=2e-7, atol=0)
