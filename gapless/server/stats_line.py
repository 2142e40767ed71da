"""The line about throughput that a busy server writes every ten seconds."""

from __future__ import annotations

import asyncio
import logging

from gapless.engine.seam import Stats
from gapless.server.state import State

log = logging.getLogger("gapless.server")

EVERY_SECONDS = 10.0


async def log_stats(state: State, every: float = EVERY_SECONDS) -> None:
    """Write lines until cancelled. Nothing is written about seconds in which nothing ran."""
    before = state.llm.stats()
    while True:
        await asyncio.sleep(every)
        now = state.llm.stats()
        line = stats_line(before, now, every)
        if line:
            log.info(line)
        before = now


def stats_line(before: Stats, now: Stats, seconds: float) -> str:
    """What happened between two looks; '' when nothing did."""
    prompt, generated = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
    if not (prompt or generated or now.running or now.waiting):
        return ""
    usage = 100 * (now.pages_owned + now.pages_fenced) / max(1, now.pages_total)
    queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    return (
        f"Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
        f"GPU KV cache usage: {usage:.1f}%, Prefix cache hit rate: {100 * hits / max(1, queries):.1f}%"
    )
