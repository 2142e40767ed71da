"""A page group's rule from outside the package: pages, prefixes and tokens of a model with chunked attention."""

from __future__ import annotations

import sys

import pytest
from extending.installed import TOYS
from plan.plan_harness import random_run

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.memory.groups import PageGroup
from gapless.model.config import load_config
from gapless.testing.checksum import PRIME

sys.path.append(str(TOYS))

from group import CHUNK, ChunkModel, ChunkRule

VOCAB, NEW, PAGES = 97, 60, 120


def continued(prompt: list[int]) -> list[int]:
    """The next tokens of the model, computed directly."""
    tokens = [*prompt]
    for last in range(len(prompt) - 1, len(prompt) + NEW - 1):
        fold = sum(
            (tokens[at] * 7_368_787 + at * 104_729 + 15_485_863) % PRIME * ((at * 48_271 + 1_299_709) % PRIME)
            for at in range(last // CHUNK * CHUNK, last + 1)
        )
        tokens.append(fold % PRIME * 16_807 % PRIME % VOCAB)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("groups", [(ChunkRule(6),), (PageGroup().rule, ChunkRule(5))], ids=["alone", "beside"])
@pytest.mark.parametrize("seed", range(12))
def test_rows_read_their_own_chunk_under_a_rule_from_outside(groups, seed):
    random_run(seed, chain=1 + seed % 3, groups=tuple(PageGroup(rule.kind, rule) for rule in groups))


def test_a_model_with_a_rule_from_outside_gives_its_tokens_and_shares_prefixes(monkeypatch):
    def load(*_):
        model = ChunkModel(VOCAB, 256)
        model.config, model.cache_layers = load_config(EngineConfig("demo")), 1
        return model

    monkeypatch.setattr("gapless.engine.wiring.load_model", load)
    prompts = [[(7 * n + key) % VOCAB for n in range(90)] for key in (0, 0, 1, 2, 3, 0)]
    with LLM("demo", max_model_len=152, block_size=4, num_gpu_blocks_override=PAGES, max_num_seqs=3) as llm:
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        again = llm.generate([{"prompt_token_ids": prompts[-1]}], params, use_tqdm=False)[0]
    for prompt, answer in zip((*prompts, prompts[-1]), (*answers, again), strict=True):
        assert list(answer.outputs[0].token_ids) == continued(prompt)
    assert again.num_cached_tokens == 88, "the last chunk's pages are enough"
