"""Flags, keyword arguments and methods of other engines, and what each comes to here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from gapless.base.errors import RequestError


class Fate(Enum):
    """Treatment of another engine's flag."""

    NOTHING = "changes nothing"
    SET = "is written"
    NEEDS = "needs"
    """Nothing where the field is set, else refused"""
    INSTEAD = "is not accepted"
    """Never needed, or written otherwise, as the text explains"""
    NOT_YET = "is not available in gapless yet"


class Foreign(NamedTuple):
    """A row of the table: flags of other engines, at some of their values."""

    fate: Fate
    names: tuple[str, ...]
    at: str
    """Values with spaces between; "" for a switch, * for any value, + for one or several, ~ and a pattern for a
    value that has it"""
    text: str
    """The reason, or what to write"""
    field: str = ""
    """Field that SET sets, with a dot before a part of JSON; `text` is the value, {} for the given one"""

    def __str__(self) -> str:
        values = {"": "", "*": " VALUE", "+": " VALUE ..."}.get(self.at, f" {'|'.join(self.at.split())}")
        if self.at.startswith("~"):
            values = f" VALUE with {self.at[1:]}"
        start, flag = f"{', '.join(self.names)}{values}", f"--{self.field.replace('_', '-')}"
        if self.fate is Fate.SET:
            return f"{start}: {self.fate.value} {flag} {self.text.replace('{}', 'VALUE')}"
        return f"{start}: {self.fate.value}{f' {flag}' * bool(self.field)}" + (f" ({self.text})" * bool(self.text))

    def takes(self, value: str | None) -> bool:
        if not self.at or value is None:
            return not self.at and value is None
        if self.at.startswith("~"):
            return re.search(self.at[1:], value) is not None
        return self.at in "*+" or value in self.at.split()


def _row(fate: Fate, names: str, at: str, text: str = "", field: str = "") -> Foreign:
    return Foreign(fate, tuple(names.split()), at, text, field)


def _nothing(names: str, at: str, text: str) -> tuple[Foreign, ...]:
    return (_row(Fate.NOTHING, names, at, text),)


def _only(names: str, at: str, text: str) -> tuple[Foreign, ...]:
    """Flags that change nothing at these values; what others ask for is not there yet."""
    return _row(Fate.NOTHING, names, at, text), _row(Fate.NOT_YET, names, "*", text)


def _not_yet(names: str, at: str, text: str = "") -> tuple[Foreign, ...]:
    return (_row(Fate.NOT_YET, names, at, text),)


def _instead(names: str, at: str, text: str) -> tuple[Foreign, ...]:
    return (_row(Fate.INSTEAD, names, at, text),)


def _set(names: str, at: str, field: str, value: str = "{}") -> tuple[Foreign, ...]:
    return (_row(Fate.SET, names, at, value, field),)


_NO_CODE = "no code of a checkpoint is ever run, and the families that are built in need none"
_ONE_DEVICE = "an engine has the ranks of --tensor-parallel-size, on one host"
_KERNELS = "kernels are chosen by the device and the sizes"
_SCHEDULER = "the scheduler chooses it; --max-num-batched-tokens and --max-itl bound a step"
_TEXT = "text alone is served"
_LOADING = "weights are read once, from safetensors files"
_DTYPE = "write --kv-cache-dtype: auto for the dtype of the weights, fp8, or k8v4 for values in 4 bits"
_GGUF = "single files are not fetched: --model takes a GGUF file that is here, or ORG/NAME of safetensors files"
_HOST_TIER = "write --kv-tier host:SIZE, such as host:8GiB"
_ROLES = "write --role prefill or --role decode with --kv-peer, or --pd 1p1d for a pair on this machine"
_ROPE = "write it into config.json, in a copy of the checkpoint"
_OUT = "name the file instead: --out FILE.json, FILE.jsonl to add a line, or FOLDER/"
_RAMP = "write --request-rate linear:START:END, or exponential:START:END"

