"""Says why tests were skipped, a line for each reason: `make test` prints a thousand skips that have six of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


def reasons_of(skipped: Sequence[Any]) -> list[str]:
    """Return each reason in these reports on one line, the most frequent first, with how many tests have it."""
    reasons = Counter([" ".join(str(report.longrepr[2]).removeprefix("Skipped: ").split()) for report in skipped])
    return [f"{count:5} {reason}" for reason, count in reasons.most_common()]
