"""The frozen lists of flags.txt: adding, renaming or dropping a flag is a decision, which is written down there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gapless.base.config import EngineConfig
from gapless.cli.ab import NOT_OURS
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.sampling import SamplingFlags
from gapless.cli.spec import specs
from gapless.lab.ab_plan import AbFlags
from gapless.lab.eval_run import EvalFlags
from gapless.lab.target import RequestFlags
from gapless.server.config import ServerConfig

TEXT = (Path(__file__).parent / "flags.txt").read_text()
LISTS = {name: flags.split("\n") for name, flags in re.findall(r"^\[(.*)\]\n((?:-.*\n)*-.*)", TEXT, re.MULTILINE)}


def listed(config: type) -> list[str]:
    return [" ".join([s.flag, *sorted(s.spellings[1:])]) for s in specs(config)]


@pytest.mark.parametrize(
    "name, record", [("engine", EngineConfig), ("server", ServerConfig), ("ab", AbFlags), ("sampling", SamplingFlags)]
)
def test_the_flags_of_a_record_are_those_listed(name: str, record: type) -> None:
    assert listed(record) == LISTS[name]


def test_bench_and_eval_flags_begin_with_those_of_every_request() -> None:
    assert listed(RequestFlags) == LISTS["request"]
    assert listed(BenchFlags) == LISTS["request"] + LISTS["bench"]
    assert listed(EvalFlags) == LISTS["request"] + LISTS["eval"]


def test_ab_has_its_own_flags_and_those_of_bench_that_it_does_not_refuse() -> None:
    load, own = {s.field for s in specs(BenchFlags)}, {s.field for s in specs(AbFlags)}
    assert load >= NOT_OURS and not own & (load - NOT_OURS)


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
