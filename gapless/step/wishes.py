"""Fill of new rows outside their packet: slots of lanes, histories, and page tables."""

from __future__ import annotations

from typing import NamedTuple

from gapless.base.records import Admission, Int32s, Request
from gapless.kernels.layout import PAGE_WORDS
from gapless.memory.rows import RowTable
from gapless.step import lanes
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


def wish_words(request: Request) -> int:
    """Return the words of the wishes in all slots that the request leases."""
    return sum([len(lane.wishes(request)) for lane in lanes.LANES if lane.name in request.params.leases])


def fill_for(
    admissions: tuple[Admission, ...], requests: list[Request], table: RowTable, speculates: bool
) -> Fill | None:
    """Return the fill of a step with these admissions: slots, and histories of rows with slots or drafts; None for
    nothing."""
    loads, words = [], []
    for admission, request in zip(admissions, requests, strict=True):
        leased, slots = table.leased.get(admission.row, {}), []
        for lane in lanes.LANES if leased else ():
            if lane.name in leased:
                words.append(lane.wishes(request))
                slots.append((lane.name, leased[lane.name], len(words[-1])))
        if slots or (speculates and admission.start > 0 and request.most_drafts > 0):
            words.append(table.tokens[admission.row, : admission.start].copy())
            loads.append(Load(admission.row, tuple(slots), admission.start))
    return Fill(LoadKey(tuple(loads), sum(map(len, words))), tuple(words)) if loads else None
