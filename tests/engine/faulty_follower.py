"""A following rank that fails as RANK_FAULT says, such as "kill at load": run as a process in place of the engine's.

The faults are kill (by SIGKILL), raise, stop (by SIGSTOP), hang (a program that does not end), other, which changes its
facts, and refuse, which refuses its first captures.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from gapless.engine import follower

FAULT, _, PLACE = os.environ["RANK_FAULT"].partition(" at ")
STEPS = 3
"""Steps that a fault under load lets end before"""


def fail() -> None:
    print(f"about to {FAULT} at {PLACE}", file=sys.stderr, flush=True)
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "raise":
        raise MemoryError("no room on this rank")
    else:
        time.sleep(3600)


def before(owner: Any, name: str, calls: int = 0) -> None:
    """Fail in place of a call of this function, after some sound ones."""
    function, seen = getattr(owner, name), [0]

    @wraps(function)
    def failing(*args: Any, **options: Any) -> Any:
        seen[0] += 1
        if seen[0] > calls:
            fail()
        return function(*args, **options)

    setattr(owner, name, failing)


def refuse(executor: Any) -> None:
    """Refuse the first two captures of forwards."""
    capture, refused = executor.capture, [0]

    def refusing(self: Any, order: Any) -> list[bool]:
        made: list[bool] = capture(self, order)
        if order.capture and refused[0] < 2:
            refused[0] += 1
            for key in order.capture:
                self.graphs.pop(key, None)
            return [False] * len(made)
        return made

    executor.capture = refusing


def follow(rank: int, world: int, number: int) -> bool:
    if PLACE == "import":
        fail()
    from gapless.engine import follower_loop, share, updates
    from gapless.step.executor import Executor
    from gapless.step.follower import FollowerProgram

    places: dict[str, Callable[[], None]] = {
        "load": lambda: before(follower_loop, "load_model"),
        "facts": lambda: None,
        "build": lambda: before(follower_loop, "build_executor"),
        "check": lambda: before(share, "check_sum"),
        "capture": lambda: before(Executor, "capture"),
        "order": lambda: before(Executor, "obey", STEPS),
        "forward": lambda: before(FollowerProgram, "forward", STEPS),
        "update": lambda: before(updates, "read_weights"),
    }
    if FAULT == "refuse":
        refuse(Executor)
    else:
        places[PLACE]()
    if FAULT == "other":
        facts_of = share.facts_of
        share.facts_of = lambda *args: facts_of(*args)._replace(weights="others")
    return follower_loop.follow(rank, world, number)


if __name__ == "__main__":
    follower.run(follow)
