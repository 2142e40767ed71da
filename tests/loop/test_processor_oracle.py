"""Steps run the processors that their rows ask for, for these rows alone."""

from __future__ import annotations

import numpy as np
from direct import Varied
from harness import VOCAB, sizes
from mutation.tools import replaced
from oracles import PROCESSED
from torch_processors import PROCESSORS

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.step.lanes import adjust
from gapless.step.lanes.adjust import AdjustKey
from gapless.step.processors import ProcessorTables, slots_of
from gapless.testing.loops import loop_of
from gapless.testing.sim import SimDevice


def test_a_processor_that_ran_for_rows_that_do_not_ask_would_be_noticed(guarded_steps):
    def everywhere(original, processors, numbers, rows, tables, adjustments):
        own, logits = slots_of(rows.long(), tables), adjustments.adjusted[0]
        for number in numbers:
            given = ProcessorTables(tables, adjustments, rows.long(), number)
            logits.index_copy_(0, own, processors[number](logits.index_select(0, own), given))

    noticed = 0
    with replaced(adjust, "process", everywhere), guarded_steps.rest():
        for seed in range(106, 112):
            try:
                PROCESSED.play(seed, SimDevice(seed), 4)
            except AssertionError:
                noticed += 1
    assert noticed


def test_a_step_in_which_no_row_asks_runs_without_processors():
    shape = sizes(0)._replace(rows=3, pages=60, slots=3)
    loop = loop_of(SimDevice(1), Varied(VOCAB, 48), shape, 2, patience=1_000, processors=PROCESSORS)
    keys = []
    for key, asks in enumerate(({}, {"presence_penalty": 1.0}, {"logits_processors": ["favours"]})):
        params = SamplingParams(temperature=0.0, max_tokens=None, **asks)
        processors = ((0, (3.0,)),) if params.logits_processors else ()
        loop.submit(Request(key, np.array([key, 1], np.int32), params, 0, (), 0, 9, processors=processors))
        while loop.has_work():
            loop.turn()
        keys.append({key for key in loop.launcher.graphs.misses if isinstance(key, AdjustKey)})
    assert keys == [set(), {AdjustKey(1, None)}, {AdjustKey(1, None), AdjustKey(1, None, processors=(0,))}]
