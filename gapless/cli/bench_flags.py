"""The flags of `gapless bench serve`, under the spellings of `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gapless.base.config import check_fields, flag
from gapless.lab.target import ENDPOINTS

BACKENDS = {**{name: name for name in ENDPOINTS}, "vllm": "openai", "sglang-oai": "openai"}
BACKENDS |= {"vllm-chat": "openai-chat", "sglang-oai-chat": "openai-chat"}
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
"""The names that --dataset-name takes -> (data set, those defaults of Workload that differ for this name)."""
PRIORITIES = ("none", "nice", "rt")
_SERVER, _DATA, _TIMES, _BODY, _OUT = "Server", "Data set", "Arrivals", "Requests", "Results"


@dataclass(frozen=True)
class RequestFlags:
    """What every command that asks a server lets its user choose."""

    base_url: str | None = flag(None, "the server, such as http://localhost:8000", group=_SERVER)
    backend: str = flag("openai", "openai is /v1/completions", group=_SERVER, choices=tuple(BACKENDS))
    header: tuple[str, ...] = flag((), "KEY=VALUE, sent with each request", group=_SERVER)
    insecure: bool = flag(False, "do not check the server's certificate", group=_SERVER)
    temperature: float = flag(0.0, "0 is greedy", group=_BODY, aliases=("--temp",), low=0, high=2**31)
    extra_body: str | None = flag(None, "JSON object merged into each request, such as top_p", group=_BODY)
    out: str | None = flag(
        None,
        "write the result there as JSON; bench serve: a name in .jsonl gets one more line, a folder a new file; "
        "ab: OUT.md, OUT.json and OUT.html",
        group=_OUT,
        aliases=("-o", "--output", "--result-filename"),
    )
    disable_tqdm: bool = flag(False, "no progress", group=_OUT)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class BenchFlags(RequestFlags):
    """The load, and what is written of it. A length of None is the data set's own default."""

    port: int = flag(8000, "the port of a server on this machine, without --base-url", group=_SERVER, low=1, high=65535)
    endpoint: str | None = flag(None, "path of the API; default: by --backend", group=_SERVER)
    model: str | None = flag(None, "name of the model; default: the first that the server lists", group=_SERVER)
    tokenizer: str | None = flag(
        None, "directory of a tokenizer.json, or a name on the hub, for the lengths of prompts", group=_SERVER
    )
    ready_check_timeout_sec: float = flag(
        0.0, "how long to wait for the server to come up", group=_SERVER, low=0, high=10**6
    )

    dataset_name: str = flag("random", "what the prompts are", group=_DATA)
    dataset_path: str | None = flag(None, "file of custom, sharegpt and timed_trace", group=_DATA)
    num_prompts: int = flag(128, "requests to send; 0: each line of a file once", group=_DATA, low=0, high=2**31)
    seed: int = flag(0, "fixes prompts and arrivals", group=_DATA)
    input_len: int | None = flag(
        None,
        "tokens of a prompt; default: 1024, or as the data set has it",
        group=_DATA,
        aliases=(*("--random-input-len", "--prefix-repetition-suffix-len", "--gsp-question-len"),),
        low=1,
        high=2**31,
    )
    output_len: int | None = flag(
        None,
        "tokens of an answer; default: 128, or as the data set has it",
        group=_DATA,
        aliases=(
            *("--random-output-len", "--custom-output-len", "--sharegpt-output-len"),
            *("--prefix-repetition-output-len", "--gsp-output-len"),
        ),
        low=1,
        high=2**31,
    )
    range_ratio: float = flag(
        0.0, "lengths vary by this share, up and down", group=_DATA, aliases=("--random-range-ratio",), low=0, high=1
    )
    prefix_len: int | None = flag(
        None,
        "tokens that prompts begin with in common, on top of --input-len; default: 0, or as the data set has it",
        group=_DATA,
        aliases=(*("--random-prefix-len", "--prefix-repetition-prefix-len", "--gsp-system-prompt-len"),),
        low=0,
        high=2**31,
    )
    num_prefixes: int | None = flag(
        None,
        "number of shared prefixes in the data set shared_prefix; default: 64",
        group=_DATA,
        aliases=("--prefix-repetition-num-prefixes", "--gsp-num-groups"),
        low=1,
        high=2**31,
    )
    prefix_zipf: float | None = flag(
        None,
        "the k-th prefix has weight 1/k^zipf; 0: equal weights; default: 1",
        group=_DATA,
        low=0,
        high=100,
    )
    multi_turn_turns: int = flag(4, "questions of a conversation", group=_DATA, low=1, high=10**6)
    multi_turn_think_sec: float = flag(0.0, "from an answer to the next question", group=_DATA, low=0, high=10**6)
    timed_trace_chunk_hash_size: int = flag(512, "tokens that a hash id stands for", group=_DATA, low=1, high=2**31)
    timed_trace_sec_multiplier: float = flag(0.001, "seconds in a unit of a timestamp", group=_DATA, low=0, high=10**6)
    disable_shuffle: bool = flag(False, "take a file's prompts in their order", group=_DATA)

    request_rate: str | None = flag(
        None,
        "requests a second; inf: all at once; linear:1:20 or exponential:1:20: from 1 a second to 20; "
        "burst:16:2: 16 at once every 2 s; default: a closed loop, or a trace's own times",
        group=_TIMES,
    )
    burstiness: float = flag(
        1.0, "1 is Poisson, below 1 bursty, inf constant (gamma-distributed gaps)", group=_TIMES, low=0, high=math.inf
    )
    max_concurrency: int | None = flag(None, "requests under way at most", group=_TIMES, low=1, high=2**31)
    probe_request_rate: float = flag(
        0.0, "single-token requests a second beside the load, reported separately", group=_TIMES, low=0, high=10**6
    )
    num_warmups: int = flag(0, "requests sent first and not counted", group=_TIMES, low=0, high=2**31)

    ignore_eos: bool | None = flag(
        None, "answers of full length; default: where answers have a planned length", group=_BODY
    )

    goodput: tuple[str, ...] = flag((), "objectives in ms, such as ttft:200 tpot:20 e2el:2000", group=_OUT)
    percentile_metrics: str = flag("ttft,tpot,itl,e2el", "metrics to print", group=_OUT)
    metric_percentiles: str = flag("99", "percentiles of each, with commas between", group=_OUT)
    save_detailed: bool = flag(False, "--out has each request's times, lengths and texts too", group=_OUT)
    metadata: tuple[str, ...] = flag((), "KEY=VALUE, kept in the result", group=_OUT)
    client_priority: str = flag(
        "nice", "what this process asks of the scheduler, so as to read in time", group=_OUT, choices=PRIORITIES
    )
