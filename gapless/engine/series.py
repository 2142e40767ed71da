"""The table of metrics: the series that show the numbers of Stats.

`/metrics`, the live page, `gapless top` and the manual's list are made of it, and sums over restarts of an engine take
from it whether a number is a gauge. A row added is a metric added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

NS = 1e9
"""Divisor of times in ns: a series has seconds."""


class SeriesKind(StrEnum):
    GAUGE = "gauge"
    COUNTER = "counter"
    """A number that only grows; its samples' names end in _total."""
    SUMMARY = "summary"
    HISTOGRAM = "histogram"
    """Counts by powers of two: entry b of the path has the values above 2**(b - 1) and up to 2**b."""


GAUGE, COUNTER, SUMMARY, HISTOGRAM = SeriesKind


class Series(NamedTuple):
    """A row of the table."""

    name: str
    kind: SeriesKind
    text: str
    """Help text"""
    path: str | Mapping[str, str] | Callable[[Any], float]
    """Attributes that lead to the number from Stats, or a function of Stats. A series with a label has the path of each
    of its values, or one path to a record, a mapping or a tuple: its fields, keys or places are the values."""
    label: str = ""
    unit: float = 1
    """Number that the values are divided by"""
    total: str = ""
    """Path of the count of a summary, or of the sum of a histogram"""
    title: str = ""
    """Name on the live page and in `gapless top`; both leave out a series without one."""
    column: str = ""
    """Name in the live page's history, as a value or a rate per second"""

    def values(self, root: Any) -> dict[str, float]:
        """Return the numbers by values of the label, or one number by an empty text."""
        path = self.path
        found: Any
        if isinstance(path, Mapping):
            found = {value: attrgetter(one)(root) for value, one in path.items()}
        else:
            found = attrgetter(path)(root) if isinstance(path, str) else path(root)
            if not self.label:
                found = {"": found}
            elif is_dataclass(found):
                found = {one.name: getattr(found, one.name) for one in fields(found)}
            elif isinstance(found, tuple):
                found = {str(place): number for place, number in enumerate(found)}
        return {value: number / self.unit for value, number in found.items()}

    def sum(self, root: Any) -> float:
        return sum(self.values(root).values())


def _each(start: str, *ends: str) -> dict[str, str]:
    """Return paths that begin alike, by their ends."""
    return {end: f"{start}{end}" for end in ends}


