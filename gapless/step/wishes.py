"""Slots of rows that adjust their logits: what they hold for a request, and how a step fills them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from gapless.base.params import Lane
from gapless.base.records import Admission, Int32s, Request
from gapless.kernels.layout import WISH_WORDS
from gapless.memory.rows import RowTable
from gapless.step.keys import Load, LoadKey


class Fill(NamedTuple):
    """The slots that one step fills, and the words that they get."""

    key: LoadKey
    words: tuple[Int32s, ...]


def wish_words(request: Request) -> Int32s:
    """Return what the slot of a request's row holds: `layout` says where."""
    biases, allowed = request.params.logit_bias or {}, request.params.allowed_token_ids or ()
    ends = list(itertools.accumulate(map(len, request.bad_words)))
    values = np.array(list(biases.values()), np.float32).view(np.int32)
    head = np.array([len(biases), len(allowed), len(ends), len(request.tokens), *biases], np.int32)
    tail = np.array([*allowed, *ends, *itertools.chain(*request.bad_words)], np.int32)
    return np.concatenate((head, values, tail))


def most_fill(max_len: int) -> int:
    """Return the words that one step may fill slots with: a whole history, and all that one request may ask for."""
    return max_len + WISH_WORDS


def fill_for(admissions: tuple[Admission, ...], requests: list[Request], table: RowTable) -> Fill | None:
    """Return how a step with these admissions fills slots; None when no row leased one."""
    loads, words = [], []
    for admission, request in zip(admissions, requests, strict=True):
        slot = table.leased.get(admission.row, {}).get(Lane.ADJUST.value)
        if slot is not None:
            wishes = wish_words(request)
            words += [wishes, table.tokens[admission.row, : admission.start].copy()]
            loads.append(Load(admission.row, slot, len(wishes), admission.start))
    return Fill(LoadKey(tuple(loads), sum(map(len, words))), tuple(words)) if loads else None
