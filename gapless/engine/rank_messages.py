"""The messages between an engine's leader and the ranks that follow it, at a start and about captures."""

from __future__ import annotations

from typing import NamedTuple

from gapless.base.config import EngineConfig
from gapless.engine import messages as m
from gapless.step.memory import MemorySizes


class Facts(NamedTuple):
    """Facts that all ranks must share, so that they compute parts of the same steps."""

    gapless: str
    """A digest of the package's files"""
    torch: str
    device: str
    kernels: str
    dtype: str
    weights: str
    """A digest of parts of the checkpoint's files"""
    page_bytes: int


class RankPlan(NamedTuple):
    """How a following rank lays out its memory, beside the sizes."""

    sizes: MemorySizes
    drafts: int
    """Most drafts of a row; 0 without a drafter"""
    drafted_rows: int
    reserved: tuple[int, int]
    """Bytes of `Device.reserve`"""


class LoadShare(m.Message, frozen=True):
    """Leader to rank: open the device, and load this share of the model."""

    config: EngineConfig


class ShareLoaded(m.Message, frozen=True):
    """Rank to leader: the share is loaded, and the memory left would hold this many pages."""

    facts: Facts
    pages: int


class BuildMemory(m.Message, frozen=True):
    """Leader to rank: allocate everything."""

    plan: RankPlan


class MemoryBuilt(m.Message, frozen=True):
    """Rank to leader: it obeys orders from now on."""


class Captured(m.Message, frozen=True):
    """Rank to leader: which graphs of the last CaptureOrder it has."""

    kept: tuple[bool, ...]


class Moved(m.Message, frozen=True):
    """Rank to leader: it has moved its parts of the pages of a MoveOrder."""

    stores: bool
    number: int
    checksums: bytes
    """int64, a page's each; none if it has failed"""


class WeightsRead(m.Message, frozen=True):
    """Rank to leader: it has read new weights of this digest, or could not for this reason."""

    number: int
    """The place of its order among the orders to read some"""
    digest: str
    refusal: str = ""


class Failed(m.Message, frozen=True):
    """Rank to leader: its last words."""

    kind: str
    text: str


ToRank = LoadShare | BuildMemory
FromRank = ShareLoaded | MemoryBuilt | Captured | Moved | WeightsRead | Failed
decode_to_rank = m.decoder(ToRank)
decode_from_rank = m.decoder(FromRank)
