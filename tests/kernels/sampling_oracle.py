"""Sampling by its definition, with the vocabulary sorted: what the searches are held against. And tables for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gapless.base.params import MAX_STOP_IDS
from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels.masks import banned
from gapless.kernels.random import gumbel
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.kernels.views import Filters

UNITS = 2.0**40
WORD = 0xFFFFFFFF
ALL = Filters(top_k=True, top_p=True)


class Setting(NamedTuple):
    """What one row asks for, and how many of its tokens are known."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_len: int = 0
    stop_ids: Sequence[int] = ()
    length: int = 7
    out: Sequence[int] = ()
    """Tokens that the row's mask leaves out; none where it has no mask"""
    late: bool = False
    """Whether its mask is an old one"""


def tables_of(settings: Sequence[Setting], device: str = "cpu", vocab: int = 0) -> tuple[Tensor, Tables]:
    """Rows int32 [N], the last table row first, and the tables: the row of each setting, and the null row. Masks need
    a vocabulary."""
    tables = Tables.new(len(settings), 64, 4, torch.device("cpu"), vocab)
    rows = torch.arange(len(settings), 0, -1, dtype=torch.int32)
    whole, reals = tables.params, tables.params.view(torch.float32)
    tables.state[rows, L.CUT_VALUE], tables.state[rows, L.CUT_ID] = L.KEEP_VALUE, L.KEEP_ID
    whole[rows, L.MAX_LEN] = 1 << 20
    for table, column, field in (
        (tables.state, L.LENGTH, "length"), (whole, L.MIN_LEN, "min_len"), (whole, L.TOP_K, "top_k"),
        (reals, L.TEMPERATURE, "temperature"), (reals, L.TOP_P, "top_p"), (reals, L.MIN_P, "min_p"),
    ):  # fmt: skip
        table[rows, column] = torch.tensor([getattr(asked, field) for asked in settings], dtype=table.dtype)
    whole[rows, L.SEED_LOW : L.SEED_HIGH + 1] = torch.tensor([[asked.seed] for asked in settings]).view(torch.int32)
    lists = [[*asked.stop_ids, *[NO_TOKEN] * (MAX_STOP_IDS - len(asked.stop_ids))] for asked in settings]
    whole[rows, L.STOP_IDS : L.FIRST_PARAM] = torch.tensor(lists, dtype=torch.int32)
    for row, asked in zip(rows.tolist(), settings, strict=True):
        whole[row, L.MASKED], tables.state[row, L.LATE] = bool(asked.out), asked.late
        tables.masks[row, 0] = mask_without(asked.out, vocab)
    return rows.to(device), Tables(*(table.to(device) for table in tables))


