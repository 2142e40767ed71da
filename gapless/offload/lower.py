"""One tier below the host tier, as the loop sees it: its line, its counts, and its queue of stores."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gapless.offload.copies import GroupCopies, PageCopy
from gapless.offload.tiers.worker import TierWorker
from gapless.pace.load_gate import PAGE_WEIGHT
from gapless.pace.mean import Mean

JOB_PAGES, JOB_BYTES, JOB_NS = 32, 8 << 20, 8_000_000
"""[pages, bytes, ns] Bounds of a job: 8 MiB, or the tier's 8 ms if that is more, and at most 32 pages: a tier answers
no question during a job."""
MOST_WAITING = 8192
"""[pages] Most copies waiting for their store to one tier; they hold no slot."""
BRAKE_SECONDS = 4.0
"""[s] Longest queue of stores, by time; further copies are dropped."""


@dataclass
class LowerCounts:
    """Pages of one tier: its room and queues now, and counts since the start."""

    used_bytes: int = 0
    """Bytes of its pages; 0 if unknown"""
    size_bytes: int = 0
    loading: int = 0
    """Pages under loads for requests"""
    quarantined: int = 0
    """Pages of abandoned loads: their slots are not reused until the tier has ended the load"""
    storing: int = 0
    waiting: int = 0
    """Pages waiting for their store"""
    hits: int = 0
    """Found for requests"""
    missed: int = 0
    """Missing for requests"""
    stored: int = 0
    loaded: int = 0
    """Loaded into slots of the host tier, or lent"""
    lent: int = 0
    """Lent by a peer, and read in its memory; also counted as loaded"""
    failed: int = 0
    """Loads with a page that the tier could not read"""
    cancelled: int = 0
    """Late loads that ended before their last page: nothing failed"""
    refused: int = 0
    """Loaded, with a checksum other than the stored one"""
    late: int = 0
    """Requests that stopped waiting for an answer or a load"""
    dropped_busy: int = 0
    """Pages not stored: too many waited"""
    dropped_slow: int = 0
    """Pages not stored: the queue would have taken too long"""
    dropped_gone: int = 0
    """Pages not stored: the host tier had reused the copy's slot"""
    dropped_failed: int = 0
    """Pages not stored: the tier failed"""
    read_bytes: int = 0
    written_bytes: int = 0
    read_ns: int = 0
    """Time of load jobs"""
    written_ns: int = 0


class LowerTier:
    """One tier. `LowerTiers` writes its fields; `offer` alone queues copies."""

    def __init__(self, line: TierWorker) -> None:
        """`line` takes the orders and returns the results, without waiting."""
        self.line = line
        self.exchange = line.exchange
        """The way to peers, if it has one"""
        self.gives = line.exchange is not None and line.exchange.gives
        """Whether peers may take pages here"""
        self.counts = LowerCounts()
        self.fresh: deque[PageCopy | str] = deque()
        """Copies to store, and names of requests whose end follows all stores before"""
        self.storing = 0
        """Copies under stores"""
        self.page_seconds = Mean(PAGE_WEIGHT)
        """Time to store a page"""
        self.latest_ns = [0.0, 0.0]
        """Time of a page in the latest store and the latest load that moved any"""

    def offer(self, copy: PageCopy) -> None:
        """Queue a complete copy for its store, unless the tier cannot keep up."""
        if len(self.fresh) >= MOST_WAITING:
            self.counts.dropped_busy += 1
        elif len(self.fresh) * self.page_seconds.value > BRAKE_SECONDS:
            self.counts.dropped_slow += 1
        else:
            self.fresh.append(copy)

    def job_pages(self, loads: bool, mean_ns: float, page_bytes: int) -> int:
        """Return the most pages of the next job, if a page takes `mean_ns` and has `page_bytes`."""
        latest_ns, least = self.latest_ns[loads], JOB_BYTES // page_bytes
        fast = int(JOB_NS / max(latest_ns, mean_ns)) if latest_ns else 0
        return max(1, min(JOB_PAGES, max(least, fast)))


def most_stored(group: GroupCopies) -> int:
    """Return the most copies held by stores to a tier: enough for a pause of the loop, and few of all."""
    return max(2, group.size // 4)
