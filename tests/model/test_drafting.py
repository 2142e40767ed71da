"""Drafts are drawn with the noise of their positions, among all tokens or some, and agree with the model often."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels import native, plain
from gapless.kernels.random import gumbel
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.drafting.draws import Draws

VOCAB, PLACES = 50, 3


@pytest.fixture(params=["torch", "native"])
def kernels(request) -> Kernels:
    found = plain.KERNELS if request.param == "torch" else native.load()
    assert found is not None
    return found


def tables_of(rows: int, temperature: float) -> Tables:
    """Rows of one temperature, each with a seed and a length of its own, and something adjusted."""
    tables = Tables.new(rows, 64, 4, torch.device("cpu"))
    tables.state[:, L.LENGTH] = torch.arange(rows + 1) % 40
    tables.state[:, L.DRAFTED] = tables.state[:, L.LENGTH] + PLACES - 1
    tables.state[:, L.CUT_VALUE :: 2], tables.state[:, L.CUT_ID :: 2] = L.KEEP_VALUE, L.KEEP_ID
    tables.params[:, L.STOP_IDS : L.FIRST_PARAM] = NO_TOKEN
    tables.params[:, L.TEMPERATURE] = torch.tensor(temperature).view(torch.int32)
    tables.params[:, L.SEED_LOW] = torch.arange(rows + 1) * 7919
    tables.params[:, L.ADJUST_SLOT] = 3
    return tables


def logits_of(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("some", [False, True])
def test_each_place_is_drawn_with_its_own_noise(kernels, temperature, some):
    tables, rows = tables_of(30, temperature), torch.arange(30, 5, -1)
    before = [table.clone() for table in tables]
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:20] if some else None
    draws, named = Draws(kernels, rows, tables, VOCAB, ids), torch.arange(VOCAB) if ids is None else ids
    for place in range(PLACES):
        logits = logits_of(place, len(rows), len(named))
        position, seed = (
            tables.state[rows, L.LENGTH, None].long() + place,
            tables.params[rows, L.SEED_LOW : L.SEED_HIGH + 1],
        )
        noise = gumbel(named.expand(len(rows), -1), VOCAB, position, seed)
        assert torch.equal(draws.next(logits), named[(logits + temperature * noise).argmax(1)])
    assert all(map(torch.equal, tables, before))


def test_a_stop_id_is_not_drafted_below_the_least_length(kernels):
    tables, rows = tables_of(4, 0.0), torch.arange(1, 5)
    tables.params[:, L.STOP_IDS], tables.params[:, L.MIN_LEN] = 7, tables.state[:, L.LENGTH] + 2
    ids = torch.arange(5, 15)
    logits = torch.zeros(4, len(ids))
    logits[:, 2], logits[:, 4] = 9.0, 5.0
    draws = Draws(kernels, rows, tables, VOCAB, ids)
    assert [draws.next(logits).tolist() for _ in range(PLACES)] == [[9] * 4, [9] * 4, [7] * 4]


def test_drafts_of_a_like_model_are_its_tokens_more_often_than_the_best_one_is(kernels):
    tables = tables_of(2000, 1.0)
    tables.params[:, L.ADJUST_SLOT] = 0
    rows = torch.arange(1, 2001)
    model = logits_of(1, len(rows), VOCAB) * 1.5
    own = model + logits_of(2, len(rows), VOCAB) * 0.5
    tokens, _ = kernels.sample(model, rows.int(), tables, None)
    drawn = (Draws(kernels, rows, tables, VOCAB).next(own) == tokens).float().mean()
    assert drawn > 0.7 > 0.4 > (own.argmax(1) == tokens).float().mean()