def mask_without(out: Sequence[int], vocab: int) -> Tensor:
    """int32 [words], bits set but for these tokens, those past the vocabulary too."""
    words = np.full(L.mask_words(vocab), 0xFFFFFFFF, np.uint32)
    at = np.array(out, np.int64)
    np.bitwise_and.at(words, at // 32, ~np.left_shift(1, at % 32).astype(np.uint32))
    return torch.from_numpy(words.view(np.int32))


def allowed(logits: Tensor, asked: Setting) -> Tensor:
    """float32 [vocab], with the banned tokens at -inf."""
    logits = logits.float().clone()
    if asked.length + 1 <= asked.min_len:
        logits[[token for token in asked.stop_ids if 0 <= token < len(logits)]] = -torch.inf
    if not asked.late:
        logits[list(asked.out)] = -torch.inf
    return logits


def ranking(logits: Tensor) -> Tensor:
    """Ids of a row, best first, equal logits by id."""
    return torch.sort(logits + 0.0, descending=True, stable=True).indices


def ids_of(mask: Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


def kept(logits: Tensor, asked: Setting, slack: float = 0.0) -> set[int]:
    """Tokens of one row of finite logits that its filters leave, those at -inf aside."""
    return ids_of(kept_mask(logits, asked, slack))


def kept_mask(logits: Tensor, asked: Setting, slack: float = 0.0) -> Tensor:
    """The same as bool [vocab].

    `slack` moves the borders of top-p and min-p by that share: down to keep more, up (negative) to keep less.
    """
    logits = allowed(logits, asked)
    order = ranking(logits)
    if asked.top_k:
        order = order[: asked.top_k]
    best = logits[order[0]]
    temperature = torch.tensor(asked.temperature, dtype=torch.float32)
    weight = ((logits[order] - best) / (temperature or torch.tensor(1.0))).exp()
    units = (weight * UNITS).long()
    before, total = units.cumsum(0) - units, units.sum()
    top_p = torch.tensor(asked.top_p, dtype=torch.float32)
    drop = (top_p < 1.0) & (before.double() >= top_p.double() * total.double() * (1 + slack))
    drop |= weight < torch.tensor(asked.min_p, dtype=torch.float32) * (1 - slack)
    drop[0] = False
    mask = torch.zeros(len(logits), dtype=torch.bool)
    mask[order[~drop]] = True
    return mask & (logits > -torch.inf)


def kept_by(tables: Tables, row: int, logits: Tensor, asked: Setting) -> set[int]:
    """What the cut in the tables leaves, those at -inf aside."""
    return ids_of(mask_by(tables, row, logits, asked))


def mask_by(tables: Tables, row: int, logits: Tensor, asked: Setting) -> Tensor:
    """The same as bool [vocab]."""
    state = tables.state[row].cpu()
    value, last = state[L.CUT_VALUE : L.CUT_VALUE + 1].view(torch.float32), int(state[L.CUT_ID])
    logits = allowed(logits.cpu(), asked)
    ids = torch.arange(len(logits))
    left = (logits > value) | ((logits == value) & (ids <= last))
    return left & (logits > -torch.inf)


def drawn(logits: Tensor, asked: Setting, vocab: int) -> int:
    """The token of one row of finite logits."""
    left, logits = kept_mask(logits, asked), allowed(logits, asked)
    if asked.temperature == 0:
        return int((logits + 0.0).argmax())
    temperature = torch.tensor(asked.temperature, dtype=torch.float32)
    scores = (logits - logits.amax()) / temperature
    position, seed = torch.tensor([[asked.length]]), torch.tensor([asked.seed]).view(torch.int32)[None]
    noisy = scores + gumbel(None, vocab, position, seed)[0]
    return int(noisy.masked_fill(~left, -torch.inf).argmax())


def hard_rows(vocab: int) -> list[tuple[Tensor, Setting]]:
    """float32 logits [vocab] and a setting: where a search or a sum may go wrong."""
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=generator) * 3
    coarse, flat = normal.round(), torch.full((vocab,), -2.5)
    zeros = torch.where(torch.arange(vocab) % 3 == 0, -0.0, 0.0)
    holes = torch.where(torch.arange(vocab) % 5 == 2, normal, -torch.inf)
    alone = torch.full((vocab,), -torch.inf)
    alone[vocab // 3] = 1.5
    wide = torch.where(normal > 0, 3e38, -3e38)
    tiny = normal * 1e-40
    best = normal.argsort(descending=True)[:3].tolist()
    few = [{"top_k": 1}, {"top_k": min(10, vocab)}, {"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 1.0}, {"min_p": 1e-3}]
    both = [{"top_k": 50, "top_p": 0.7, "min_p": 0.01}, {"top_k": 3, "top_p": 0.999}]
    asked = [*few, *both, {}, {"top_k": vocab}, {"top_k": vocab + 5}, {"top_k": 2**31 - 1}]
    asked += [{"top_p": 1e-9}, {"top_p": 1e-45}, {"top_p": 1 - 2**-24}, {"min_p": 1e-45}]
    made = [(logits, Setting(**one)) for logits in (normal, coarse, flat, zeros, holes) for one in asked]
    made += [(logits, Setting(**one)) for logits in (alone, wide, tiny) for one in (*few, *both)]
    made += [
        (normal, Setting(temperature, **one))
        for temperature in (100.0, 0.1, 1e-3, 1e-30, 1e-45)
        for one in (*few, *both)
    ]
    for stop_ids in (best[:1], best, [*best, vocab, 2**31 - 1], [token for token in range(vocab) if token % 31 == 0]):
        banned = Setting(stop_ids=stop_ids[:MAX_STOP_IDS], min_len=30)
        made += [(normal, banned._replace(**one)) for one in (*few, *both, {"temperature": 0.0})]
        made += [(coarse, banned._replace(**one)) for one in both]
    for out in (best, range(0, vocab, 2), [token for token in range(vocab) if token != vocab // 2]):
        masked = Setting(out=tuple(out), stop_ids=best[1:], min_len=30)
        made += [(normal, masked._replace(**one)) for one in (*few, *both, {}, {"temperature": 0.0})]
        made += [(normal, masked._replace(late=True, **one)) for one in (*both, {"temperature": 0.0})]
        made += [(coarse, masked._replace(min_len=0, **one)) for one in both]
    return made


def check_hard_rows(kernels: Kernels, vocab: int, dtype: torch.dtype, device: str, every: int = 1) -> None:
    """Every cut keeps the set of the definition, borders within the last bits of an exponential aside; every draw is
    one of that set, and is the definition's where its lead over the second is no matter of last bits."""
    most = torch.finfo(dtype).max
    rows_of = [(torch.where(x.isfinite(), x.clamp(-most, most), x), asked) for x, asked in hard_rows(vocab)]
    made = [(logits.to(dtype), asked._replace(seed=7 * i)) for i, (logits, asked) in enumerate(rows_of)]
    made = made[vocab % every :: every]
    logits, settings = torch.stack([row for row, _ in made]).to(device), [asked for _, asked in made]
    rows, tables = tables_of(settings, device, vocab)
    before = logits.clone()
    kernels.cut(logits, torch.arange(len(made), dtype=torch.int32, device=device), rows, tables, ALL)
    tokens, finite = kernels.sample(logits, rows, tables, None)
    assert torch.equal(logits, before) and bool(finite.all())
    for i, (row, asked) in enumerate(made):
        found, token = kept_by(tables, int(rows[i]), row, asked), int(tokens[i])
        if asked.temperature > 0:
            assert kept(row, asked, -1e-6) <= found <= kept(row, asked, 1e-6), (i, asked)
            assert token in found, (i, asked)
            close, scores = lead(row, asked, found)
            assert close or token == max(found, key=lambda token: scores[token]), (i, asked)
        else:
            assert token == drawn(row, asked, vocab), (i, asked)


def lead(logits: Tensor, asked: Setting, found: set[int]) -> tuple[bool, Tensor]:
    """Whether the best two of these tokens are as near as rounding, and all scores with noise."""
    logits = allowed(logits, asked)
    scores = (logits - logits.amax()) / torch.tensor(asked.temperature, dtype=torch.float32)
    position, seed = torch.tensor([[asked.length]]), torch.tensor([asked.seed]).view(torch.int32)[None]
    scores += gumbel(None, len(logits), position, seed)[0]
    best = scores[sorted(found)].topk(min(2, len(found))).values
    return len(best) == 2 and bool(best[0] - best[1] <= 1e-5 * max(1.0, abs(float(best[0])))), scores


def check_masks_of_places(kernels: Kernels, vocab: int, device: str) -> None:
    """Each place of a row with drafts has a mask of its own: what it draws, and where its filters end, is the same as
    from logits that are at -inf already."""
    generator, places = torch.Generator().manual_seed(vocab), 3
    settings = [Setting(1.0, 5, 0.9), Setting(0.0), Setting(0.7, 0, 0.8)]
    rows, tables = tables_of(settings, device, vocab)
    masks = torch.randint(-(2**31), 2**31, (4, places, L.mask_words(vocab)), dtype=torch.int32, generator=generator)
    masks[:, :, 0] |= 2
    tables.params[1:3, L.MASKED] = 1
    tables.state[:, L.DRAFTED] = tables.state[:, L.LENGTH] + places - 1
    logits = torch.randn(places * len(rows), vocab, generator=generator).to(device)
    index = torch.arange(len(logits), dtype=torch.int32, device=device)
    found = []
    for masked in (True, False):
        given, own = logits.clone(), tables._replace(state=tables.state.clone(), params=tables.params.clone())
        if masked:
            own = own._replace(masks=masks.to(device))
        else:
            own.params[:, L.MASKED] = 0
            for sample, (place, row) in enumerate((p, row) for p in range(places) for row in rows.tolist()):
                if row < 3:
                    given[sample, banned(masks[row, place][None], vocab)[0].to(device)] = -torch.inf
        kernels.cut(given, index, rows, own, ALL)
        found.append((*kernels.sample(given, rows, own, None), own.state))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def check_bad_rows(kernels: Kernels, vocab: int, device: str) -> None:
    """NaN, +inf, or nothing but -inf, before or by the bans: not finite, in the cut harmless, and a token all the
    same; rows beside are not disturbed. Of index, what is padding writes nothing."""
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(1))
    logits[1, vocab // 2], logits[2, -1], logits[3], logits[4, 0] = torch.nan, torch.inf, -torch.inf, -torch.inf
    logits[5], logits[6] = torch.nan, -torch.inf
    logits[6, vocab // 2] = 1.0
    for temperature in (0.0, 0.8):
        asked = Setting(temperature, top_k=vocab // 2 + 1, top_p=0.8)
        settings = [asked._replace(seed=i) for i in range(8)]
        settings[6] = settings[6]._replace(stop_ids=(vocab // 2,), min_len=30)
        rows, tables = tables_of(settings, device)
        rows[7] = 0
        before = tables.state.clone()
        index = torch.tensor([0, 7, 7, 1, 2, 3, 4, 5, 6, 6, 6], dtype=torch.int32, device=device)
        kernels.cut(logits.to(device), index, rows, tables, ALL)
        tokens, finite = kernels.sample(logits.to(device), rows, tables, None)
        assert finite.tolist() == [True, False, False, False, True, False, False, True]
        assert all(0 <= token < vocab for token in tokens.tolist())
        assert torch.equal(tables.state[:, : L.CUT_VALUE], before[:, : L.CUT_VALUE])
        assert torch.equal(tables.state[0], before[0]) and torch.equal(tables.state[1], before[1])
        for i in (0, 4):
            assert int(tokens[i]) == drawn(logits[i], settings[i], vocab)
            if temperature:
                assert kept_by(tables, int(rows[i]), logits[i], settings[i]) == kept(logits[i], settings[i])
            else:
                assert tables.state[int(rows[i]), L.CUT_VALUE : L.CUT_ID + 1].tolist() == [L.KEEP_VALUE, L.KEEP_ID]


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python's own integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & WORD, (p >> 32) ^ d ^ m, p & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return a, b, c, d
