"""Single-token requests beside the load: how long an unrelated user waits."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from gapless.lab.http import Client, HttpError
from gapless.lab.reply import read_reply
from gapless.lab.stats import spread

PROMPT = "Hi"


class SideResult(NamedTuple):
    """Latencies in milliseconds."""

    latencies: tuple[float, ...]
    failed: int

    def numbers(self) -> tuple[float, float, float]:
        """Median, P99 and the most."""
        found = spread(self.latencies, (50.0, 99.0, 100.0))
        median, p99, most = (value for _, value in found.percentiles)
        return median, p99, most

    def json(self) -> dict[str, Any]:
        """The keys of `vllm bench serve --probe-request-rate`."""
        keys = ("probe_median_e2el_ms", "probe_p99_e2el_ms", "probe_max_e2el_ms")
        counts = {"probe_completed": len(self.latencies), "probe_failed": self.failed}
        return {**counts, **dict(zip(keys, self.numbers(), strict=True))}


class SideLoad:
    """Asks, waits 1 / rate seconds, and asks again, from `start` to `stop`; no limit on concurrency holds it back."""

    def __init__(self, client: Client, rate: float) -> None:
        self._client, self._pause = client, 1 / rate
        self._latencies: list[float] = []
        self._failed = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> SideResult:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return SideResult(tuple(self._latencies), self._failed)

    async def _run(self) -> None:
        loop, data = asyncio.get_running_loop(), self._client.target.generation(PROMPT, 1)
        while True:
            sent = loop.time()
            try:
                reply = read_reply(await self._client.send(data))
            except HttpError:
                self._failed += 1
            else:
                self._failed += bool(reply.error)
                self._latencies += [] if reply.error else [1e3 * (reply.ended - sent)]
            await asyncio.sleep(self._pause)
