"""The flags of `gapless bench serve`, under the spellings of `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gapless.base.config import check_fields, flag
from gapless.lab.arrivals import RAMPS
from gapless.lab.target import ENDPOINTS
from gapless.lab.workload import DATASETS

BACKENDS = {**{name: name for name in ENDPOINTS}, "vllm": "openai", "sglang-oai": "openai"}
BACKENDS |= {"vllm-chat": "openai-chat", "sglang-oai-chat": "openai-chat"}
DATASET_NAMES = {name: name for name in DATASETS} | {
    **{"mooncake": "timed_trace", "trace": "timed_trace", "generated_shared_prefix": "shared_prefix"},
}
PRIORITIES = ("none", "nice", "rt")
_SERVER, _DATA, _TIMES, _BODY, _OUT = "Server", "Data set", "Arrivals", "Requests", "Results"


@dataclass(frozen=True)
class BenchFlags:
    """What was not given and has no default here is decided when the server has been asked."""

    backend: str = flag("openai", "openai is /v1/completions", group=_SERVER, choices=tuple(BACKENDS))
    base_url: str | None = flag(None, "such as http://localhost:8000; instead of host and port", group=_SERVER)
    host: str = flag("127.0.0.1", "the server's address", group=_SERVER)
    port: int = flag(8000, "the server's port", group=_SERVER, low=1, high=65535)
    endpoint: str | None = flag(None, "path of the API; default: by --backend", group=_SERVER)
    model: str | None = flag(None, "name of the model; default: the first that the server lists", group=_SERVER)
    served_model_name: str | None = flag(None, "its name in requests, where --model is a directory", group=_SERVER)
    tokenizer: str | None = flag(
        None, "directory of a tokenizer.json, or a name on the hub, for the lengths of prompts", group=_SERVER
    )
    vocab_size: int | None = flag(None, "prompts are token ids below this; default: as the server says", group=_SERVER)
    header: tuple[str, ...] = flag((), "KEY=VALUE, sent with each request", group=_SERVER)
    insecure: bool = flag(False, "do not check the server's certificate", group=_SERVER)
    ready_check_timeout_sec: float = flag(
        0.0, "wait so long for the server to come up", group=_SERVER, low=0, high=10**6
    )

    dataset_name: str = flag("random", "what the prompts are", group=_DATA)
    dataset_path: str | None = flag(None, "file of custom, sharegpt and timed_trace", group=_DATA)
    num_prompts: int = flag(128, "requests to send", group=_DATA, low=1, high=2**31)
    seed: int = flag(0, "fixes prompts and arrivals", group=_DATA)
    input_len: int | None = flag(None, "the same as --random-input-len", group=_DATA, low=1, high=2**31)
    output_len: int | None = flag(None, "tokens of each answer, for any data set", group=_DATA, low=1, high=2**31)
    random_input_len: int | None = flag(None, "tokens of a prompt; default: 1024", group=_DATA, low=1, high=2**31)
    random_output_len: int | None = flag(None, "tokens of an answer; default: 128", group=_DATA, low=1, high=2**31)
    random_range_ratio: float = flag(0.0, "lengths vary by this share, up and down", group=_DATA, low=0, high=1)
    random_prefix_len: int = flag(0, "tokens that all prompts begin with, on top", group=_DATA, low=0, high=2**31)
    prefix_repetition_prefix_len: int = flag(256, "tokens of a shared beginning", group=_DATA, low=0, high=2**31)
    prefix_repetition_suffix_len: int = flag(256, "tokens of an end of its own", group=_DATA, low=1, high=2**31)
    prefix_repetition_num_prefixes: int = flag(10, "how many beginnings", group=_DATA, low=1, high=2**31)
    prefix_repetition_output_len: int = flag(128, "tokens of an answer", group=_DATA, low=1, high=2**31)
    shared_prefix_num_groups: int = flag(
        64, "how many system prompts", group=_DATA, aliases=("--gsp-num-groups",), low=1, high=2**31
    )
    shared_prefix_len: int = flag(
        2048, "tokens of a system prompt", group=_DATA, aliases=("--gsp-system-prompt-len",), low=0, high=2**31
    )
    shared_prefix_question_len: int = flag(
        128, "tokens of a question", group=_DATA, aliases=("--gsp-question-len",), low=1, high=2**31
    )
    shared_prefix_output_len: int = flag(
        256, "tokens of an answer", group=_DATA, aliases=("--gsp-output-len",), low=1, high=2**31
    )
    shared_prefix_zipf: float = flag(
        1.0, "the k-th system prompt has weight 1/k^zipf; 0: all alike", group=_DATA, low=0, high=100
    )
    multi_turn_turns: int = flag(4, "questions of a conversation", group=_DATA, low=1, high=10**6)
    multi_turn_think_sec: float = flag(0.0, "from an answer to the next question", group=_DATA, low=0, high=10**6)
    burst_size: int = flag(16, "requests that come at once", group=_DATA, low=1, high=2**31)
    burst_interval: float = flag(2.0, "seconds between bursts", group=_DATA, low=0, high=10**6)
    custom_output_len: int = flag(
        256, "tokens of an answer where the line does not say; -1: only lines that do", group=_DATA, low=-1, high=2**31
    )
    sharegpt_output_len: int | None = flag(
        None, "tokens of an answer; default: about as in the file", group=_DATA, low=1, high=2**31
    )
    timed_trace_chunk_hash_size: int = flag(512, "tokens that a hash id stands for", group=_DATA, low=1, high=2**31)
    timed_trace_sec_multiplier: float = flag(0.001, "seconds in a unit of a timestamp", group=_DATA, low=0, high=10**6)
    self_timed: bool = flag(True, "replay a trace at its own times", group=_DATA)
    disable_shuffle: bool = flag(False, "take a file's prompts in their order", group=_DATA)
    no_oversample: bool = flag(False, "do not take a file's prompts twice", group=_DATA)

    request_rate: float | None = flag(
        None, "requests a second; inf sends all at once; default: a closed loop", group=_TIMES, low=0, high=math.inf
    )
    burstiness: float = flag(
        1.0, "1 is Poisson, below 1 bursty, inf constant (gamma-distributed gaps)", group=_TIMES, low=0, high=math.inf
    )
    max_concurrency: int | None = flag(None, "requests under way at most", group=_TIMES, low=1, high=2**31)
    ramp_up_strategy: str | None = flag(None, "the rate changes over the run", group=_TIMES, choices=RAMPS)
    ramp_up_start_rps: float | None = flag(None, "requests a second at first", group=_TIMES, low=0, high=10**9)
    ramp_up_end_rps: float | None = flag(None, "requests a second at last", group=_TIMES, low=0, high=10**9)
    probe_request_rate: float = flag(
        0.0, "single-token requests a second beside the load, told by themselves", group=_TIMES, low=0, high=10**6
    )
    num_warmups: int = flag(0, "requests before, not counted", group=_TIMES, low=0, high=2**31)

    temperature: float = flag(0.0, "0 is greedy", group=_BODY, aliases=("--temp",), low=0, high=2**31)
    top_p: float | None = flag(None, "left to the server", group=_BODY, low=0, high=1)
    top_k: int | None = flag(None, "left to the server", group=_BODY, low=-1, high=2**31)
    min_p: float | None = flag(None, "left to the server", group=_BODY, low=0, high=1)
    ignore_eos: bool | None = flag(
        None, "answers of full length; default: where answers have a planned length", group=_BODY
    )
    extra_body: str | None = flag(None, "JSON object merged into each request", group=_BODY)
    profile: bool = flag(False, "call /start_profile and /stop_profile around the run", group=_BODY)

    goodput: tuple[str, ...] = flag((), "objectives in ms, such as ttft:200 tpot:20 e2el:2000", group=_OUT)
    percentile_metrics: str = flag("ttft,tpot,itl,e2el", "metrics to print", group=_OUT)
    metric_percentiles: str = flag("99", "percentiles of each, with commas between", group=_OUT)
    save_result: bool = flag(False, "write the result as JSON", group=_OUT)
    save_detailed: bool = flag(False, "the same with a list of each request's times, lengths and texts", group=_OUT)
    append_result: bool = flag(False, "the same, added to the file as a line", group=_OUT)
    result_filename: str | None = flag(None, "write it there; default: made of label, rate, model and date", group=_OUT)
    result_dir: str | None = flag(None, "folder of the result", group=_OUT)
    metadata: tuple[str, ...] = flag((), "KEY=VALUE, kept in the result", group=_OUT)
    label: str | None = flag(None, "kept in the result; its name begins with it, else with the backend", group=_OUT)
    disable_tqdm: bool = flag(False, "no progress", group=_OUT)
    client_priority: str = flag(
        "nice", "what this process asks of the scheduler, so as to read in time", group=_OUT, choices=PRIORITIES
    )

    def __post_init__(self) -> None:
        check_fields(self)