TABLE: tuple[Foreign, ...] = (
    # Devices and processes
    *_only(
        "-pp --pipeline-parallel-size --pp-size "
        "-dpl --data-parallel-size-local -dcp --decode-context-parallel-size "
        "--prefill-context-parallel-size --attn-cp-size --moe-dense-tp-size --ep --ep-size --expert-parallel-size "
        "--nnodes",
        "1",
        _ONE_DEVICE,
    ),
    *_only("--node-rank --data-parallel-rank -mg --main-gpu --base-gpu-id", "0", _ONE_DEVICE),
    *_only("-sm --split-mode", "none", _ONE_DEVICE),
    *_only("--distributed-executor-backend", "mp uni", "the engine is a process of its own"),
    *_set("--tokenizer-worker-num", "*", "api_server_count"),
    *_not_yet(
        "--dist-init-addr --nccl-init-addr --master-addr --master-port --data-parallel-address "
        "--data-parallel-rpc-port --data-parallel-start-rank --data-parallel-backend -ts --tensor-split "
        "-ncmoe --n-cpu-moe",
        "*",
        _ONE_DEVICE,
    ),
    *_not_yet("--headless --enable-dp-attention -cmoe --cpu-moe", "", _ONE_DEVICE),
    *_nothing(
        "--enable-expert-parallel --disable-custom-all-reduce --enable-p2p-check --fully-sharded-loras "
        "--disable-frontend-multiprocessing",
        "",
        _ONE_DEVICE,
    ),
    *_set("-ngl --gpu-layers --n-gpu-layers", "0", "device", "cpu"),
    *_nothing("-ngl --gpu-layers --n-gpu-layers", "*", "all layers are on the device"),
    *_set("-t", "-1", "threads", "0"),
    *_set("-t", "*", "threads"),
    *_nothing(
        "-tb --threads-batch --threads-http --prio --poll --numa", "*", "--threads sets those of the compute stream"
    ),
    # The checkpoint
    *_nothing("--trust-remote-code", "", _NO_CODE),
    *_instead("--code-revision", "*", _NO_CODE),
    *_instead("--hf-token -hft", "*", "other users of this machine would see it; set HF_TOKEN in the environment"),
    *_instead("--offline", "", "set HF_HUB_OFFLINE=1 in the environment"),
    *_instead("-ctk --cache-type-k -ctv --cache-type-v", "*", _DTYPE),
    *_only("--tokenizer-mode", "auto hf fast slow", "the checkpoint's tokenizer.json is read"),
    *_only("--config-format", "auto hf", "the checkpoint's config.json is read"),
    *_instead("--hf-overrides --json-model-override-args --rope-scaling --rope-theta", "*", _ROPE),
    *_not_yet("--tokenizer-revision --hf-config-path", "*"),
    *_not_yet("--skip-tokenizer-init", "", "prompts may be token ids all the same"),
    *_nothing("--safetensors-load-strategy --model-loader-extra-config -lm --load-mode", "*", _LOADING),
    *_nothing("--max-parallel-loading-workers", "*", _LOADING),
    *_nothing("--use-tqdm-on-load --no-use-tqdm-on-load --no-mmap --mmap --mlock", "", _LOADING),
    *_not_yet("-hf -hfr --hf-repo -hff --hf-file -mu --model-url -md --model-draft -dr --docker-repo", "*", _GGUF),
    # What is served
    *_only("--task --runner", "auto generate", "text is generated"),
    *_only("--convert", "auto none", "text is generated"),
    *_not_yet("--is-embedding --embedding --embeddings --rerank --reranking", "", "text is generated"),
    *_not_yet("--pooling --pooler-config", "*", "text is generated"),
    *_nothing("--limit-mm-per-prompt", "+", _TEXT),
    *_nothing(
        "--mm-processor-cache-gb --mm-processor-cache-type --mm-processor-kwargs --mm-encoder-tp-mode "
        "--mm-encoder-attn-backend --media-io-kwargs --allowed-local-media-path --allowed-media-domains",
        "*",
        _TEXT,
    ),
    *_nothing("--language-model-only --no-mmproj --skip-mm-profiling --disable-chunked-mm-input", "", _TEXT),
    *_not_yet("--omni --enable-multimodal", "", _TEXT),
    *_not_yet("-mm --mmproj", "*", _TEXT),
    # Chat, tools, forms
    *_nothing("--enable-auto-tool-choice", "", "tools are always on; the chat template says how the model calls them"),
    *_nothing("--enable-reasoning", "", "reasoning is a field of its own wherever the chat template has it"),
    *_nothing("--jinja", "", "chat templates are always Jinja"),
    *_nothing("--chat-template-content-format", "*", "content may be a text or a list of parts"),
    *_only("--response-role", "assistant", "the role of answers is assistant"),
    *_set("--reasoning-format", "none", "reasoning_parser", "none"),
    *_nothing("--reasoning-format", "auto deepseek", "reasoning is a field of its own"),
    *_not_yet("--reasoning-format", "*", "it takes auto, deepseek or none"),
    *_not_yet("--tool-parser-plugin --reasoning-parser-plugin --tool-server --hf-chat-template-name", "*"),
    *_instead(
        "--structured-outputs-config --guided-decoding-backend",
        "~any.whitespace|additional_properties|in_reasoning|reasoning_parser",
        "it may say the backend alone: a request's structured_outputs has the rest, --reasoning-parser the parser",
    ),
    *_nothing(
        "--structured-outputs-config --guided-decoding-backend --grammar-backend",
        "*",
        "forms of output are always on, by one backend",
    ),
    *_only("--logprobs-mode", "raw_logprobs", "log-probabilities are those of the raw logits"),
    *_not_yet("--return-tokens-as-token-ids --enable-prompt-embeds", ""),
    *_nothing("--enable-custom-logit-processor", "", "--logits-processors names those that there are"),
    # Sampling where a request says nothing
    *_set("--temp --temperature", "*", "override_generation_config.temperature"),
    *_set("--top-k", "*", "override_generation_config.top_k"),
    *_set("--top-p", "*", "override_generation_config.top_p"),
    *_set("--min-p", "*", "override_generation_config.min_p"),
    *_set("--repeat-penalty", "*", "override_generation_config.repetition_penalty"),
    *_set("--presence-penalty", "*", "override_generation_config.presence_penalty"),
    *_set("--frequency-penalty", "*", "override_generation_config.frequency_penalty"),
    *_nothing(
        "-n --predict --n-predict",
        "-1",
        "chats go on to the context limit; without max_tokens /v1/completions ends after 16 tokens",
    ),
    *_set("-n --predict --n-predict", "*", "override_generation_config.max_new_tokens"),
    *_set("--preferred-sampling-params", "*", "override_generation_config"),
    *_only("--repeat-last-n", "-1", "penalties count all of a sequence"),
    *_nothing("--mirostat --dry-multiplier --xtc-probability", "0 0.0", "it is off"),
    *_not_yet("--mirostat --dry-multiplier --xtc-probability --samplers --sampler-seq --sampling-seq", "*"),
    *_nothing("--reasoning-budget", "-1", "reasoning is bounded by a request's thinking_token_budget alone"),
    *_instead("--reasoning-budget", "*", "a request says it, with thinking_token_budget"),
    *_nothing("--sampling-defaults", "model", "the model's generation_config.json holds"),
    *_set("--sampling-defaults", "openai", "generation_config", "vllm"),
    *_set("--chat-template-kwargs", "*", "default_chat_template_kwargs"),
    # Memory
    *_nothing(
        "--swap-space --preemption-mode", "*", "preempted requests are computed again, or loaded from a --kv-tier"
    ),
    *_only("--cpu-offload-gb", "0", "weights stay on the device"),
    *_instead(
        "--max-total-tokens",
        "*",
        "write --max-model-len for the longest sequence (TGI), or --kv-cache-memory-bytes for the KV cache (SGLang)",
    ),
    *_instead("--slot-save-path", "*", "write --kv-tier disk:PATH:SIZE below --kv-tier host:SIZE"),
    *_not_yet("--enable-sleep-mode --enable-memory-saver", "", "a server that has ended gives its memory back"),
    *_nothing("--prefix-caching-hash-algo --radix-eviction-policy", "*", "pages have one hash and one order"),
    *_nothing("--use-v2-block-manager --disable-hybrid-kv-cache-manager", "", "there is one manager of KV pages"),
    *_set("--disable-radix-cache", "", "enable_prefix_caching", "off"),
    *_nothing("-kvu --kv-unified", "", "all requests share the pages of the KV cache"),
    *_nothing(
        "-dt --defrag-thold --cache-reuse --ctx-checkpoints", "*", "pages need no order, and beginnings are found"
    ),
    *_nothing("-fit --fit", "*", "lengths and batches are chosen to fit the memory"),
    # Steps
    *_set("--async-scheduling", "", "depth", "auto"),
    *_set("--no-async-scheduling --disable-overlap-schedule", "", "depth", "1"),
    *_set("--disable-cuda-graph", "", "enforce_eager", "on"),
    *_set("--enable-deterministic-inference", "", "batch_invariant", "on"),
    *_nothing("--enable-chunked-prefill --enable-mixed-chunk", "", "chunked prefill is always on"),
    *_instead(
        "--no-enable-chunked-prefill",
        "",
        "chunked prefill cannot be turned off; raise --max-num-batched-tokens instead",
    ),
    *_nothing("-cb --cont-batching", "", "continuous batching is always on"),
    *_set("--batch-size", "*", "max_num_batched_tokens"),
    *_nothing(
        "-ub --ubatch-size --schedule-conservativeness --max-num-partial-prefills --max-long-partial-prefills "
        "--long-prefill-token-threshold --num-scheduler-steps --scheduler-delay-factor --num-continuous-decode-steps",
        "*",
        _SCHEDULER,
    ),
    *_instead(
        "--enable-priority-scheduling", "", "write --scheduling-policy priority, where a lower number comes first"
    ),
    *_nothing(
        "--attention-backend --attn-implementation --prefill-attention-backend --decode-attention-backend "
        "--sampling-backend --moe-backend --moe-runner-backend --linear-backend --mamba-backend --lora-backend "
        "--speculative-draft-attention-backend --speculative-attention-mode --attention-config --kernel-config "
        "-cc --compilation-config -O --optimization-level --torch-compile-max-bs --max-seq-len-to-capture",
        "*",
        _KERNELS,
    ),
    *_nothing(
        "-O0 -O1 -O2 -O3 --enable-torch-compile --disable-cascade-attn --enable-flashinfer-autotune "
        "--disable-shared-experts-fusion --disable-piecewise-cuda-graph -fa --flash-attn",
        "",
        _KERNELS,
    ),
    *_nothing("-fa --flash-attn", "on off auto 0 1", _KERNELS),
    *_nothing(
        "--cudagraph-capture-sizes --cuda-graph-sizes --cuda-graph-bs --cuda-graphs",
        "+",
        "graphs have sizes that are chosen; --max-cudagraph-capture-size bounds them",
    ),
    *_set("--watchdog-timeout", "*", "watchdog_seconds"),
    *_nothing("--skip-server-warmup --no-warmup --warmup", "", "a start makes no request"),
    # Adapters
    *_nothing("--enable-lora", "", "adapters are served as soon as --lora-modules or --lora-dir names some"),
    *_set("--max-loras-per-batch", "*", "max_loras"),
    *_set("--lora-paths", "+", "lora_modules"),
    *_instead("--lora --lora-scaled", "*", "write --lora-modules NAME=DIRECTORY"),
    *_nothing("--max-cpu-loras --max-loaded-loras", "*", "all adapters that are named are loaded"),
    *_nothing("--lora-target-modules", "+", "adapters say it themselves"),
    *_only("--lora-dtype", "auto", "adapters have the dtype of the model"),
    # KV beyond the device
    *_set("--kv-offloading-size", "*", "kv_tiers", "host:{}GiB"),
    *_nothing("--kv-offloading-backend", "native", "host memory is a tier of its own"),
    *_instead("--kv-offloading-backend", "*", "write --kv-tier lmcache://HOST:PORT"),
    *_nothing("--hicache-size", "0", "the host's tier has a size that is given"),
    *_set("--hicache-size", "*", "kv_tiers", "host:{}GB"),
    *(_row(Fate.NEEDS, "--enable-hierarchical-cache", "", _HOST_TIER, "kv_tiers"),),
    *(_row(Fate.NEEDS, "--hicache-ratio", "*", _HOST_TIER, "kv_tiers"),),
    *_nothing(
        "--hicache-write-policy --hicache-mem-layout --hicache-io-backend --hicache-storage-prefetch-policy",
        "*",
        "a tier chooses it",
    ),
    *_instead(
        "--hicache-storage-backend",
        "*",
        "write --kv-tier disk:PATH:SIZE, mooncake://HOST:PORT, lmcache://HOST:PORT or nixl://BUCKET, "
        "below --kv-tier host:SIZE",
    ),
    *_nothing("-cram --cache-ram", "0", "host memory is used with --kv-tier alone"),
    *_set("-cram --cache-ram", "*", "kv_tiers", "host:{}MiB"),
    *_instead("--kv-transfer-config", "*", f"{_HOST_TIER}, for KV in host memory; for prefill apart, {_ROLES}"),
    *_nothing("--disaggregation-mode", "null", "prompts are computed where answers are"),
    *_instead(
        "--disaggregation-mode --disaggregation-transfer-backend --disaggregation-ib-device "
        "--disaggregation-bootstrap-port",
        "*",
        _ROLES,
    ),
    # Speculation
    *_set("--spec-method", "*", "speculative_config.method"),
    *_set("--speculative-algorithm", "EAGLE3 eagle3", "speculative_config.method", "eagle3"),
    *_set("--speculative-algorithm", "STANDALONE standalone", "speculative_config.method", "draft_model"),
    *_set("--speculative-algorithm", "NGRAM ngram", "speculative_config.method", "ngram"),
    *_set("--speculative-algorithm", "NEXTN nextn EAGLE eagle", "speculative_config.method", "mtp"),
    *_not_yet("--speculative-algorithm", "*", "there are EAGLE3, STANDALONE, NGRAM and NEXTN"),
    *_set(
        "--spec-model --speculative-model --speculative-draft-model-path --speculative-draft-model",
        "*",
        "speculative_config.model",
    ),
    *_set(
        "--spec-tokens --num-speculative-tokens --speculative-num-steps",
        "*",
        "speculative_config.num_speculative_tokens",
    ),
    *_set("--ngram-prompt-lookup-max", "*", "speculative_config.prompt_lookup_max"),
    *_set("--ngram-prompt-lookup-min", "*", "speculative_config.prompt_lookup_min"),
    *_nothing(
        "--speculative-eagle-topk --speculative-num-draft-tokens",
        "*",
        "drafts are a chain, and --speculative-config says how long",
    ),
    *_not_yet("--speculative-token-map --speculative-draft-model-revision", "*"),
    # The server
    *_set("--admin-api-key", "*", "operator_key"),
    *_set("--fastapi-root-path --api-prefix", "*", "root_path"),
    *_set("--ssl-key-file", "*", "ssl_keyfile"),
    *_set("--ssl-cert-file", "*", "ssl_certfile"),
    *_set("--cors-origins", "*", "allowed_origins"),
    *_only("--allowed-methods --allowed-headers", '["*"] *', "all methods and headers are allowed"),
    *_not_yet("--allow-credentials", ""),
    *_instead("--api-key-file", "*", "set GAPLESS_API_KEY in the environment"),
    *_set("-v --verbose", "", "log_level", "debug"),
    *_set("-s", "*", "seed"),
    *_nothing("--disable-log-requests", "", "requests are logged with --enable-log-requests alone"),
    *_nothing("--uvicorn-log-level --log-level-http --log-requests-level", "*", "--log-level says how much is logged"),
    *_nothing("--decode-log-interval", "*", "a line of statistics comes every 10 s"),
    *_nothing("--enable-metrics --metrics", "", "/metrics is always on"),
    *_nothing("--props --slots --no-slots", "", "/server_info and /debug show it to operators"),
    *_nothing("--enable-tokenizer-info-endpoint", "", "/tokenizer_info is there for operators"),
    *_nothing("--enable-trace", "", "traces go to --otlp-traces-endpoint"),
    *_nothing("-to --timeout", "*", "--request-timeout bounds a request"),
    *_nothing("--webui --ui", "", "the page is at /ui"),
    *_not_yet("--no-webui --no-ui", "", "its data is for operators: see --operator-key"),
    *_nothing("--no-context-shift", "", "an answer ends where the context does"),
    *_not_yet("--context-shift", "", "an answer ends where the context does"),
    *_instead("--profiler-config", "*", "gapless trace record URL writes the timeline of a server that runs"),
    *_not_yet("--middleware", "+"),
    *_not_yet("--grpc --grpc-mode", ""),
    # vllm bench serve
    *_instead("--save-result --append-result", "", _OUT),
    *_instead("--result-dir", "*", _OUT),
    *_instead("--ramp-up-strategy --ramp-up-start-rps --ramp-up-end-rps", "*", _RAMP),
    *_instead("--burst-size --burst-interval", "*", "write --request-rate burst:SIZE:SECONDS"),
    *_instead("--data-seed", "*", "write --data demo:SEED"),
    *_instead("--no-oversample", "", "write --num-prompts 0"),
    # Keyword arguments of LLM that are flags of a server alone
    *_nothing("--disable-log-stats", "", "LLM logs no statistics"),
    *_nothing("--served-model-name", "+", "LLM has no clients that name the model"),
)
"""The first row that names a flag and takes its value holds. A flag that a command has is not looked up here."""

