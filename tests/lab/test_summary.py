"""The numbers against numpy and by hand; the block and the file in the ecosystem's form."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gapless.base.errors import ConfigError
from gapless.lab.datasets import Prompt
from gapless.lab.records import ClientUse, LoadRun, Sample
from gapless.lab.stats import Spread, percentile
from gapless.lab.summary import (
    QUEUE_METRICS,
    SUMMARY_METRICS,
    block,
    detailed_json,
    parse_goodput,
    parse_percentiles,
    peak_concurrency,
    peak_tokens,
    remarks,
    result_json,
    summarise,
)


def sample(place, sent, ttft, itl, tokens, error="", **more):
    events = tuple(sent + ttft + itl * i for i in range(tokens))
    made = Sample(place, sent, sent, events, events[-1], 10, tokens, "x" * tokens, (), error, sent)
    return made._replace(**more)


def prompts(count, length=10, output=3):
    return [Prompt(i, "x", length, output) for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 997])
def test_percentiles_mean_and_std_are_numpys(count):
    values = [random.Random(count).gauss(5, 2) for _ in range(count)]
    percents = (0.0, 1.0, 50.0, 90.0, 99.0, 99.9, 100.0)
    found = Spread(values, percents)
    assert [v for _, v in found.percentiles] == pytest.approx(np.percentile(values, percents).tolist())
    assert (found.mean, found.median, found.std) == pytest.approx((np.mean(values), np.median(values), np.std(values)))


def test_nothing_has_a_spread_of_zeros():
    nothing = {"n": 0, "mean": 0.0, "median": 0.0, "std": 0.0, "percentiles": ((99.0, 0.0),)}
    assert vars(Spread([])) == nothing and percentile([], 50) == 0.0


RUN = LoadRun(
    (
        sample(0, 0.0, 0.1, 0.02, 3),
        sample(1, 0.5, 0.3, 0.01, 5, scheduled=0.2, released=0.4),
        sample(2, 0.6, 0.1, 0.1, 1),
        sample(3, 0.7, 0.1, 0.1, 4, error="HTTP 503: full"),
    ),
    2.0,
    ClientUse(0.5, 2.0, (0.001, 0.003)),
)


def test_a_run_by_hand():
    found = summarise(RUN, prompts(4), percents=(50.0,), goodput={"ttft": 200.0})
    counts = {"completed": 3, "failed": 1, "total_input_tokens": 30, "total_output_tokens": 9}
    rates = {"request_throughput": 1.5, "output_throughput": 4.5, "total_token_throughput": 19.5}
    assert found.totals == found.totals | counts | rates
    assert found.totals["request_goodput"] == pytest.approx(2 / 2.0)
    assert found.spreads["ttft"].mean == pytest.approx(1000 * (0.1 + 0.3 + 0.1) / 3)
    assert found.spreads["tpot"].n == 2 and found.spreads["tpot"].mean == pytest.approx(15.0)  # one token has none
    assert found.spreads["itl"].n == 6 and found.spreads["itl"].mean == pytest.approx((2 * 20 + 4 * 10) / 6)
    assert found.spreads["e2el"].median == pytest.approx(140.0)
    assert found.spreads["client_queue_time"].percentiles == ((50.0, 0.0),)
    assert found.spreads["client_queue_time"].mean == pytest.approx(200 / 3)
    assert found.spreads["e2el_including_client_queue"].mean == pytest.approx((140 + 540 + 100) / 3)
    assert found.client["send_lag_max_ms"] == pytest.approx(100.0) and found.client["cpu_share"] == 0.25
    assert found.client["loop_delay_max_ms"] == pytest.approx(3.0)


def test_goodput_needs_every_objective():
    def rate(**limits):
        return summarise(RUN, prompts(4), goodput=limits).totals["request_goodput"]

    assert rate(ttft=100.001, tpot=20.001) == 1.0 and rate(ttft=100.001, tpot=19.0) == 0.5
    assert rate(e2el=0.0) == 0.0 and rate() is None
    assert parse_goodput(["ttft:200", "e2el:2e3"]) == {"ttft": 200.0, "e2el": 2000.0}
    for wrong in ("itl:3", "ttft", "ttft:x", "tpot:-1", "tpot:nan"):
        with pytest.raises(ConfigError, match="goodput takes pairs"):
            parse_goodput([wrong])


def test_percentiles_that_are_not_numbers_are_refused():
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    for wrong in ("", "x", "101", "-1", "nan"):
        with pytest.raises(ConfigError, match="metric-percentiles"):
            parse_percentiles(wrong)


def test_the_peak_of_tokens_is_that_of_a_second():
    some = [sample(0, 0.0, 0.5, 0.25, 4), sample(1, 0.9, 0.2, 0.1, 2)]  # events at .5 .75 1.0 1.25 and 1.1 1.2
    assert peak_tokens(some) == pytest.approx(4.0) and peak_tokens([]) == 0.0
    bundled = sample(0, 0.0, 0.1, 0.1, 2, output_tokens=10)
    assert peak_tokens([bundled]) == pytest.approx(10.0)
    ends = [sample(i, float(i), 1.0, 0.1, 1) for i in range(3)]  # one ends as the next begins
    assert peak_concurrency(ends) == 1 and peak_concurrency([]) == 0
    assert peak_concurrency([s._replace(sent=0.0) for s in ends]) == 3


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     3         
Failed requests:                         1         
Maximum request concurrency:             8         
Request rate configured (RPS):           2.00      
Benchmark duration (s):                  2.00      
Total input tokens:                      30        
Total generated tokens:                  9         
Request throughput (req/s):              1.50      
Request goodput (req/s):                 1.00      
Output token throughput (tok/s):         4.50      
Peak output token throughput (tok/s):    9.00      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          19.50     
---------------Time to First Token----------------
Mean TTFT (ms):                          166.67    
Median TTFT (ms):                        100.00    
P99 TTFT (ms):                           296.00    
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          15.00     
Median TPOT (ms):                        15.00     
P99 TPOT (ms):                           19.90     
---------------Inter-token Latency----------------
Mean ITL (ms):                           13.33     
Median ITL (ms):                         10.00     
P99 ITL (ms):                            20.00     
----------------End-to-end Latency----------------
Mean E2EL (ms):                          193.33    
Median E2EL (ms):                        140.00    
P99 E2EL (ms):                           336.00    
------------------Load Generator------------------
Median send lag (ms):                    0.00      
P99 send lag (ms):                       97.00     
Max send lag (ms):                       100.00    
P99 event loop delay (ms):               2.98      
Client processor share (%):              25.00     
==================================================\
"""


