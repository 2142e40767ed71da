"""no_sync on an emulated device says of every program of step_programs.py what its comments say."""

from __future__ import annotations

import pytest
import torch
from guard.step_programs import PROGRAMS, Program, marked_lines

from gapless import guard
from gapless.guard.emulate import emulated_cuda
from gapless.guard.sync import emulating

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: tests/gpu/san_truth.py holds it there")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_marked_lines_of_a_program_are_found_and_no_others(program: Program):
    with emulated_cuda(), emulating():
        steps = program("cuda")
        next(steps)
        with guard.no_sync(mode="record") as region:
            next(steps)
            next(steps)
    found = {finding.user.line for finding in region.report.findings}
    assert found == set(marked_lines(program)), region.report.text()


def test_there_are_programs_of_both_kinds_and_enough_of_them():
    sound = [program for program in PROGRAMS if not marked_lines(program)]
    assert len(sound) >= 20 and len(PROGRAMS) - len(sound) >= 25
