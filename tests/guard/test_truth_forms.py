"""The forms that tests/gpu/san_truth.py holds against a GPU have the same verdicts on an emulated one."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu import callback_forms, san_truth
from gpu.operator_forms import forms

from gapless.guard import race
from gapless.guard.detectors import Detectors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


TAKEN = [partial(san_truth.taken_early, read) for read in san_truth.OTHER_READS.values()]


@pytest.mark.parametrize("form", [san_truth.filled_again, san_truth.read_early, *TAKEN])
def test_a_use_of_pinned_memory_races_unless_it_waits_for_the_fence(form):
    with Detectors(["sync", "race"], emulate_cuda=True):
        form(None, True)
        assert race.found() == []
        form(None, False)
        assert [one.rule for one in race.found()] == ["race"]


def test_operators_and_handed_memory_wait_where_their_forms_do():
    with Detectors(["sync"], emulate_cuda=True):
        for name, (waits, call) in forms().items():
            assert bool(san_truth.found_rules(call)) == waits, name


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch.compile imports what warns
def test_a_compiled_function_runs_uncompiled_and_a_captured_operator_is_not_accused():
    with Detectors(["sync"], emulate_cuda=True):
        rows = {row.name: row for row in san_truth.whole_programs()}
    assert rows["a compiled function that reads"].found == ["host-read"]
    assert not any(row.fault for name, row in rows.items() if name != "an operator under capture")
    # An emulated graph runs what it captures, which a real one does not.
    assert rows["an operator under capture"].fault == "expected no runs at once"


def test_forms_in_what_torch_calls_back_are_found_if_they_wait():
    with Detectors(["sync"], emulate_cuda=True):
        for name, (rule, waits, form) in callback_forms.forms().items():
            assert [found for found, _ in san_truth.found_rules(form)] == [rule] * waits, name
