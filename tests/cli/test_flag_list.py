"""The frozen list: adding, renaming or dropping a flag is a decision, and this is where it is written down."""

from __future__ import annotations

from gapless.base.config import EngineConfig
from gapless.cli.ab import NOT_OURS
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.sampling import SamplingFlags
from gapless.cli.spec import specs
from gapless.lab.ab_plan import AbFlags
from gapless.lab.eval_run import EvalFlags
from gapless.lab.target import RequestFlags
from gapless.server.config import ServerConfig

ENGINE = """
--model --model-id --model-path -m
--tokenizer --tokenizer-path
--revision
--download-dir
--dtype
--load-format
--weights-dir
--max-model-len --context-length --ctx-size -c
--seed --random-seed
--generation-config
--override-generation-config
--chat-template --chat-template-file
--device
--threads
--gpu-memory-utilization --cuda-memory-fraction --device-memory-utilization --mem-fraction-static
--kv-cache-memory-bytes
--max-num-seqs --max-concurrent-requests --max-running-requests --parallel -np
--max-adjusted-seqs
--max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens -b
--max-itl
--block-size --cb-block-size --page-size
--num-gpu-blocks-override --cb-num-blocks
--enable-prefix-caching --cache-prompt
--kv-tiers --kv-tier
--role
--kv-peers --kv-peer
--kv-peer-listen
--kv-peer-key-file
--kv-peer-ssl-certfile
--kv-peer-ssl-keyfile
--kv-peer-ssl-ca-certs
--scheduling-policy --schedule-policy
--max-num-queued-reqs --max-queued-requests
--depth
--enforce-eager
--batch-invariant
--max-cudagraph-capture-size --cuda-graph-max-bs
--lora-modules
--lora-dir
--max-loras
--max-lora-rank
--speculative-config -sc
--logits-processors --logits-processor
--watchdog-seconds
"""
SERVER = """
--host --hostname
--port -p
--uds
--api-key
--operator-key
--allowed-origins
--served-model-name --alias -a
--root-path
--ssl-keyfile
--ssl-certfile
--ssl-ca-certs
--ssl-cert-reqs
--max-body-bytes
--drain-seconds
--request-timeout
--pd
--log-level
--log-format
--disable-log-stats
--enable-log-requests --log-requests
--disable-uvicorn-access-log
--disable-access-log-for-endpoints
--otlp-traces-endpoint
--kv-events-config
--enable-force-include-usage --stream-response-default-include-usage
--enable-prompt-tokens-details --enable-cache-report
--max-logprobs
--stream-interval
--sse-ping-interval
--default-chat-template-kwargs
--enable-request-id-headers
--tool-call-parser
--reasoning-parser
"""
AB = """
--a-url
--b-url
--restart
--runs -n
--order
--warmup-runs
--stop-early
--quiet
--quiet-wait
--pause
--metrics
--test
--alpha
--fail-if
--read
"""
SAMPLING = """
--max-tokens --max-new-tokens -n
--temperature --temp
--top-p
--top-k
--stop
"""
REQUEST = """
--base-url --url
--backend
--header
--insecure
--temperature --temp
--extra-body
--out --output --result-filename -o
--disable-tqdm
"""
BENCH = """
--port
--endpoint
--model --served-model-name
--tokenizer
--ready-check-timeout-sec
--dataset-name
--dataset-path
--num-prompts
--seed
--input-len --gsp-question-len --prefix-repetition-suffix-len --random-input-len
--output-len --custom-output-len --gsp-output-len --prefix-repetition-output-len --random-output-len --sharegpt-output-len
--range-ratio --random-range-ratio
--prefix-len --gsp-system-prompt-len --prefix-repetition-prefix-len --random-prefix-len
--num-prefixes --gsp-num-groups --prefix-repetition-num-prefixes
--prefix-zipf
--multi-turn-turns
--multi-turn-think-sec
--timed-trace-chunk-hash-size
--timed-trace-sec-multiplier
--disable-shuffle
--request-rate
--burstiness
--max-concurrency
--probe-request-rate
--num-warmups
--ignore-eos
--goodput
--percentile-metrics
--metric-percentiles
--save-detailed
--metadata
--client-priority
"""  # noqa: E501
EVAL = """
--concurrency --max-concurrency
--data --dataset-path
--num-questions --limit
--shots --num-fewshot
--shots-file
--shots-as-turns --fewshot-as-multiturn
--max-tokens --max-gen-toks --max-new-tokens
--match
--min-accuracy
"""


def listed(config: type) -> list[str]:
    return [" ".join([s.flag, *sorted(s.spellings[1:])]) for s in specs(config)]


def test_the_flags_of_engines_are_those_listed() -> None:
    assert listed(EngineConfig) == ENGINE.split("\n")[1:-1]


def test_the_flags_of_servers_are_those_listed() -> None:
    assert listed(ServerConfig) == SERVER.split("\n")[1:-1]


def test_the_flags_of_ab_are_those_listed() -> None:
    assert listed(AbFlags) == AB.split("\n")[1:-1]
    load, own = {s.field for s in specs(BenchFlags)}, {s.field for s in specs(AbFlags)}
    assert load >= NOT_OURS and not own & (load - NOT_OURS)


def test_the_flags_of_sampling_are_those_listed() -> None:
    assert listed(SamplingFlags) == SAMPLING.split("\n")[1:-1]


def test_bench_and_eval_flags_begin_with_those_of_every_request() -> None:
    assert listed(RequestFlags) == REQUEST.split("\n")[1:-1]
    assert listed(BenchFlags) == listed(RequestFlags) + BENCH.split("\n")[1:-1]
    assert listed(EvalFlags) == listed(RequestFlags) + EVAL.split("\n")[1:-1]


def test_the_number_of_flags_stays_small() -> None:
    """40, and thirty-seven whose job no other flag has: --batch-invariant asks for the same bits in every batch, which
    few will pay for; --revision and --download-dir say which commit of a model on the hub, and which disk it goes to;
    --max-adjusted-seqs bounds memory that other engines give to every row; --operator-key is for routes that are not
    the users'; --tool-call-parser and --reasoning-parser are for models whose templates do not say; --lora-modules,
    --max-loras and --max-lora-rank say which adapters there are and bound the memory for them, --lora-dir whether more
    may come, and from where; --speculative-config is all of speculation;
    --logits-processors names code of the operator's, which no request may; --kv-tiers is all of KV beyond the device;
    --kv-events-config is all of what routers hear, as vLLM spells it.
    --role, --kv-peers, --kv-peer-listen and --kv-peer-key-file say who gives whom KV pages, --pd starts a pair of them;
    --kv-peer-ssl-certfile, --kv-peer-ssl-keyfile and --kv-peer-ssl-ca-certs are the files of TLS between machines.
    --weights-dir says whether operators may bring other weights, and from where.
    --max-itl bounds a time, which --max-num-batched-tokens would have to be tried out for on each machine and model.
    Twelve are what operators of vLLM set for their proxies and clients, spelled as there: --root-path and four of TLS,
    the defaults of sampling (two) and of templates, --max-logprobs, --stream-interval, and one about access lines;
    --sse-ping-interval is llama.cpp's.
    """
    assert len(specs(EngineConfig)) + len(specs(ServerConfig)) <= 77
    records = (EngineConfig, ServerConfig, SamplingFlags, AbFlags, BenchFlags, EvalFlags)
    assert sum(len(specs(record)) for record in records) - len(specs(RequestFlags)) <= 146
    assert len(specs(BenchFlags)) <= 40