VALUES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"},
    "model_impl": {"vllm": "native", "sglang": "native"},
    "load_format": {"hf": "auto", "fastsafetensors": "safetensors"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "max_model_len": {"0": "auto"},
    "max_num_seqs": {"-1": "0"},
    "threads": {"-1": "0"},
    "log_level": {"warn": "warning", "critical": "error"},
}
"""Values of our own fields as other engines write them"""

_FORMS = "guided_decoding guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf structural_tag"
_FORM = "StructuredOutputs(json=..., regex=..., choice=... or grammar=...)"
SAMPLING: dict[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((None, 1), "ask for n answers, and choose among them"),
    **dict.fromkeys(_FORMS.split(), ((None,), f"write structured_outputs={_FORM}")),
    "max_new_tokens": ((), "write max_tokens"),
    "min_new_tokens": ((), "write min_tokens"),
    "do_sample": ((True,), "write temperature=0 for the most likely tokens"),
    "use_beam_search": ((None, False), "there is no beam search yet"),
    "length_penalty": ((None, 1.0), "there is no beam search yet"),
    "early_stopping": ((None, False), "there is no beam search yet"),
    "spaces_between_special_tokens": ((None, True), "special tokens stand as the tokenizer writes them"),
    "flat_logprobs": ((None, False), "log-probabilities are one dict a token"),
    # vLLM's RequestOutputKind: cumulative, and the end alone
    "output_kind": ((None, 0, 2), "an output has all of the text so far: cut off what was there before"),
    "skip_reading_prefix_cache": ((None, False), "the prefix cache is there for all requests, or for none"),
    "logprob_token_ids": ((None,), "logprobs are those of the most likely tokens"),
    "repetition_detection": ((None,), "write repetition_penalty or frequency_penalty"),
}
"""Sampling parameters of other engines -> (values that change nothing, what to do otherwise)"""
UNUSED_SAMPLING = frozenset({"skip_clone"})
"""Parameters that change nothing at any value"""

