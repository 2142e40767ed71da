"""Fill of new rows outside their packet: slots of adjusted rows, histories, and page tables."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from gapless.base.params import Lane
from gapless.base.processors import MAX_ARGUMENTS, MAX_PROCESSORS
from gapless.base.records import Admission, Int32s, Request
from gapless.kernels.layout import PAGE_WORDS
from gapless.memory.rows import RowTable
from gapless.memory.slots import NO_SLOT
from gapless.step.keys import Load, LoadKey


class Fill(NamedTuple):
    """Fill of one step outside its packet, and the words for it."""

    key: LoadKey
    words: tuple[Int32s, ...]

    def with_pages(self, writes: Int32s) -> Fill:
        """Return this fill with page table entries added, int32 [count * PAGE_WORDS]."""
        loads, words, _ = self.key
        return Fill(LoadKey(loads, words + len(writes), len(writes) // PAGE_WORDS), (*self.words, writes))


NO_FILL = Fill(LoadKey((), 0), ())


def wish_words(request: Request) -> Int32s:
    """Return the contents of a request's slot, in the order of `layout`."""
    biases, allowed = request.params.logit_bias or {}, request.params.allowed_token_ids or ()
    ends = list(itertools.accumulate(map(len, request.bad_words)))
    values = np.array(list(biases.values()), np.float32).view(np.int32)
    head = np.array([len(biases), len(allowed), len(ends), len(request.tokens)], np.int32)
    tail = np.array([*allowed, *ends, *itertools.chain(*request.bad_words)], np.int32)
    return np.concatenate((head, _processor_words(request), np.array([*biases], np.int32), values, tail))


def _processor_words(request: Request) -> Int32s:
    """Return a bit for each processor of the request, and the arguments of each."""
    words = np.zeros(1 + MAX_PROCESSORS * MAX_ARGUMENTS, np.int32)
    given = words[1:].view(np.float32).reshape(MAX_PROCESSORS, MAX_ARGUMENTS)
    for number, arguments in request.processors:
        words[0] |= 1 << number
        given[number, : len(arguments)] = arguments
    return words


def fill_for(
    admissions: tuple[Admission, ...], requests: list[Request], table: RowTable, speculates: bool
) -> Fill | None:
    """Return the fill of a step with these admissions: slots, and histories of rows with drafts; None for nothing."""
    loads, words = [], []
    for admission, request in zip(admissions, requests, strict=True):
        slot = table.leased.get(admission.row, {}).get(Lane.ADJUST.value, NO_SLOT)
        drafts = speculates and admission.start > 0 and request.most_drafts > 0
        if slot != NO_SLOT or drafts:
            wishes = wish_words(request) if slot != NO_SLOT else np.empty(0, np.int32)
            words += [wishes, table.tokens[admission.row, : admission.start].copy()]
            loads.append(Load(admission.row, slot, len(wishes), admission.start))
    return Fill(LoadKey(tuple(loads), sum(map(len, words))), tuple(words)) if loads else None
