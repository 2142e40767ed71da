"""Threads that make masks without the interpreter, for matchers that are native; `native/masks.cpp` is what they do."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

from gapless.base.host import usable_cores
from gapless.device import build
from gapless.step.mail import Mail

log = logging.getLogger("gapless.loop")

NAME = "gapless_masks"
SOURCES = sorted((Path(__file__).parent / "native").glob("*.cpp"))
MAX_THREADS = 4
CORES_A_THREAD = 4
"""Cores of the machine for each such thread"""


def load() -> ModuleType | None:
    """Return the extension, built at the first call on this machine; None where it cannot be."""
    return build.module(NAME, SOURCES)


def start(mail: Mail, polls: bool) -> Any:
    """Return MaskThreads over the mail, or None without the extension. They run from the first matcher on.

    With `polls` they look for tokens by themselves, else when `ring` is called.
    """
    module = load()
    if module is None:
        log.warning("masks of forms are made by Python, and later: %s", build.outcomes[NAME].reason)
        return None
    count = min(MAX_THREADS, max(1, usable_cores() // CORES_A_THREAD))
    slots, words = mail.words.shape
    return module.MaskThreads(count, mail.addresses(), slots, 4 * words, mail.new_mask().nbytes, polls)