METHODS = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), "there are no embeddings or scores yet"),
    "beam_search": "there is no beam search yet: n samples are, with SamplingParams(n=...)",
    **dict.fromkeys(("sleep", "wake_up"), "there is no sleep yet: close() gives the memory back"),
    "get_metrics": "stats() has the engine's numbers",
    **dict.fromkeys(("start_profile", "stop_profile"), "recording() always has the timeline of the last steps"),
    "llm_engine": "info says what the engine is, stats() what it does",
    **dict.fromkeys(("collective_rpc", "apply_model"), "the model runs in this process alone"),
}
"""Methods of LLM in other engines -> what there is here"""


def drop_default(name: str, value: object, known: Iterable[str]) -> bool:
    """True for a sampling parameter of another engine that changes nothing at this value.

    Raises RequestError for any other value, and for an unknown name.
    """
    value = value.value if isinstance(value, Enum) else value
    if name in UNUSED_SAMPLING or (name in SAMPLING and value in SAMPLING[name][0]):
        return True
    if name in SAMPLING:
        raise RequestError(f"{name} is not accepted: {SAMPLING[name][1]}", name)
    listed = did_you_mean(name, known) or f"; known: {', '.join(sorted(known))}"
    raise RequestError(f"unknown sampling parameter {name!r}{listed}", name)


