"""Where things lie in the device tables, the packet and the outbox, for every kernel that reads or writes them."""

from __future__ import annotations

from gapless.base.params import MAX_STOP_IDS

# Columns of the table `state`, which the device advances.
GENERATION, ACTIVE, LENGTH, COMPUTED = range(4)
STATE_COLUMNS = 4

# Columns of the table `params`, written once at admission. Reals are stored as the bits of a float32.
MIN_LEN, MAX_LEN, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED_LOW, SEED_HIGH, STOP_IDS = range(9)
PARAM_COLUMNS = STOP_IDS + MAX_STOP_IDS

NO_TOKEN = -1

# The packet begins with these, then row numbers.
PACKET_STEP, PACKET_SLOT = range(2)
HEADER_WORDS = 2
MAX_STEP_WORD = 0x7FFFFFFF
"""Step numbers go on at 0 behind it."""
PAGE_WORDS = 2
"""Of a page write: flat index into the page table, and the page."""

OUTBOX_COLUMNS = 4
"""Header: step, lines, 0, 0. Line: row, generation, token, flag."""
