"""Slots: what a row leases beside its pages comes and goes with the row."""

from __future__ import annotations

import numpy as np

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.rows import RowTable
from gapless.memory.slots import NO_SLOT, Slots

TOKENS = np.array([1], np.int32)


def test_every_slot_is_handed_out_once_and_the_null_slot_never():
    slots = Slots(3, Ledger())
    assert sorted(slots.take("bias") for _ in range(3)) == [1, 2, 3] and NO_SLOT not in (1, 2, 3)
    assert (slots.available("bias"), slots.size) == (0, 3)


def test_a_slot_comes_back_when_its_last_step_has_completed():
    ledger = Ledger()
    slots = Slots(1, ledger)
    slot = slots.take("bias")
    slots.retire(slot, last_step=2)
    ledger.advance(Clock.COMPUTE, 1)
    assert slots.available("bias") == 0
    ledger.advance(Clock.COMPUTE, 2)
    assert slots.take("bias") == slot


def test_a_row_takes_its_slots_and_gives_them_up_with_itself():
    ledger = Ledger()
    table = RowTable(3, 8, ledger)
    table.slots = {"bias": Slots(1, ledger), "mask": Slots(2, ledger)}
    both, mask = table.take(7, TOKENS, ("bias", "mask")), table.take(8, TOKENS, ("mask",))
    assert table.leased[both].keys() == {"bias", "mask"} and table.leased[mask].keys() == {"mask"}
    assert table.leased[both]["mask"] != table.leased[mask]["mask"]
    assert not table.lends(("mask",)) and not table.lends(("mask", "bias")) and table.lends(())
    table.retire(both, last_step=1)
    assert both not in table.leased and not table.lends(("bias",))
    ledger.advance(Clock.COMPUTE, 1)
    assert table.lends(("bias", "mask")) and table.available() == 2
    assert table.leased[table.take(9, TOKENS)] == {}
