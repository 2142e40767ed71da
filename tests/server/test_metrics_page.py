"""The whole /metrics page of one fixed moment: names, types, help texts, labels and values that dashboards rely on."""

import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from prometheus_client.parser import text_string_to_metric_families

from gapless.engine.outputs import RequestMetrics
from gapless.engine.seam import EngineInfo
from gapless.engine.stats import Stats
from gapless.offload.lower import LowerCounts
from gapless.server.metrics import Metrics

PAGE = Path(__file__).parent / "metrics_page.txt"
SECOND = 10**9
SIZES = {"lower": 0, "by_tokens": 8, "verified": 4, "accepted": 4, "lag": 2, "waited_ns": 2}


def usual(path: str) -> int:
    """A value of its own for each number, whichever others there are."""
    return 20_000 if path == "steps.steps" else crc32(path.encode()) % 9973 * (10**6 if "ns" in path else 1)


def counted(value: Callable[[str], int] = usual) -> Stats:
    numbers = {one.name: filled_in(getattr(Stats(), one.name), one.name, value) for one in fields(Stats)}
    numbers["lower"] = tuple(filled_in(LowerCounts(), f"lower {place}", value) for place in range(2))
    return Stats(**numbers)


def filled_in(default: Any, path: str, value: Callable[[str], int]) -> Any:
    if is_dataclass(default):
        parts = [filled_in(getattr(default, one.name), f"{path}.{one.name}", value) for one in fields(default)]
        return type(default)(*parts)
    if isinstance(default, dict):
        return {key: value(f"{path}.{key}") for key in default}
    if isinstance(default, tuple):
        return tuple(value(f"{path}.{place}") for place in range(SIZES[path.rpartition(".")[2]]))
    return value(path)


INFO = EngineInfo("m", "cuda", "bfloat16", 512, 1024, 256, 2048, 100, 16, "4", 1000, tiers=("disk", "redis"))


def filled() -> Metrics:
    """Everything that the HTTP side counts, from a fixed seed."""
    metrics, draw = Metrics("m"), random.Random(5)
    names = "time_to_first_token inter_token_latency e2e_latency queue_time prompt_tokens generation_tokens"
    for number, name in enumerate(f"{names} params_n params_max_tokens max_generation_tokens".split()):
        for _ in range(20 + number):
            getattr(metrics, name).observe(round(draw.expovariate(1 / 4 ** (number - 4)), 3))
    times = RequestMetrics(arrival=1, started=2 * SECOND, first_token=3 * SECOND, last_token=9 * SECOND)
    metrics.observe_request(times._replace(generation_tokens=7, preemptions=1), 1, 60)
    metrics.finished["stop"] += 5
    metrics.rejected["queue_full"] += 2
    metrics.by_adapter["sums"] += 4
    metrics.http["/v1/completions", "POST", "2xx"] += 9
    metrics.http["none", "GET", "4xx"] += 1
    metrics.kv_events = lambda: ({"sent": 70, "lost": 2, "replayed": 12}, {"queue": 1, "replay": 64})
    return metrics


def parsed(text: str) -> dict[str, object]:
    """Everything about each family but the order of its samples and of their labels."""
    return {
        family.name: (
            family.type,
            family.documentation,
            sorted((sample.name, sorted(sample.labels.items()), sample.value) for sample in family.samples),
        )
        for family in text_string_to_metric_families(text)
    }


def test_the_page_of_a_fixed_moment_is_what_dashboards_know():
    expected = parsed(PAGE.read_text(encoding="utf-8"))
    assert len(expected) > 40
    assert parsed(filled().render(counted(), INFO, True, 0.25).decode()) == expected


def test_every_number_of_the_engine_is_on_the_page():
    paths: list[str] = []
    counted(lambda path: paths.append(path) or 0)
    page = Metrics("m").render(counted(), INFO, True)
    for path in paths:
        other = counted(lambda one, path=path: usual(one) + 10**9 * (one == path))
        assert Metrics("m").render(other, INFO, True) != page, f"no series shows {path}"
