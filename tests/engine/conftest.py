"""Engine tests use the tiny tokenizers of the text tests, and the references of the model tests."""

import sys
from math import inf
from pathlib import Path

import pytest
from oracle_drafter import cost

from gapless.pace.draft_gate import DraftGate

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))


def steps_cost(monkeypatch, cost_of):
    """Have the gate of drafts learn these costs of steps, whatever else the machine does."""
    learn = DraftGate.learn
    monkeypatch.setattr(DraftGate, "learn", lambda gate, kind, *size: learn(gate, kind, *size[:2], cost_of(*size[:2])))


@pytest.fixture
def fixed_costs(monkeypatch):
    """Steps with drafts take twice as long as others."""
    steps_cost(monkeypatch, cost)


@pytest.fixture
def free_drafts(monkeypatch):
    """Steps with drafts cost nothing beside others."""
    steps_cost(monkeypatch, lambda *_: 1)


@pytest.fixture
def captures_all(monkeypatch):
    """Let a start in this process record every step that it means to: a busy machine has no time for some."""
    monkeypatch.setattr("gapless.engine.wiring.CAPTURE_SECONDS", inf)


@pytest.fixture(scope="module", autouse=True)
def engines_have_no_race(engines_under_no_race: None) -> None:
    """The tests of a file share engines, which run under no_race."""
