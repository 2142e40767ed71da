"""A fence that is taken away on the fake accelerator gives a wrong token, a foreign outbox or a failed step."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
from fake_accelerator import fake_device
from mutation.sites import SITES
from mutation.tools import Site, replaced
from oracles import HOSTED, PLAIN, play

from gapless.base.errors import DeviceError
from gapless.device.accelerator_stream import AcceleratorStream
from gapless.loop.loop import Loop
from gapless.testing import fake

pytestmark = [pytest.mark.fake, pytest.mark.unguarded]
LATER = pytest.mark.seeds
WAIT = 20.0
"""Seconds after which a test gives up."""


def no_after() -> AbstractContextManager[None]:
    return replaced(AcceleratorStream, "after", lambda _, self, fence: None)


LAZY = [("lazy", seed) for seed in (8, 9, 10)]
SEEDED = [("seeded", seed) for seed in (8, 9, 10, 11, 12, 13)]
FENCES = {
    "the token copy waits for the step": LAZY,
    "a packet slot waits for the copy that reads it": LAZY[::-1],
    "the host reads behind the step's last fence": LAZY,
    "each step has a fence of its own": LAZY,
    "each step in flight has its own lines on the device": [("off", 8), ("off", 9), *SEEDED],
    "the host tier stores what was observed": SEEDED,
    "the host tier's transfers end at their fences": [*LAZY[1:], *SEEDED],
}
"""Fences, with the moods of streams and seeds that notice them: the first one does, unless the machine is busy"""
FIRST = ("the token copy waits for the step",)
OWN = {"the token copy waits for the step": no_after}


def play_without(site: Site, mood: str, seed: int, sound: bool) -> None:
    """Play a seed without this protection; `sound` with it, but alone."""
    oracle = HOSTED if "host tier" in site.name else PLAIN
    prepare = site.alone if sound else site.prepare

    def loop(*args: Any, **options: Any) -> Loop:
        made = oracle.loop(*args, **options)
        prepare(made)
        return made

    with nullcontext() if sound else OWN.get(site.name, site.broken)():
        play(oracle._replace(loop=loop), [seed], 4, opened=partial(fake_device, mood=mood))


def is_noticed(site: Site, mood: str, seed: int) -> bool:
    try:
        play_without(site, mood, seed, sound=False)
    except (AssertionError, DeviceError) as error:
        assert not isinstance(error.__cause__, (TypeError, AttributeError)), "the site no longer fits the engine"
        return True
    finally:
        forget()
    return False


def forget() -> None:
    """Let the device do what is left, and forget its error."""
    fake.delays(None)
    end = time.monotonic() + WAIT
    while True:
        with suppress(RuntimeError):
            fake.synchronize()
        try:
            return fake.reset()
        except RuntimeError:
            assert time.monotonic() < end


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FIRST else LATER) for name in FENCES])
def test_a_missing_fence_is_noticed_on_the_fake(name):
    site = next(site for site in SITES if site.name == name)
    play_without(site, *FENCES[name][0], sound=True)
    assert any(is_noticed(site, *how) for how in FENCES[name])
