"""Runs no_race over a whole program and every thread that it starts."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from .options import DetectorOptions
from .race import RACE_SINKS, no_race
from .race_report import Race
from .report import CountedFinding, Finding


class RaceDetector:
    """Implements `Detector`. All tensors are watched, and those that the program registers by their names."""

    name = "race"

    def __init__(self, options: DetectorOptions) -> None:
        self._regions = options.regions
        self._races: list[Race] = []
        self._stack = ExitStack()

    def enter(self) -> None:
        RACE_SINKS.append(self._races)
        self._stack.callback(RACE_SINKS.remove, self._races)
        if not self._regions:
            self._stack.enter_context(no_race("record", track="all"))

    def exit(self) -> None:
        self._stack.close()

    def findings(self) -> list[CountedFinding]:
        """Return one entry for each line and rule; further races of the same line are counted."""
        first: dict[tuple[str, str, str, int], Finding] = {}
        found = [race.finding() for race in self._races]
        for finding in found:
            first.setdefault(finding.key, finding)
        counts = Counter(finding.key for finding in found)
        return [CountedFinding(finding, counts[key], None) for key, finding in first.items()]
