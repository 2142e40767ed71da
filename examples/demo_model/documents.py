"""What the generators hand to each other: a question with its answer, and a conversation. Pure Python."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

HELD_OUT_ONE_IN = 40


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its one right answer. `tools` are Hermes-style function records, empty for most families."""

    family: str
    question: str
    answer: str
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages (role, content) in order. `plain` documents are one prompt and one answer without a chat template."""

    messages: tuple[tuple[str, str], ...]
    tools: tuple[dict[str, Any], ...] = field(default=())
    plain: bool = False


def is_held_out(question: str) -> bool:
    """True for one question in forty, decided by the text alone, so training and evaluation can never overlap."""
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0