def test_a_summary_is_printed_as_a_block():
    found = summarise(RUN, prompts(4), goodput={"ttft": 200.0})
    assert "\n".join(block(found, SUMMARY_METRICS, concurrency=8, rate=2.0)) == BLOCK
    short = "\n".join(block(summarise(RUN, prompts(4)), ("ttft",)))
    assert "goodput" not in short and "concurrency:" not in short and "configured" not in short and "TPOT" not in short
    assert any("E2EL incl. Client Queue" in line for line in block(found, QUEUE_METRICS))


VLLM_KEYS = """
duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput max_output_tokens_per_s max_concurrent_requests
""".split()  # noqa: SIM905
VLLM_LISTS = "input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors".split()  # noqa: SIM905


def test_the_file_has_the_keys_that_parsers_know():
    found = summarise(RUN, prompts(4), percents=(90.0, 99.9))
    result = result_json(found, SUMMARY_METRICS)
    stats = [f"{kind}_{name}_ms" for name in SUMMARY_METRICS for kind in ("mean", "median", "std", "p90", "p99.9")]
    assert set(result) == {*VLLM_KEYS, *stats, "client"}
    assert result["request_goodput"] is None and result["mean_tpot_ms"] == pytest.approx(15.0)
    lists = detailed_json(found, RUN)
    assert set(VLLM_LISTS) <= set(lists) and {len(v) for v in lists.values()} == {4}
    assert lists["input_lens"] == [10, 10, 10, 0] and lists["output_lens"] == [3, 5, 1, 0]
    assert lists["ttfts"] == pytest.approx([0.1, 0.3, 0.1, 0.0]) and lists["errors"][3] == "HTTP 503: full"


def notes(samples, wanted=None, exact=True, use=ClientUse()):  # noqa: B008
    run = LoadRun(tuple(samples), 1.0, use)
    listed = wanted or prompts(len(samples))
    return remarks(summarise(run, listed), run, listed, exact_outputs=exact)


def test_a_good_run_needs_no_remark():
    assert notes([sample(i, 0.1 * i, 0.1, 0.01, 3) for i in range(4)]) == []


def test_counted_events_are_remarked_on():
    def good(place, **more):
        return sample(place, 0.0, 0.1, 0.01, 3, **more)

    assert notes([good(0, counted=True), good(1)]) == [
        "output tokens of 1 answers are counted events: the server sent no usage"
    ]
    assert notes([good(0, prompt_tokens=14), good(1, prompt_tokens=14)]) == [
        "the server counts +4 tokens in every prompt (a chat template, or a BOS token)"
    ]
    assert notes([good(0, prompt_tokens=9), good(1, prompt_tokens=12)]) == [
        "2 of 2 prompts have not the planned length: -1 to +2 tokens by the server's count"
    ]
    assert notes([good(0), sample(1, 0.0, 0.1, 0.01, 2)]) == [
        "1 of 2 answers are shorter than asked: the server does not heed ignore_eos"
    ]
    assert notes([sample(1, 0.0, 0.1, 0.01, 2)], exact=False) == []
    assert notes([good(0, events=(0.1, 0.12))]) == [
        "an event carries 1.5 tokens on average: read TPOT, since ITL is not per token"
    ]


def test_failures_are_remarked_on_by_their_reason():
    failed = [sample(i, 0.0, 0.1, 0.01, 3, error=f"reason {min(i, 11)}") for i in range(20)]
    found = notes(failed)
    assert found[0] == "9 failed: reason 11" and len(found) == 11 and found[-1].startswith("and 2 other errors")


def test_a_client_that_is_late_is_remarked_on():
    samples = [sample(i, 0.0, 0.1, 0.01, 3) for i in range(4)]
    late = [s._replace(sent=s.sent + 0.02, events=tuple(at + 0.02 for at in s.events)) for s in samples]
    (lag,) = notes(late)
    assert lag.startswith("the client was late: P99 of send lag is 20.0 ms (median TTFT 100.0 ms)")
    assert notes([s._replace(sent=s.sent + 0.004) for s in samples]) == []  # 4 ms change nothing
    (loop,) = notes(samples, use=ClientUse(0.1, 1.0, (0.009,) * 5))
    assert "off by 9.0 ms" in loop
    (busy,) = notes(samples, use=ClientUse(0.9, 1.0))
    assert "90% of a core" in busy
