"""Engine tests use the tiny tokenizers of the text tests, and the references of the model tests."""

import sys
from math import inf
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
sys.path.insert(0, str(Path(__file__).parents[1] / "model"))


@pytest.fixture
def captures_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a start in this process record every step that it means to: a busy machine has no time for some."""
    monkeypatch.setattr("gapless.engine.core.CAPTURE_SECONDS", inf)


@pytest.fixture(scope="module", autouse=True)
def engines_have_no_race(engines_under_no_race: None) -> None:
    """The tests of a file share engines, which run under no_race."""
