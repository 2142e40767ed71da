"""The Transformers backend beside the native family of the same checkpoint: everything that a request may ask for."""

from __future__ import annotations

import shutil

import pytest
import torch
from model.model_harness import reference
from model.paging_driver import CPU, Driver, Sequence
from model.transformers_rows import SERVED, make

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.base.config import EngineConfig
from gapless.demo import weights_dir
from gapless.engine import checkers
from gapless.kernels import native, plain
from gapless.model.loader import load_model

PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [40, 41, 42] * 6, [7], list(range(20, 70)), [3, 3, 3]]
USUAL = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 3}
WISHES = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "biases": {"logit_bias": {100: 4.0, 5: -100.0}, "min_tokens": 4},
    "allowed": {"allowed_token_ids": [11, 12, 13, 14]},
    "form": {"structured_outputs": StructuredOutputs(choice=["yes", "no", "perhaps"]), "ignore_eos": False},
    "prompt's log-probabilities": {"prompt_logprobs": 2},
}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3}
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 120}


def answers(directory, impl, **options):
    """Tokens and log-probabilities by wish, of all prompts at once."""
    found = {}
    with LLM(str(directory), model_impl=impl, num_gpu_blocks_override=60, **OPTIONS, **options) as llm:
        for name, wish in WISHES.items():
            outputs = llm.generate(PROMPTS, SamplingParams(**USUAL | wish), use_tqdm=False)
            found[name] = [
                (one.outputs[0].token_ids, scores(one.outputs[0].logprobs), scores(one.prompt_logprobs))
                for one in outputs
            ]
    return found


def scores(places):
    return [score for place in places or () if place for score in sorted(one.logprob for one in place.values())]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    shutil.copy(f"{weights_dir()}/tokenizer.json", folder)
    reference("qwen3", vocab_size=2048).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"depth": "4"},
        pytest.param({"depth": "4", "speculative_config": LOOKUP}, marks=pytest.mark.seeds),
    ],
    ids=["plain", "prompt lookup"],
)  # fmt: skip
def test_every_wish_gives_the_answers_of_the_native_family(directory, options):
    ours, theirs = (answers(directory, impl, **options) for impl in ("native", "transformers"))
    for name in WISHES:
        for (tokens, *some), (wanted, *others) in zip(theirs[name], ours[name], strict=True):
            assert tokens == wanted, name
            for part, other in zip(some, others, strict=True):
                torch.testing.assert_close(torch.tensor(part), torch.tensor(other), rtol=1e-4, atol=1e-4)


def loaded(name, directory):
    make(SERVED[name]).save_pretrained(directory)
    checkers.connect()
    config = EngineConfig(model=str(directory), dtype="float32", model_impl="transformers", max_model_len=64)
    return load_model(config, CPU, native.load() or plain.KERNELS)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_rows_that_pad_a_batch_of_experts_reach_no_other_row_when_their_memory_is_no_number(name, tmp_path):
    """sglang#30895 and its kin."""
    model, found = loaded(name, tmp_path), []
    for inert in (0, 3):
        driver, rows = Driver(model), [Sequence() for _ in range(2)]
        driver.cache.data[0] = torch.nan
        driver.step(chunks=[(row, torch.arange(5) + 7 * number) for number, row in enumerate(rows)])
        found.append(torch.cat(driver.step(decode=[(row, 11) for row in rows], inert=inert)))
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_a_replayed_batch_of_experts_gives_the_same_bits_each_time(tmp_path):
    """transformers#43362 and vllm#53430: sums over experts in an order of their own."""
    make(SERVED["mixtral"]).save_pretrained(tmp_path)
    options = {
        **OPTIONS,
        "enable_prefix_caching": False,
        "tokenizer": str(weights_dir()),
        "num_gpu_blocks_override": 60,
    }
    prompts = [[token % 90 + 3 for token in prompt] for prompt in PROMPTS]
    with LLM(str(tmp_path), model_impl="transformers", **options) as llm:
        params = SamplingParams(**USUAL)
        runs = [
            [
                (one.outputs[0].token_ids, scores(one.outputs[0].logprobs))
                for one in llm.generate(prompts, params, False)
            ]
            for _ in range(4)
        ]
        assert llm.stats().steps.graph_steps > 50
    assert all(run == runs[1] for run in runs[1:])
