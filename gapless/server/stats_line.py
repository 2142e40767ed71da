"""The line about throughput that a busy server writes every ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time

from gapless.engine.seam import Stats
from gapless.server.state import ServerState

log = logging.getLogger("gapless.server")

STATS_SECONDS = 10.0


async def log_stats(state: ServerState, every: float = STATS_SECONDS) -> None:
    """Write lines until cancelled. Nothing is written about seconds in which nothing ran."""
    before, since = state.llm.stats(), time.monotonic()
    while True:
        await asyncio.sleep(every)
        now, at = state.llm.stats(), time.monotonic()
        numbers = rates(before, now, at - since)
        if numbers:
            log.info(stats_line(numbers), extra={"fields": numbers})
        before, since = now, at


def rates(before: Stats, now: Stats, seconds: float) -> dict[str, float]:
    """Return what happened between two looks; empty when nothing did. Idle times are shares of all time."""
    prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
    if not (prompt or generated or now.running or now.waiting):
        return {}
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    numbers: dict[str, float] = {
        "prompt_tokens_per_second": prompt / seconds,
        "generation_tokens_per_second": generated / seconds,
        "running": now.running,
        "waiting": now.waiting,
        "kv_cache_usage_percent": 100 * (now.pages_owned + now.pages_fenced) / max(1, now.pages_total),
        "prefix_cache_hit_percent": 100 * hits / max(1, queries),
    }
    wall = now.wall_ns - before.wall_ns
    if wall > 0:
        for cause, ns in now.idle_ns.items():
            numbers[f"device_idle_{cause}_percent"] = 100 * (ns - before.idle_ns[cause]) / wall
    return {name: round(value, 3) for name, value in numbers.items()}


def stats_line(numbers: dict[str, float]) -> str:
    """Return the numbers as text. Idle time is shown only if there was work."""
    line = (
        f"Avg prompt throughput: {numbers['prompt_tokens_per_second']:.1f} tokens/s, "
        f"Avg generation throughput: {numbers['generation_tokens_per_second']:.1f} tokens/s, "
        f"Running: {numbers['running']} reqs, Waiting: {numbers['waiting']} reqs, "
        f"GPU KV cache usage: {numbers['kv_cache_usage_percent']:.1f}%, "
        f"Prefix cache hit rate: {numbers['prefix_cache_hit_percent']:.1f}%"
    )
    start, end = "device_idle_", "_percent"
    causes = {name[len(start) : -len(end)]: share for name, share in numbers.items() if name.startswith(start)}
    if not causes:
        return line
    del causes["no_work"]
    listed = ", ".join(f"{cause} {share:.1f}%" for cause, share in causes.items() if share >= 0.05)
    return f"{line}, Device idle with work: {sum(causes.values()):.1f}%" + (f" ({listed})" if listed else "")