_BY_NAME: dict[str, list[Foreign]] = {}
for _one in TABLE:
    for _name in _one.names:
        _BY_NAME.setdefault(_name, []).append(_one)


def rows_of(name: str) -> list[Foreign]:
    """The rows of a flag of another engine, such as --tp; none where it is not known. The --no- form of a switch that
    has no row of its own changes nothing."""
    if name in _BY_NAME or not name.startswith("--no-"):
        return _BY_NAME.get(name, [])
    on = next((row for row in _BY_NAME.get(f"--{name[5:]}", ()) if not row.at), None)
    return [_row(Fate.NOTHING, name, "", on.text if on.fate is Fate.NOTHING else "it is off")] if on else []


def foreign(name: str, value: str | None) -> Foreign | None:
    """The flag's row for this value; None for a switch without one."""
    return next((row for row in rows_of(name) if row.takes(value)), None)


def foreign_names() -> Iterable[str]:
    return _BY_NAME


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, if one is near; leading dashes, and `enable-`, make nothing alike."""
    import difflib  # needed for mistakes alone

    word = word.lstrip("-")
    start = next((start for start in ("enable-", "disable-") if word.startswith(start)), "")
    bare = {name.lstrip("-").removeprefix(start): name for name in known}
    found = difflib.get_close_matches(word.removeprefix(start), bare, n=1, cutoff=0.75)
    return bare[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""
