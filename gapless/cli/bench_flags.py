"""The flags of `gapless bench serve`, under the spellings of `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from gapless.base.config import flag
from gapless.lab.target import RequestFlags, request_flag, result_flag, server_flag

_TRACE: tuple[str, dict[str, Any]] = ("timed_trace", {})
_SHARED: tuple[str, dict[str, Any]] = (
    "shared_prefix",
    {"prefixes": 64, "prefix_len": 2048, "input_len": 128, "output_len": 256, "zipf": 1.0},
)
DATA_SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "random": ("random", {}),
    "shared_prefix": _SHARED,
    "generated_shared_prefix": _SHARED,
    "prefix_repetition": ("shared_prefix", {"prefixes": 10, "prefix_len": 256, "input_len": 256, "zipf": 0.0}),
    "multi_turn": ("multi_turn", {}),
    "custom": ("custom", {"output_len": 256}),
    "sharegpt": ("sharegpt", {"output_len": 0}),
    "timed_trace": _TRACE,
    "mooncake": _TRACE,
    "trace": _TRACE,
}
"""The names that --dataset-name takes -> (data set, defaults of Workload that differ for this name)."""
_data, _times = (partial(flag, group=group) for group in ("Data set", "Arrivals"))


@dataclass(frozen=True)
class BenchFlags(RequestFlags):
    """The load, and the files written of it. A length of None is the data set's own default."""

    port: int = server_flag(8000, "the port of a server on this machine, without --base-url", low=1, high=65535)
    endpoint: str | None = server_flag(None, "path of the API; default: by --backend")
    model: str | None = server_flag(
        None, "name of the model; default: the first that the server lists", aliases=("--served-model-name",)
    )
    tokenizer: str | None = server_flag(
        None, "directory of a tokenizer.json, or a name on the hub, for the lengths of prompts"
    )
    ready_check_timeout_sec: float = server_flag(0.0, "how long to wait for the server to come up", low=0, high=10**6)

    dataset_name: str = _data("random", "what the prompts are")
    dataset_path: str | None = _data(None, "file of custom, sharegpt and timed_trace")
    num_prompts: int = _data(128, "requests to send; 0: each line of a file once", low=0, high=2**31)
    seed: int = _data(0, "fixes prompts and arrivals")
    input_len: int | None = _data(
        None,
        "tokens of a prompt; default: 1024, or as the data set has it",
        aliases=("--random-input-len", "--prefix-repetition-suffix-len", "--gsp-question-len"),
        low=1,
        high=2**31,
    )
    output_len: int | None = _data(
        None,
        "tokens of an answer; default: 128, or as the data set has it",
        aliases=(
            "--random-output-len",
            "--custom-output-len",
            "--sharegpt-output-len",
            "--prefix-repetition-output-len",
            "--gsp-output-len",
        ),
        low=1,
        high=2**31,
    )
    range_ratio: float = _data(
        0.0, "lengths vary by this share, up and down", aliases=("--random-range-ratio",), low=0, high=1
    )
    prefix_len: int | None = _data(
        None,
        "tokens that prompts begin with in common, on top of --input-len; default: 0, or as the data set has it",
        aliases=("--random-prefix-len", "--prefix-repetition-prefix-len", "--gsp-system-prompt-len"),
        low=0,
        high=2**31,
    )
    num_prefixes: int | None = _data(
        None,
        "number of shared prefixes in the data set shared_prefix; default: 64",
        aliases=("--prefix-repetition-num-prefixes", "--gsp-num-groups"),
        low=1,
        high=2**31,
    )
    prefix_zipf: float | None = _data(
        None, "the k-th prefix has weight 1/k^zipf; 0: equal weights; default: 1", low=0, high=100
    )
    multi_turn_turns: int = _data(4, "questions of a conversation", low=1, high=10**6)
    multi_turn_think_sec: float = _data(0.0, "from an answer to the next question", low=0, high=10**6)
    timed_trace_chunk_hash_size: int = _data(512, "tokens that a hash id stands for", low=1, high=2**31)
    timed_trace_sec_multiplier: float = _data(0.001, "seconds in a unit of a timestamp", low=0, high=10**6)
    disable_shuffle: bool = _data(False, "take a file's prompts in their order")

    request_rate: str | None = _times(
        None,
        "requests a second; inf: all at once; linear:1:20 or exponential:1:20: from 1 a second to 20; "
        "burst:16:2: 16 at once every 2 s; default: a closed loop, or a trace's own times",
    )
    burstiness: float = _times(
        1.0, "1 is Poisson, below 1 bursty, inf constant (gamma-distributed gaps)", low=0, high=math.inf
    )
    max_concurrency: int | None = _times(None, "requests under way at most", low=1, high=2**31)
    probe_request_rate: float = _times(
        0.0, "single-token requests a second beside the load, reported separately", low=0, high=10**6
    )
    num_warmups: int = _times(0, "requests sent first and not counted", low=0, high=2**31)

    ignore_eos: bool | None = request_flag(None, "answers of full length; default: if answers have a planned length")

    goodput: tuple[str, ...] = result_flag((), "objectives in ms, such as ttft:200 tpot:20 e2el:2000")
    percentile_metrics: str = result_flag("ttft,tpot,itl,e2el", "metrics to print")
    metric_percentiles: str = result_flag("99", "percentiles of each, with commas between")
    save_detailed: bool = result_flag(False, "--out has each request's times, lengths and texts too")
    metadata: tuple[str, ...] = result_flag((), "KEY=VALUE, kept in the result")
    client_priority: str = result_flag(
        "nice", "what this process asks of the scheduler, so as to read in time", choices=("none", "nice", "rt")
    )
