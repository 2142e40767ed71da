"""What a checkpoint recommends holds on every way in: over HTTP, in LLM and in AsyncLLM; what a request says wins."""

import json
import shutil

import pytest
from server_harness import serving

from gapless import LLM, AsyncLLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.demo import weights_dir
from gapless.engine.frontdoor import open_assets
from gapless.engine.wiring import build_core

PROMPT = "The capital of Norway is"
LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "threads": 1}
GREEDY = {"temperature": 0.0, "max_tokens": 24}


def demo(directory, generation):
    """A copy of the demo model that recommends this."""
    shutil.copytree(weights_dir(), directory)
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation))
    return str(directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    generation = {"repetition_penalty": 1.5, "max_new_tokens": 24, "stop_strings": ["zzz"], "top_k": -1}
    return demo(tmp_path_factory.mktemp("models") / "demo", generation)


@pytest.fixture(scope="module")
def wanted(model):
    """Texts with and without the penalty, by parameters that say all."""
    with LLM("demo", **LIMITS) as llm:
        each = [SamplingParams(**GREEDY, repetition_penalty=penalty) for penalty in (1.5, 1.0)]
        penalised, plain = (llm.generate(PROMPT, one, use_tqdm=False)[0].outputs[0].text for one in each)
    assert penalised != plain
    return penalised, plain


@pytest.fixture(scope="module")
def client(model):
    config = EngineConfig(model=model, device="cpu", **LIMITS)
    options = {"core": lambda: build_core(config), "front": open_assets(config), "served_model_name": ("demo",)}
    with serving(**options) as server, server.client() as client:
        yield client


def test_defaults_of_a_checkpoint_hold_in_python(model, wanted):
    with LLM(model, **LIMITS) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(
            temperature=0.0, repetition_penalty=1.5, max_tokens=24, stop=("zzz",)
        )
        given = (None, SamplingParams(**GREEDY), llm.get_default_sampling_params().replace(repetition_penalty=1.0))
        found = [llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text for params in given]
        long = llm.generate([[*range(10, 60)]], None, use_tqdm=False)[0]
        assert 0 < len(long.outputs[0].token_ids) <= 64 - 50 < 24
    assert found == [wanted[0], wanted[1], wanted[1]]


async def test_defaults_of_a_checkpoint_hold_in_async_python(model, wanted):
    async with AsyncLLM.from_engine_args(model=model, **LIMITS) as llm:
        for params, text in zip((None, SamplingParams(**GREEDY)), wanted, strict=True):
            *_, last = [output async for output in llm.generate(PROMPT, params)]
            assert last.outputs[0].text == text


@pytest.mark.parametrize(
    ("fields", "penalised", "tokens"),
    [
        ({}, True, 24),
        ({"max_tokens": None, "repetition_penalty": None, "stop": None}, True, 24),
        ({"repetition_penalty": 1.0}, False, 24),
        ({"max_tokens": 3}, True, 3),
        ({"temperature": 0, "stop": []}, True, 24),
        ({"max_tokens": 40, "ignore_eos": True}, True, 40),
        ({"min_tokens": 4}, True, 24),
    ],
)
def test_fields_that_a_request_leaves_out_come_from_the_checkpoint(client, wanted, fields, penalised, tokens):
    answer = client.post("/v1/completions", json={"prompt": PROMPT, **fields}).json()
    text = answer["choices"][0]["text"]
    assert text.startswith(wanted[not penalised][:8]) or wanted[not penalised].startswith(text)
    assert answer["usage"]["completion_tokens"] <= tokens
    if answer["choices"][0]["finish_reason"] == "length":
        assert answer["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("path", ("/v1/chat/completions", "/v1/responses"))
def test_the_other_ways_have_the_same_limit(client, path):
    asked = {"input": "Tell"} if path.endswith("responses") else {"messages": [{"role": "user", "content": "Tell"}]}
    usage = client.post(path, json={**asked, "model": "demo", "ignore_eos": True}).json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 24
    longer = {**asked, "model": "demo", "ignore_eos": True, "min_tokens": 30}
    usage = client.post(path, json=longer).json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) >= 30


def test_a_limit_of_the_checkpoint_refuses_no_prompt(client):
    ids = list(range(10, 60))
    answer = client.post("/v1/completions", json={"prompt": ids, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 64 - len(ids)
    refused = client.post("/v1/completions", json={"prompt": ids, "max_tokens": 23})
    assert refused.status_code == 400 and "maximum context length" in refused.text


def test_stop_strings_of_the_checkpoint_end_answers_until_a_request_has_its_own(tmp_path, wanted):
    word = wanted[1].split()[0]
    with LLM(demo(tmp_path / "demo", {"stop_strings": word}), **LIMITS) as llm:
        (output,) = llm.generate(PROMPT, None, use_tqdm=False)[0].outputs
        assert output.stop_reason == word and word not in output.text
        own = llm.get_default_sampling_params().replace(stop=None, max_tokens=24)
        assert llm.generate(PROMPT, own, use_tqdm=False)[0].outputs[0].text == wanted[1]
