"""Tells no_race which rows of the tables our own operators touch. It takes those of other operators as unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gapless.guard.race_index import STATED
from gapless.kernels.layout import ADJUST_SLOT, HEADER_WORDS, PACKET_SLOT, PAGE_WORDS
from gapless.step.packet import ADMISSION_WORDS

Rows = Sequence[tuple[Tensor, Any]]
array = Tensor.numpy
"""Reads a tensor unseen by no_race, which would count whole tables as read by the operator."""


def state_rows() -> None:
    """From now on."""
    STATED["gapless::rope_and_write"] = rope_and_write
    STATED["gapless::decode_attention"] = lambda args: attention(args[1], args[3], args[5], args[6])
    STATED["gapless::prefill_attention"] = lambda args: attention(args[1], args[3], args[5], args[7])
    STATED["gapless::invariant_prefill_attention"] = STATED["gapless::prefill_attention"]
    STATED["gapless::cut"] = lambda args: [
        (table, array(args[2])[array(args[1]) % len(args[2])]) for table in args[3:6]
    ]
    STATED["gapless::sample"] = sample
    STATED["gapless::own_logits"] = lambda args: [(args[1], array(args[2]))]
    STATED["gapless::adjust"] = adjust
    STATED["gapless::leave_masked"] = leave_masked
    STATED["gapless::mask"] = lambda args: listed_rows(args[1].index_select(0, args[0]), *args[2:6])
    STATED["gapless::reply"] = lambda args: listed_rows(args[1].index_select(0, args[0]), *args[3:6])
    STATED["gapless::adapt"] = lambda args: [(table, array(args[2])) for table in args[3:5]]
    STATED["gapless::ask"] = lambda args: listed_rows(args[0], *args[1:3])
    STATED["gapless::draft"] = lambda args: listed_rows(args[2], *args[3:5])
    STATED["gapless::keep_drafts"] = lambda args: [(args[4], np.append(array(args[2]), 0))]
    STATED["gapless::begin_decode"] = begin_decode
    STATED["gapless::accept"] = accept
    STATED["gapless::look_up"] = look_up
    STATED["gapless::remember"] = lambda args: listed_rows(args[0], *args[2:5])
    STATED["gapless::recall"] = lambda args: listed_rows(args[0], *args[2:5])
    STATED["gapless::begin_mixed"] = begin_mixed
    STATED["gapless::finish"] = finish
    STATED["gapless::score"] = score


def sample(args: Sequence[Any]) -> Rows:
    _, rows, state, params, masks, adjusted = args
    numbers = array(rows)
    own = [] if adjusted is None else [(adjusted, each_place(adjusted, array(params)[numbers, ADJUST_SLOT]))]
    return [(state, numbers), (params, numbers), (masks, numbers), *own]


def leave_masked(args: Sequence[Any]) -> Rows:
    *_, masks, rows, _ = args
    return [(masks, array(rows))]


def adjust(args: Sequence[Any]) -> Rows:
    _, index, rows, state, params, history, *slots, adjusted = args
    numbers = array(rows)[array(index)]
    leased = array(params)[numbers, ADJUST_SLOT]
    own = [*((table, numbers) for table in (state, params, history)), *((memory, leased) for memory in slots)]
    return [*own, (adjusted, each_place(adjusted, leased))]


def each_place(adjusted: Tensor, slots: Any) -> tuple[Any, Any]:
    """The logits of these slots after any number of drafts."""
    places = len(adjusted)
    return np.arange(places).repeat(len(slots)), np.tile(slots, places)


def rope_and_write(args: Sequence[Any]) -> Rows:
    slots, cache = args[4], args[5]
    return [(cache, array(slots) // cache.shape[3])]


def attention(cache: Tensor, table: Tensor, rows: Tensor, lens: Tensor) -> Rows:
    size, numbers, pages = cache.shape[3], array(rows), array(table)
    held = [pages[row, : -(-length // size)] for row, length in zip(numbers, array(lens).tolist(), strict=True)]
    return [(cache, np.concatenate(held)), (table, numbers)]


def begin_decode(args: Sequence[Any]) -> Rows:
    words, count, _, writes, state, history, pages, _ = args
    packet = array(words)
    rows, first = packet[HEADER_WORDS : HEADER_WORDS + count], HEADER_WORDS + count
    written = packet[first : first + PAGE_WORDS * writes : PAGE_WORDS] // pages.shape[1]
    return [(state, rows), (history, rows), (pages, np.concatenate([rows, written]))]


def begin_mixed(args: Sequence[Any]) -> Rows:
    words, count, _, writes, admissions, _, _, state, params, history, pages, _ = args
    packet, first = array(words), HEADER_WORDS + 2 * count
    rows, behind = packet[HEADER_WORDS : HEADER_WORDS + count], first + PAGE_WORDS * writes
    written = packet[first:behind:PAGE_WORDS] // pages.shape[1]
    admitted = packet[behind : behind + ADMISSION_WORDS * admissions : ADMISSION_WORDS]
    every = np.concatenate([rows, admitted])
    return [(state, every), (params, admitted), (history, rows), (pages, np.concatenate([rows, written]))]


def finish(args: Sequence[Any]) -> Rows:
    words, rows, _, tokens, _, state, params, history, lines, _ = args
    numbers = array(rows)
    # A row without a token writes the null row's history.
    written = np.append(numbers[: tokens.shape[0]], 0)
    slot = array(words)[PACKET_SLOT : PACKET_SLOT + 1]
    return [(state, numbers), (params, numbers[: tokens.shape[0]]), (history, written), (lines, slot)]


def accept(args: Sequence[Any]) -> Rows:
    _, _, rows, state, history, _ = args
    return [(state, array(rows)), (history, array(rows))]


def look_up(args: Sequence[Any]) -> Rows:
    rows, state, params, history, *_ = args
    return listed_rows(rows, state, params, history)


def listed_rows(rows: Tensor, *tables: Tensor) -> Rows:
    return [(table, array(rows)) for table in tables]


def score(args: Sequence[Any]) -> Rows:
    _, index, words, tokens, state, outboxes, _, _ = args
    packet = array(words)
    slot = (packet[PACKET_SLOT : PACKET_SLOT + 1] - 1) % outboxes.shape[0]
    return [(state, packet[HEADER_WORDS + array(index) % len(tokens)]), (outboxes, slot)]
