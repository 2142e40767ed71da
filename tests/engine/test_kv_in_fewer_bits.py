"""Engines whose KV is in fp8 or k8v4: the same bits at every depth, after preemption, prefix hits and loads from tiers,
with drafts and after new weights."""

from __future__ import annotations

import json

import pytest
import torch
from invariant_runs import TINY, differing, engine, jobs, play
from kernels.native_kernels import load_native
from test_kv_tiers import LONG, OPTIONS, answers, token_ids, wait_for_stores

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.demo import weights_dir
from gapless.engine.tiers import EngineTiers
from gapless.kernels.kv import KVFormat
from gapless.model.config import read_model_config
from gapless.model.kv_memory import measured, store_kv
from gapless.model.loader import load_model, read_params
from gapless.model.params import allocate
from gapless.model.self_check import TOKENS, paged_logits, tokens
from gapless.model.update import put_weights
from gapless.offload.tiers.frames import PeerRefused, check_same

KINDS = ["fp8", "k8v4"]
CPU = torch.device("cpu")
WORK = jobs(12, 512, 90, 40, shared=70)


@pytest.fixture(scope="module", params=KINDS)
def alone(request, tmp_path_factory):
    """The format, and every request by itself, at depth 1, eagerly, its prompt in one chunk."""
    load_native()
    core = engine(
        tmp_path_factory.mktemp("alone"), "cpu", TINY | {"dtype": "float32"}, depth="1", enforce_eager=True,
        enable_prefix_caching=False, batch_invariant=True, threads=1, max_num_seqs=1, kv_cache_dtype=request.param,
    )  # fmt: skip
    found = play(core, WORK, at_once=1)
    core.close()
    return request.param, found


@pytest.mark.parametrize("depth", ["4", "1", "8"])
def test_every_bit_over_fewer_bits_is_that_of_a_request_alone(alone, depth, tmp_path):
    """The pages hold a part of what eight requests come to, so that some are preempted; some find a prefix."""
    kind, want = alone
    core = engine(
        tmp_path, "cpu", TINY | {"dtype": "float32"}, depth=depth, batch_invariant=True, max_num_seqs=8,
        max_num_batched_tokens=48, num_gpu_blocks_override=30, max_model_len=256, threads=2, kv_cache_dtype=kind,
    )  # fmt: skip
    found = play(core, WORK)
    core.close()
    assert found.preemptions > 0 and found.cached > 0
    assert differing(found, want) == []


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_fewer_bits_come_back_from_host_and_disk(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**10)
    monkeypatch.setattr("gapless.pace.load_gate.LoadGate.pays", lambda *_: True)
    prompts, options = [word + LONG * 10 for word in ("one", "two", "six")], OPTIONS | {"kv_cache_dtype": kind}
    with LLM("demo", **options) as llm:
        want = token_ids(answers(llm, prompts))
    tiers = ["host:1MiB", f"disk:{tmp_path}:16MiB"]
    with LLM("demo", **options, kv_tiers=tiers) as llm:
        assert token_ids(answers(llm, prompts) + answers(llm, prompts)) == want * 2
        assert llm.stats().steps.admitted_loaded > 0
        wait_for_stores(llm)
    with LLM("demo", **options, kv_tiers=tiers) as llm:
        again = answers(llm, prompts)
        assert token_ids(again) == want and all(output.num_cached_tokens > 256 for output in again)
    with LLM("demo", **OPTIONS | {"kv_cache_dtype": "auto"}, kv_tiers=["host:1MiB"]) as llm:
        assert not any(output.num_cached_tokens for output in answers(llm, prompts))


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_takes_pages_of_fewer_bits_and_gives_the_same_tokens(kind, tmp_path, monkeypatch):
    """In memory of the host; a peer of another format finds nothing."""
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**10)
    monkeypatch.setattr("gapless.pace.load_gate.LoadGate.pays", lambda *_: True)
    prompts, where = [word + LONG * 10 for word in ("one", "two")], f"unix:{tmp_path}/peer"
    options = OPTIONS | {"kv_tiers": ["host:8MiB", "peer:8MiB"]}
    with LLM("demo", **options, role="prefill", kv_peer_listen=where, kv_cache_dtype=kind) as prefiller:
        want = token_ids(answers(prefiller, prompts))
        with LLM("demo", **options, role="decode", kv_peers=[where], kv_cache_dtype=kind) as decoder:
            found = answers(decoder, prompts)
        with LLM("demo", **options, role="decode", kv_peers=[where], kv_cache_dtype="auto") as decoder:
            others = answers(decoder, prompts)
    assert token_ids(found) == want and all(output.num_cached_tokens > 256 for output in found)
    assert not any(output.num_cached_tokens for output in others)


