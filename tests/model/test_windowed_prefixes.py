"""Prefixes of a model with windows: hits at every place, and never another answer (vllm#57610, kvcached#446)."""

from __future__ import annotations

import shutil

import pytest
from model_harness import reference

from gapless import LLM, SamplingParams
from gapless.demo import weights_dir

PAGE, WINDOW = 16, 20
PROMPT = [7 * place % 97 + 3 for place in range(4 * PAGE)]
SCORED = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Every second layer has a window."""
    folder = tmp_path_factory.mktemp("windowed")
    kinds = ["sliding_attention", "full_attention"]
    shutil.copy(f"{weights_dir()}/tokenizer.json", folder)
    reference(
        "qwen3", vocab_size=2048, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds
    ).save_pretrained(folder)
    return folder


def answers(directory, prompts, **options):
    """The cached prompt tokens, tokens and log-probabilities of each prompt, one after the other."""
    with LLM(str(directory), device="cpu", max_num_seqs=4, max_model_len=256, block_size=PAGE, **options) as llm:
        found = [llm.generate(prompt, SCORED, use_tqdm=False)[0] for prompt in prompts]
    return [
        (one.num_cached_tokens, one.outputs[0].token_ids, [[*place.items()] for place in one.outputs[0].logprobs])
        for one in found
    ]


def test_equal_prompts_give_equal_bits_when_their_prefix_is_cached(directory):
    first, *others = answers(directory, [PROMPT] * 4, batch_invariant=True)
    assert first[0] == 0 and all(one == (len(PROMPT) - PAGE, *first[1:]) for one in others)


def test_a_prompt_hits_every_page_before_the_one_in_which_it_diverges(directory):
    """In each place of the last page."""
    ended = [PROMPT[:place] + [1] * (len(PROMPT) - place) for place in range(3 * PAGE, 4 * PAGE)]
    _, *hit = answers(directory, [PROMPT, *ended])
    cold = answers(directory, ended, enable_prefix_caching=False)
    assert [one[0] for one in hit] == [3 * PAGE] * PAGE
    assert [one[1] for one in hit] == [one[1] for one in cold]
