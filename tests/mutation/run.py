"""Take away one protection at a time: the simulator must notice. `make mutation SEEDS=2000` tries longer."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from mutation.sites import NOT_YET, SITES
from mutation.tools import Site
from simulation.run import world_of
from simulation.scenario import draw


class Verdict(NamedTuple):
    """`seeds` were needed for the first failure, those left out included; `how` is its text, None when none failed."""

    site: Site
    seeds: int
    how: str | None


def try_site(site: Site, most_seeds: int, first: int | None = None) -> Verdict:
    """Run seeds on an engine without this protection until one fails."""
    for count in range(most_seeds):
        scenario = draw((site.first if first is None else first) + count)
        if not site.where(scenario):
            continue
        try:
            with site.broken():
                world_of(scenario, site.prepare).run()
        except Exception as error:  # whatever a broken engine runs into
            _check_site(site, error)
            return Verdict(site, count + 1, _words(error))
    return Verdict(site, most_seeds, None)


def _check_site(site: Site, error: Exception) -> None:
    """A site that no longer fits the engine fails by itself, and shows nothing."""
    error = _cause(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if "mutation" in Path(frame.filename).parts and not isinstance(error, AssertionError):
        raise RuntimeError(f"the site {site.name!r} does not fit the engine: {frame.line}") from error


def _cause(error: Exception) -> Exception:
    """The error behind this one, if it was raised: ranks end for the reasons of others."""
    cause = error.__cause__
    return cause if isinstance(cause, Exception) and cause.__traceback__ is not None else error


def _words(error: Exception) -> str:
    """What the failure says of itself, in one line."""
    cause = _cause(error)
    text = str(cause).partition("\n")[0]
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return text or f"{type(cause).__name__} in {frame.name}: {frame.line}"


def table(verdicts: list[Verdict]) -> str:
    lines = ["| protection taken away | hazard | seeds until noticed | as |", "|---|---:|---:|---|"]
    for site, seeds, how in verdicts:
        lines.append(
            f"| {site.name} | {site.hazard} | {seeds if how else 'NOT NOTICED'} | {(how or '').replace('|', '/')} |"
        )
    return "\n".join(lines)


def record(verdicts: list[Verdict]) -> str:
    """The table as JSON, from which docs/evidence/proof.md is made."""
    rows = [f"  {json.dumps([site.name, site.hazard, seeds])}" for site, seeds, _ in verdicts]
    kept = {
        "command": "make mutation",
        "machine": "Any machine, since seeds decide",
        "date": date.today().isoformat(),
        "head": ["protection taken away", "hazard", "seeds until noticed"],
    }
    return json.dumps(kept, indent=1)[:-2] + ',\n "rows": [\n' + ",\n".join(rows) + "\n ]\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="at most, for each protection")
    parser.add_argument("--out", type=Path, help="file of docs/measurements that keeps the table")
    args = parser.parse_args()
    torch.set_num_threads(1)
    verdicts = [try_site(site, args.seeds) for site in SITES]
    print(table(verdicts))
    if args.out:
        args.out.write_text(record(verdicts), encoding="utf-8")
    missed = sum(verdict.how is None for verdict in verdicts)
    print(f"{len(SITES) - missed} of {len(SITES)} noticed")
    for part, hazards in NOT_YET.items():
        print(f"not yet applicable, without {part}: {', '.join(map(str, hazards))}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
