"""The whole /metrics page of one fixed moment: names, types, help texts, labels and values that dashboards rely on."""

import random
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from server_harness import idle

from gapless.engine.outputs import RequestMetrics
from gapless.engine.seam import EngineInfo, Stats
from gapless.server.metrics import Metrics

PAGE = Path(__file__).parent / "metrics_page.txt"
SECOND = 10**9
STATS = Stats(
    drafts=9,
    draft_tokens=36,
    verified=(9, 9, 9, 9),
    accepted=(8, 5, 2, 1),
    running=11,
    waiting=3,
    in_flight=4,
    depth=5,
    steps=40,
    steps_decode=30,
    steps_prefill=7,
    steps_mixed=3,
    pages_total=100,
    pages_free=10,
    pages_cached=20,
    pages_owned=60,
    pages_fenced=10,
    prompt_tokens=901,
    generation_tokens=1234567890,
    admitted_tokens=800,
    admitted_cached=300,
    admitted_loaded=60,
    prefix_queries=1000,
    prefix_hits=400,
    preemptions=2,
    declined_depth=6,
    declined_ring=7,
    declined_capture=9,
    declined_queue=8,
    captures_refused=1,
    device_allocations=13,
    graph_steps=25,
    graph_misses=5,
    chained_steps=12,
    dropped_identity=14,
    held_rows=15,
    over_itl_rows=3,
    over_itl_chunk=4,
    over_itl_late=5,
    masks=16,
    mask_ns=SECOND // 4,
    wall_ns=10 * SECOND,
    busy_ns=7 * SECOND,
    idle=idle(host_late=SECOND, no_work=SECOND, depth=SECOND // 4),
    plan_ns=SECOND // 8,
    prepare_ns=SECOND // 16,
    launch_ns=3,
    wait_ns=5 * SECOND,
    post_ns=77,
    copy_ns=1,
    step_tokens=(30, 0, 2, 0, 1, 0, 3, 4),
    step_tokens_sum=999,
    grammars_waiting=2,
    grammars_compiled=4,
    grammars_ns=SECOND // 2,
    grammar_hits=16,
    grammars_refused=3,
    tier_slots=64,
    tier_used=48,
    tier_pinned=7,
    tier_loading=3,
    tier_storing=4,
    tier_hit=31,
    tier_missed=93,
    tier_read_bytes=4096 * 30,
    tier_read_ns=SECOND // 2,
    tier_written_bytes=4096 * 90,
    tier_written_ns=SECOND * 2,
    tier_stored=90,
    tier_loaded=30,
    tier_refused=2,
    tier_evicted=42,
    tier_late=1,
    tier_slower=13,
    tier_dropped_full=5,
    tier_dropped_gone=6,
    tier_dropped_failed=11,
    lower_used_bytes=(4096 * 70, 0),
    lower_size_bytes=(4096 * 99, 0),
    lower_loading=(1, 2),
    lower_quarantined=(7, 0),
    lower_storing=(3, 4),
    lower_waiting=(5, 6),
    lower_hits=(20, 3),
    lower_missed=(10, 30),
    lower_stored=(80, 70),
    lower_loaded=(18, 2),
    lower_lent=(0, 4),
    lower_failed=(1, 0),
    lower_cancelled=(0, 2),
    lower_refused=(1, 0),
    lower_late=(0, 4),
    lower_dropped_busy=(0, 7),
    lower_dropped_slow=(0, 8),
    lower_dropped_gone=(9, 1),
    lower_dropped_failed=(0, 2),
    lower_read_bytes=(4096 * 18, 4096 * 2),
    lower_written_bytes=(4096 * 80, 4096 * 70),
    lower_read_ns=(SECOND // 4, SECOND),
    lower_written_ns=(SECOND * 3, SECOND // 8),
)
INFO = EngineInfo("m", "cuda", "bfloat16", 512, 1024, 256, 2048, 100, 16, "4", 1000, tiers=("disk", "redis"))


def filled() -> Metrics:
    """Everything that the HTTP side counts, from a fixed seed."""
    metrics, draw = Metrics("m"), random.Random(5)
    histograms = (
        metrics.time_to_first_token,
        metrics.inter_token_latency,
        metrics.e2e_latency,
        metrics.queue_time,
        metrics.prompt_tokens,
        metrics.generation_tokens,
        metrics.params_n,
        metrics.params_max_tokens,
        metrics.max_generation_tokens,
    )
    for number, histogram in enumerate(histograms):
        for _ in range(20 + number):
            histogram.observe(round(draw.expovariate(1 / 4 ** (number - 4)), 3))
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
    assert parsed(filled().render(STATS, INFO, True, 0.25).decode()) == expected
