"""Each fault of short_programs.py is found at its line and by its rule, and its corrected twin is silent."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from guard import short_programs
from guard.short_programs import PAIRS

from gapless.guard.detectors import Detectors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


def marked() -> dict[int, set[str]]:
    """Return the rules that comments name, by line."""
    text = inspect.getsource(short_programs).splitlines()
    found = ((number, re.search(r"# bad: ([\w -]+)", line)) for number, line in enumerate(text, 1))
    return {number: set(match[1].split()) for number, match in found if match}


def lines_of(function) -> range:
    """Return the lines of a program: of the function that it calls, where it only calls one."""
    called = [name for name in function.__code__.co_names if name.startswith("_")]
    lines, first = inspect.getsourcelines(getattr(short_programs, called[0]) if called else function)
    return range(first, first + len(lines))


def found_by_san(function) -> dict[int, set[str]]:
    torch.manual_seed(0)  # programs that draw numbers may end early
    with torch.no_grad(), Detectors(["sync", "race"], emulate_cuda=True) as detectors:
        function()
    found: dict[int, set[str]] = {}
    for entry in detectors.findings():
        if entry.excuse is None:
            found.setdefault(entry.finding.user.line, set()).add(entry.finding.rule)
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_a_fault_is_found_at_its_line_and_its_twin_is_silent(pair):
    bad, good = pair
    expected = {line: rules for line, rules in marked().items() if line in lines_of(bad)}
    found = found_by_san(bad)
    # The other side of a race is named too, at a line of its own.
    assert expected and all(rules <= found.get(line, set()) for line, rules in expected.items()), found
    assert all(rules == {"race"} for line, rules in found.items() if line not in expected), found
    assert found_by_san(good) == {}


def test_arguments_by_name_mean_what_they_mean_elsewhere():
    with torch.no_grad(), Detectors(["sync"], emulate_cuda=True):
        x = torch.ones(2, 3, device="cuda")
        assert (x.size(dim=1), x.stride(dim=0)) == (3, 3)
        assert torch.reshape(input=x, shape=(3, 2)).shape == (3, 2)


def test_random_states_that_are_held_are_given_to_no_other():
    with torch.no_grad(), Detectors(["sync"], emulate_cuda=True):
        first = torch.cuda.get_rng_state()
        torch.rand(2, device="cuda")
        second = torch.cuda.get_rng_state()
        expected = torch.rand(4, device="cuda").cpu()
        torch.cuda.set_rng_state(first)
        torch.rand(7, device="cuda")
        torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(second)
        assert torch.equal(torch.rand(4, device="cuda").cpu(), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_gradient_of_flex_attention_is_refused_in_one_sentence():
    from torch.nn.attention.flex_attention import flex_attention

    with Detectors(["sync"], emulate_cuda=True):
        x = torch.ones(1, 1, 16, 8, device="cuda", requires_grad=True)
        with pytest.raises(NotImplementedError, match=r"^not emulated: the gradient of torch\.nn"):
            flex_attention(x, x, x)
