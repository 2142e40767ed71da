"""Threads that make masks of native matchers without the interpreter; their code is `native/masks.cpp`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from gapless.base.host import usable_cores
from gapless.device import build
from gapless.kernels import layout
from gapless.step.mail import MOST_TOKENS, CopiedMail, Mail

MASKS_EXTENSION = "gapless_masks"
MASKS_SOURCES = sorted((Path(__file__).parent / "native").glob("*.cpp"))
MAX_THREADS = 8
CORES_A_THREAD = 2
"""Cores of the machine per thread"""


def load() -> ModuleType | None:
    """Return the extension, built at the first call on this machine; None if it cannot be built."""
    return build.module(MASKS_EXTENSION, MASKS_SOURCES)


def start(mail: Mail, polls: bool) -> Any:
    """Return MaskThreads over the mail, None for copied mail or without the extension. They start with the first
    matcher.

    With `polls` they look for tokens by themselves, else at each call of `ring`.
    """
    module = None if isinstance(mail, CopiedMail) else load()
    if module is None:
        return None
    count = min(MAX_THREADS, max(1, usable_cores() // CORES_A_THREAD))
    return module.MaskThreads(count, *geometry(mail), polls)


def geometry(mail: Mail) -> tuple[int, list[int], tuple[int, int], int]:
    """Return the address of the first record, the word offsets of its parts, the number and bytes of records, and the
    bytes of a mask."""
    parts = [
        layout.MAIL_TAG, layout.MAIL_TOLD, layout.MAIL_TOKENS, layout.MAIL_DRAFTED, layout.MAIL_DRAFTS,
        layout.MAIL_ALONG, layout.MAIL_AHEAD, layout.MAIL_EXPECTED, layout.MAIL_RUN, layout.MAIL_MASK, MOST_TOKENS,
    ]  # fmt: skip
    slots, words = mail.words.shape
    return mail.words.data_ptr(), parts, (slots, 4 * words), mail.new_mask().nbytes