SERIES = [
    # Requests.
    Series("vllm:num_requests_running", GAUGE, "Requests in a batch now.", "queue.running", column="running"),
    Series("vllm:num_requests_waiting", GAUGE, "Requests in the queue.", "queue.waiting", column="waiting"),
    Series("vllm:num_requests_waiting_by_reason", GAUGE, "Requests in the queue, by what they wait for.",
        {"capacity": "queue.waiting"}, "reason"),
    Series("vllm:num_preemptions", COUNTER, "Requests put back to the queue.", "queue.preemptions",
        title="preemptions"),
    Series("vllm:prompt_tokens", COUNTER, "Prompt tokens of requests that left the queue, cached or not.",
        "steps.admitted_tokens"),
    Series("vllm:prompt_tokens_cached", COUNTER, "Of these, the ones found in the prefix cache.",
        "steps.admitted_cached"),
    Series("vllm:prompt_tokens_by_source", COUNTER, "Prompt tokens by where their KV came from.",
        {"local_cache_hit": "steps.admitted_here", "external_kv_transfer": "steps.admitted_loaded",
         "local_compute": "steps.admitted_computed"}, "source"),
    Series("vllm:generation_tokens", COUNTER, "Tokens generated.", "steps.generation_tokens", column="generated"),
    Series("gapless:prefill_tokens", COUNTER, "Tokens that prefill computed; after a preemption they count again.",
        "steps.prompt_tokens", column="prompt"),
    # KV pages on the device.
    Series("gapless:kv_pages", GAUGE, "KV pages by state.", "pages", "state"),
    Series("vllm:kv_cache_usage_perc", GAUGE, "Share of KV pages in use, 0 to 1.", "pages.usage", column="kv"),
    Series("vllm:prefix_cache_queries", COUNTER, "Prompt tokens looked up in the prefix cache.",
        "steps.prefix_queries"),
    Series("vllm:prefix_cache_hits", COUNTER, "Prompt tokens found in the prefix cache.", "steps.prefix_hits"),
    # Steps.
    Series("gapless:steps_in_flight", GAUGE, "Steps launched, not settled.", "queue.in_flight"),
    Series("gapless:depth", GAUGE, "Steps in flight allowed.", "queue.depth"),
    Series("gapless:steps", COUNTER, "Steps settled.", _each("sizes.", "decode", "prefill", "mixed"), "kind",
        column="steps"),
    Series("vllm:iteration_tokens_total", HISTOGRAM, "Tokens of a step.", "sizes.by_tokens", "le",
        total="sizes.tokens"),
    Series("gapless:launches", COUNTER,
        "Steps launched as a graph, eagerly for want of one, or eagerly as all steps of their kind are.",
        {"graph": "steps.graph_steps", "miss": "steps.graph_misses", "eager": "steps.eager_steps"}, "how"),
    Series("gapless:declined_launches", COUNTER, "Launches put off.",
        _each("steps.declined_", "depth", "ring", "capture", "queue", "ranks"), "cause"),
    Series("gapless:chained_steps", COUNTER, "Steps enqueued in one visit of the host with the step before.",
        "steps.chained_steps"),
    Series("gapless:captures_refused", COUNTER, "Graphs whose capture failed; their programs run eagerly.",
        "steps.captures_refused", title="captures refused"),
    Series("gapless:steps_over_max_itl", COUNTER, "Steps of decoding rows longer than max_itl.",
        _each("steps.over_itl_", "rows", "chunk", "late"), "cause"),
    Series("gapless:dropped_identity", COUNTER, "Outbox entries of rows that were reused.", "steps.dropped_identity"),
    Series("gapless:device_allocations", COUNTER,
        "Device memory taken from the driver, or given back, since ready: each time the device had to be idle.",
        "allocations", title="device allocations"),
    # Time. The names have GPU, as in dashboards; a CPU counts as a device.
    Series("gapless:gpu_busy_seconds", COUNTER, "Steps ran.", "device.busy_ns", unit=NS),
    Series("gapless:gpu_idle_seconds", COUNTER, "There was nothing to run.", "device.no_work_ns", unit=NS),
    Series("gapless:gpu_bubble_seconds", COUNTER, "No step ran although there was work, by cause.", "device.bubbles_ns",
        "cause", NS),
    # Ranks, if there are several.
    Series("gapless:rank_lag_steps", GAUGE, "Steps sent to a rank that it has not taken up.", "ranks.lag", "rank"),
    Series("gapless:rank_wait_seconds", COUNTER,
        "Steps of a rank waited for the others. The one that waits least keeps them waiting.", "ranks.waited_ns",
        "rank", NS),
    # Drafts.
    Series("vllm:spec_decode_num_drafts", COUNTER, "Rows that ran drafts, each step for itself.", "drafts.drafts"),
    Series("vllm:spec_decode_num_draft_tokens", COUNTER, "Draft tokens that were verified.", "drafts.draft_tokens"),
    Series("vllm:spec_decode_num_accepted_tokens", COUNTER, "Draft tokens that were right.", "drafts.right"),
    Series("vllm:spec_decode_num_accepted_tokens_per_pos", COUNTER,
        "Draft tokens that were right, by their place. A place that falls far behind is a fault of the drafter.",
        "drafts.accepted", "position"),
    Series("gapless:spec_decode_num_draft_tokens_per_pos", COUNTER, "Draft tokens that were verified, by their place.",
        "drafts.verified", "position"),
    # Forms of output.
    Series("gapless:grammars_waiting", GAUGE, "Requests whose form of output is being compiled.", "grammars.waiting"),
    Series("gapless:grammar_hits", COUNTER, "Requests whose form of output had been compiled for another.",
        "grammars.hits"),
    Series("gapless:grammars_refused", COUNTER, "Requests whose form of output could not be compiled, or in time.",
        "grammars.refused"),
    Series("gapless:grammar_compile_seconds", SUMMARY, "Time to compile a form of output.", "grammars.ns", unit=NS,
        total="grammars.compiled"),
    Series("gapless:grammar_masks", COUNTER, "Masks written from grammars.", "masks.written"),
    Series("gapless:grammar_mask_seconds", COUNTER, "From looking at a token to the mask of the next one.", "masks.ns",
        unit=NS),
    Series("gapless:grammar_held_rows", COUNTER, "Rows that a step held, since their grammar's mask was late.",
        "steps.held_rows", title="rows held", column="held_rows"),
    # The host tier.
    Series("gapless:kv_tier_slots", GAUGE, "Pages of which the host tier can hold a copy.", "tier.slots"),
    Series("gapless:kv_tier_used", GAUGE, "Pages of which the host tier holds a copy.", "tier.used"),
    Series("gapless:kv_tier_pinned", GAUGE, "Copies, borrowed ones too, that transfers, tiers below or peers use.",
        "tier.pinned"),
    Series("gapless:kv_tier_moving", GAUGE, "Pages between host tier and device.",
        {"read": "tier.loading", "written": "tier.storing"}, "direction"),
    Series("gapless:kv_tier_pages", COUNTER,
        "Pages by what the host tier did with them. A prompt's pages that the device lacked are hit, or missed and "
        "computed; refused ones were loaded, and not what had been stored.",
        _each("tier.", "hit", "missed", "stored", "loaded", "refused", "evicted"), "event"),
    Series("gapless:kv_tier_dropped", COUNTER, "Pages without a copy in the host tier.",
        _each("tier.dropped_", "full", "gone", "failed"), "reason"),
    Series("gapless:kv_tier_late", COUNTER,
        "Requests that stopped waiting for a load from the host tier, and computed.", "tier.late"),
    Series("gapless:kv_tier_slower", COUNTER, "Loads that were not begun: computing takes less.", "tier.slower"),
    Series("gapless:kv_tier_bytes", COUNTER, "Bytes read from and written to the host tier.",
        {"read": "tier.read_bytes", "written": "tier.written_bytes"}, "direction"),
    Series("gapless:kv_tier_seconds", COUNTER,
        "Time that transfers between host tier and device took, beside the steps.",
        {"read": "tier.read_ns", "written": "tier.written_ns"}, "direction", NS),
]  # fmt: skip
LOWER = [
    Series("gapless:kv_lower_tier_pages", COUNTER,
        "Pages by what a tier below the host tier did with them; refused ones were loaded, and not what was stored. "
        "Of the loaded ones, those lent were read where a peer has them.",
        {"hit": "hits", **_each("", "missed", "stored", "loaded", "lent", "refused")}, "event"),
    Series("gapless:kv_lower_tier_dropped", COUNTER, "Pages that a tier below the host tier does not get.",
        _each("dropped_", "busy", "slow", "gone", "failed"), "reason"),
    Series("gapless:kv_lower_tier_moving", GAUGE,
        "Pages that a tier below the host tier loads and stores now, and those that wait for their store; "
        "quarantined: pages of loads that no request waits for and that have not ended.",
        _each("", "loading", "quarantined", "storing", "waiting"), "state"),
    Series("gapless:kv_lower_tier_room_bytes", GAUGE,
        "Bytes of pages in a tier below the host tier, and how many it may keep; 0 if it does not say.",
        {"used": "used_bytes", "size": "size_bytes"}, "kind"),
    Series("gapless:kv_lower_tier_seconds", COUNTER,
        "Time that loads from and stores to a tier below the host tier took.",
        {"read": "read_ns", "written": "written_ns"}, "direction", NS),
    Series("gapless:kv_lower_tier_bytes", COUNTER, "Bytes to and from a tier below the host tier.",
        {"read": "read_bytes", "written": "written_bytes"}, "direction"),
    Series("gapless:kv_lower_tier_waits", COUNTER,
        "Waits for a tier below the host tier that brought less than it had: loads that failed or were cancelled, "
        "requests that gave up.", _each("", "failed", "cancelled", "late"), "outcome"),
]  # fmt: skip
"""Series with a label `tier` more: their paths begin at the counts of each tier in Stats.lower."""


def gauges() -> set[str]:
    """Return the paths of all gauges."""
    found: set[str] = set()
    for start, row in [*(("", row) for row in SERIES), *(("lower.", row) for row in LOWER)]:
        if row.kind is GAUGE and not callable(row.path):
            found.update(f"{start}{one}" for one in ([row.path] if isinstance(row.path, str) else row.path.values()))
    return found
