"""The demo model with a host tier: what the device has given up is loaded, and tokens stay the same."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from certificates import Authority, needs_openssl
from fake_resp import free_port

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.engine.wiring import build_core
from gapless.offload.tiers.disk import DISK_BLOCK, LOG, RECORD_BYTES, describe

LONG = "The quick brown fox jumps over the lazy dog near the river bank. "
OPTIONS = {"device": "cpu", "max_model_len": 512, "num_gpu_blocks_override": 40}


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def answers(llm, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=8)
    return [llm.generate(prompt, params)[0] for prompt in prompts]


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """Tiers are waited for, and loads pay, however busy the machine is."""
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**10)
    monkeypatch.setattr("gapless.pace.load_gate.LoadGate.pays", lambda *_: True)


@pytest.fixture(scope="module")
def expected():
    with LLM("demo", **OPTIONS, enforce_eager=True) as llm:
        return token_ids(answers(llm, PROMPTS))


def test_prompts_that_the_device_gave_up_are_loaded(expected):
    with LLM("demo", **OPTIONS, kv_tiers=["host:64MiB"]) as llm:
        first = answers(llm, PROMPTS)
        again = answers(llm, PROMPTS)
        before = llm.stats()
        (last,) = answers(llm, PROMPTS[-1:])
        after = llm.stats()
    assert token_ids(first + again) == expected * 2
    assert before.steps.admitted_cached // 2 < before.steps.admitted_loaded <= before.steps.admitted_cached
    assert last.num_cached_tokens > 256 and after.steps.admitted_loaded == before.steps.admitted_loaded, (
        "the device had it"
    )
    assert not any(output.num_cached_tokens for output in first)
    lengths = [len(output.prompt_token_ids) for output in again]
    assert min(lengths) > 256 and sum(lengths) > 39 * 16, "the device holds one or two of them"
    assert all(output.num_cached_tokens >= length - 17 for output, length in zip(again, lengths, strict=True))


def test_an_engine_has_measured_its_link_when_it_is_ready_and_weighs_loads(monkeypatch):
    monkeypatch.undo()
    core = build_core(EngineConfig("demo", **OPTIONS, kv_tiers=("host:64MiB",)))
    gate = core.loop.parts.transfers.host.gate
    for _ in range(2):
        gate.computed(256, 1)
    assert not gate.pays(256, 16)
    core.close()


def test_a_ready_engine_has_counted_no_page_of_its_warm_up():
    options = OPTIONS | {"block_size": 4, "num_gpu_blocks_override": 160}
    core = build_core(EngineConfig("demo", **options, kv_tiers=("host:64MiB",)))
    counts = asdict(core.stats().tier)
    assert counts.pop("slots") and not any(counts.values()), counts
    core.close()


def test_a_tier_too_small_for_a_page_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="kv_tiers: host:100 holds no page"):
        LLM("demo", **OPTIONS, kv_tiers=["host:100"])


WORDS = ["one", "two", "six", "ten"]
PROMPTS = [word + LONG * 10 for word in WORDS]
CHILD = """
import sys
from gapless import LLM
sys.path[:0] = sys.argv[1:3]
from test_kv_tiers import OPTIONS, PROMPTS, answers
llm = LLM("demo", **OPTIONS, kv_tiers=["host:1MiB", f"disk:{sys.argv[3]}:64MiB"])
print("up", flush=True)
while True:
    answers(llm, PROMPTS)