def test_namespaces_of_tiers_differ_by_format_and_scales_and_peers_say_so():
    found = {}
    for kind in KVFormat:
        config = EngineConfig("demo", kv_cache_dtype=str(kind), kv_tiers=("host:1MiB", "disk:/nowhere:1MiB"))
        tiers, model = EngineTiers(config), load_model(config, CPU)
        plain = EngineTiers(EngineConfig("demo", kv_cache_dtype=str(kind)))
        names = [plain.name(model.config, model, "cpu")]
        tiers.look_at_weights()
        tiers.name(model.config, model, "cpu")
        found[kind] = tiers.namespace
        if kind is not KVFormat.AUTO:
            store_kv(model, kind, 16, torch.full((len(model.spec.layers), 2), 0.25))
            names.append(plain.name(model.config, model, "cpu"))
        assert len(set(names)) == len(names)
    assert len({one.digest for one in found.values()}) == 3
    ours, theirs = found[KVFormat.FP8], found[KVFormat.K8V4]
    with pytest.raises(PeerRefused, match=r"of something else: kv_cache_dtype k8v4 .*, ours fp8 "):
        check_same(ours, theirs.digest, theirs.text.encode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_of_the_same_bytes_holds_more_tokens(kind):
    pages = {}
    for each in ("auto", kind):
        with LLM("demo", dtype="bfloat16", kv_cache_dtype=each, kv_cache_memory_bytes=1 << 20, max_model_len=64) as llm:
            pages[each] = llm.info.pages
            assert llm.info.kv_cache_dtype == each
    # Heads of 32 have 52 bytes in k8v4, of 128 in bfloat16.
    assert pages[kind] / pages["auto"] == pytest.approx({"fp8": 2, "k8v4": 128 / 52}[kind], rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_over_fewer_bits_are_near_the_exact_ones(kind):
    options = {"dtype": "float32", "max_model_len": 64}
    plain, model = (load_model(EngineConfig("demo", kv_cache_dtype=each, **options), CPU) for each in ("auto", kind))
    ids = tokens(model.vocab_size, CPU)[:TOKENS]
    want, got = paged_logits(plain, ids), paged_logits(model, ids)
    assert 0 < (got - want).norm() < 0.2 * want.norm()
    scale = model.kv_scales
    assert scale.shape == (len(model.spec.layers), 2) and (scale.log2() == scale.log2().round()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_measure_the_scales_of_each_layers_largest_key_and_value(kind):
    """In place, where captured steps read them."""
    model = load_model(EngineConfig("demo", kv_cache_dtype=kind, dtype="float32"), CPU)
    before, place = model.kv_scales.clone(), model.kv_scales.data_ptr()
    known, at = read_model_config(weights_dir()), model.spec.layer.attention
    params = allocate(known, torch.float32, CPU)
    read_params(params, weights_dir(), known)
    params.layers[1].qkv.tensors[0][-at.kv_heads * at.head_dim :] *= 64
    assert all(put_weights(model, params))
    assert model.kv_scales.data_ptr() == place and torch.equal(model.kv_scales, measured(model))
    assert torch.equal(model.kv_scales[:2], before[:2] * torch.tensor([[1, 1], [1, 64.0]]))


SPECULATION = [
    {"method": "eagle3", "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3},
    {"method": "ngram", "num_speculative_tokens": 3},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", SPECULATION, ids=lambda asked: asked["method"])
def test_drafts_over_fewer_bits_change_no_token(kind, asked):
    options = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 4, "kv_cache_dtype": kind}
    prompts = ["Mia has 14 pens and buys 7 more. How many?", "Hello", "One two three one two three one two"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM("demo", **options) as llm:
        want = token_ids(llm.generate(prompts, params, use_tqdm=False))
    with LLM("demo", **options, speculative_config=json.dumps(asked)) as llm:
        got = token_ids(llm.generate(prompts, params, use_tqdm=False))
    assert got == want


def test_steps_over_fewer_bits_wait_for_no_device():
    from gapless.testing.guarded import guarded

    with guarded() as checked, LLM("demo", max_model_len=96, kv_cache_dtype="fp8", max_num_seqs=4) as llm:
        llm.generate(
            ["Hello", "One two"], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False
        )
    assert checked.launched > 10 and checked.trouble() == []


@pytest.mark.parametrize("value", ["fp8_e5m2", "int8", "bfloat16"])
def test_another_format_of_kv_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=f"kv_cache_dtype must be one of auto, fp8, k8v4, got '{value}'"):
        LLM("demo", kv_cache_dtype=value)


def test_the_spelling_of_vllm_is_fp8():
    with LLM("demo", kv_cache_dtype="fp8_e4m3", max_model_len=64) as llm:
        assert llm.info.kv_cache_dtype == "fp8"


def test_a_gpu_without_e4m3_is_refused_by_name(monkeypatch):
    model = load_model(EngineConfig("demo"), CPU)
    model.kernels = model.kernels._replace(name="triton")
    monkeypatch.setattr("gapless.device.facts.vendor", lambda device: "nvidia")
    monkeypatch.setattr("gapless.device.facts.capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: fp8 needs an NVIDIA GPU of compute capability 8.9"):
        store_kv(model, KVFormat.FP8, 16)
