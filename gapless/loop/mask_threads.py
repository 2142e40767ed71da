"""Threads that make masks without the interpreter, for matchers that are native; `native/masks.cpp` is what they do."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from gapless.base.host import usable_cores
from gapless.device import build
from gapless.kernels import layout
from gapless.step.mail import MOST_TOKENS, Mail

NAME = "gapless_masks"
SOURCES = sorted((Path(__file__).parent / "native").glob("*.cpp"))
MAX_THREADS = 8
CORES_A_THREAD = 2
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
        return None
    count = min(MAX_THREADS, max(1, usable_cores() // CORES_A_THREAD))
    return module.MaskThreads(count, *geometry(mail), polls)


def geometry(mail: Mail) -> tuple[int, list[int], tuple[int, int], int]:
    """Return where the first record is, at which words its parts are, how many records of how many bytes there are,
    and the bytes of a mask."""
    parts = [
        layout.MAIL_TAG, layout.MAIL_TOLD, layout.MAIL_TOKENS, layout.MAIL_DRAFTED, layout.MAIL_DRAFTS,
        layout.MAIL_ALONG, layout.MAIL_AHEAD, layout.MAIL_EXPECTED, layout.MAIL_RUN, layout.MAIL_MASK, MOST_TOKENS,
    ]  # fmt: skip
    slots, words = mail.words.shape
    return mail.words.data_ptr(), parts, (slots, 4 * words), mail.new_mask().nbytes