"""


def wait_for_stores(llm):
    """Until the tier below has all that the host tier has stored."""
    deadline = time.monotonic() + 60
    while llm.stats().lower[0].stored != llm.stats().tier.stored:
        assert time.monotonic() < deadline
        answers(llm, ["x"])  # stores are noticed between two steps


@needs_openssl
@pytest.mark.seeds
def test_a_decoder_takes_pages_of_a_prefiller_over_tls(tmp_path, expected):
    (tmp_path / "key").write_bytes(b"a key of the tests, long enough")
    files = Authority(tmp_path / "tls").files("engine")._asdict()
    options = OPTIONS | {f"kv_peer_ssl_{name}": path for name, path in files.items()}
    options |= {"kv_peer_key_file": str(tmp_path / "key"), "kv_tiers": ["host:64MiB", "peer:64MiB"]}
    port = free_port()
    address = f"127.0.0.1:{port}"
    with LLM("demo", role="prefill", kv_peer_listen=address, **options) as prefiller:
        assert ssl.get_server_certificate(("127.0.0.1", port)) == Path(files["certfile"]).read_text()
        assert token_ids(answers(prefiller, PROMPTS)) == expected
        wait_for_stores(prefiller)
        used, size = prefiller.stats().lower[0].used_bytes, prefiller.stats().lower[0].size_bytes
        with LLM("demo", role="decode", kv_peers=[address], **options) as decoder:
            outputs = answers(decoder, PROMPTS)
            stats = decoder.stats()
    assert token_ids(outputs) == expected
    assert max(output.num_cached_tokens for output in outputs) > 256 and stats.lower[0].loaded > 16
    assert 256 < stats.steps.admitted_loaded <= stats.steps.admitted_cached
    assert 0 < stats.lower[0].read_bytes <= used <= size <= 64 << 20 and stats.lower[0].read_ns > 0


@pytest.mark.seeds
def test_another_engine_loads_pages_of_the_first_from_disk(tmp_path, expected):
    tiers = ["host:64MiB", f"disk:{tmp_path}:64MiB"]
    with LLM("demo", **OPTIONS, kv_tiers=tiers) as llm:
        assert token_ids(answers(llm, PROMPTS)) == expected
        wait_for_stores(llm)
    facts = describe(tmp_path)
    assert facts["pages of"]["model"] == "Qwen3ForCausalLM" and facts["used"] > 16
    with LLM("demo", **OPTIONS, kv_tiers=tiers) as llm:
        outputs = answers(llm, PROMPTS)
        stats = llm.stats()
    assert token_ids(outputs) == expected
    assert max(output.num_cached_tokens for output in outputs) > 256
    assert stats.lower[0].loaded > 16 and not stats.lower[0].refused
    with LLM("demo", **OPTIONS, dtype="bfloat16", kv_tiers=tiers) as llm:
        assert not any(output.num_cached_tokens for output in answers(llm, PROMPTS)), "pages of another dtype"


@pytest.mark.process
def test_an_engine_that_is_killed_while_it_writes_leaves_a_disk_tier_that_opens(tmp_path, expected):
    here = Path(__file__).parent
    command = [sys.executable, "-c", CHILD, str(here), str(here.parent), str(tmp_path)]
    for records in (5, 60):
        env = {**os.environ, "PYTHONHASHSEED": "7"}  # names of pages are the same in every process
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as child:
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
            while (tmp_path / LOG).stat().st_size < DISK_BLOCK + records * RECORD_BYTES:
                assert child.poll() is None
                time.sleep(0.01)
            child.send_signal(signal.SIGKILL)
    with LLM("demo", **OPTIONS, kv_tiers=["host:1MiB", f"disk:{tmp_path}:64MiB"]) as llm:
        assert token_ids(answers(llm, PROMPTS * 2)) == expected * 2
        assert llm.stats().lower[0].hits > 0


OTHERS = [{"block_size": 32}, {"dtype": "bfloat16"}, {"batch_invariant": True}, {"max_model_len": 256}]


@pytest.mark.seeds
@pytest.mark.parametrize("other", OTHERS)
def test_options_that_change_the_bytes_of_pages_change_their_names(tmp_path, other):
    roots = []
    for number, options in enumerate(({}, other)):
        tiers = ("host:1MiB", f"disk:{tmp_path / str(number)}:1MiB")
        core = build_core(EngineConfig("demo", **(OPTIONS | options), kv_tiers=tiers))
        roots.append(core.loop.planner.index.hasher.root("", ""))
        core.close()
    assert roots[0] != roots[1]
