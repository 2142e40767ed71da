"""Computes what a server did between two pages of its /metrics: ours, or any that has vLLM's series."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gapless.lab.exposition import Page, Quantiles, grown, quantiles

KNOWN = ("vllm:num_requests_running", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")


class TopView(NamedTuple):
    """What a server did. Rates are per second, shares from 0 to 1; None when the server does not say."""

    models: tuple[str, ...]
    running: float | None
    waiting: float | None
    prompt_rate: float | None
    generation_rate: float | None
    finished: dict[str, float]
    """Rate by finish reason, of those that occurred."""
    ttft: Quantiles | None
    itl: Quantiles | None
    e2e: Quantiles | None
    kv_usage: float | None
    hit_rate: float | None
    preemptions: float | None
    depth: float | None
    in_flight: float | None
    busy: float | None
    no_work: float | None
    bubbles: dict[str, float]
    """Share of the device's time by cause; empty where the server has no such series."""
    http: dict[str, float]
    """Answers by class of status ("2xx")."""
    refused: float | None


def view(before: Page, now: Page, seconds: float) -> TopView:
    """Compute what happened in the `seconds` between two pages of one server."""

    def grew(*names: str) -> float | None:
        return grown(before.total(*names), now.total(*names))

    def rate(*names: str) -> float | None:
        growth = grew(*names)
        return growth / seconds if growth is not None else None

    def grew_by(name: str, label: str) -> dict[str, float]:
        earlier = before.by(name, label)
        return {key: grown(earlier.get(key), value) or 0.0 for key, value in now.by(name, label).items()}

    def seen(*names: str) -> Quantiles | None:
        return quantiles(before.buckets(*names), now.buckets(*names))

    finished = {reason: n / seconds for reason, n in grew_by("vllm:request_success_total", "finished_reason").items()}
    busy, no_work, bubbles = _device(grew, grew_by("gapless:gpu_bubble_seconds_total", "cause"))
    return TopView(
        models=tuple(sorted(now.by("vllm:num_requests_running", "model_name"))),
        running=now.total("vllm:num_requests_running"),
        waiting=now.total("vllm:num_requests_waiting"),
        prompt_rate=rate("vllm:prompt_tokens_total"),
        generation_rate=rate("vllm:generation_tokens_total"),
        finished={reason: n for reason, n in finished.items() if n},
        ttft=seen("vllm:time_to_first_token_seconds"),
        itl=seen("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        e2e=seen("vllm:e2e_request_latency_seconds"),
        kv_usage=_mean(now, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        hit_rate=_share(
            grew("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            grew("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        ),
        preemptions=grew("vllm:num_preemptions_total"),
        depth=now.total("gapless:depth"),
        in_flight=now.total("gapless:steps_in_flight"),
        busy=busy,
        no_work=no_work,
        bubbles=bubbles,
        http=grew_by("http_requests_total", "status"),
        refused=grew("vllm:admission_rejections_total"),
    )


def known(page: Page) -> bool:
    """Return whether the page has anything that a TopView could show."""
    return any(page.samples(name) for name in KNOWN)


def _device(
    grew: Callable[..., float | None], bubbles: dict[str, float]
) -> tuple[float | None, float | None, dict[str, float]]:
    """Return shares of the device's accounted time: busy, without work, bubbles by cause."""
    busy, idle = grew("gapless:gpu_busy_seconds_total"), grew("gapless:gpu_idle_seconds_total")
    if busy is None or idle is None:
        return None, None, {}
    wall = busy + idle + sum(bubbles.values())
    if wall <= 0:
        return None, None, {}
    return busy / wall, idle / wall, {cause: seconds / wall for cause, seconds in bubbles.items()}


def _mean(page: Page, *names: str) -> float | None:
    """Average over the engines of the server."""
    for name in names:
        values = [sample.value for sample in page.samples(name)]
        if values:
            return sum(values) / len(values)
    return None


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
