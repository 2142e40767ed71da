"""Every family from a user's directory through the real loop: the tokens of transformers' eager run without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from model.families_table import FAMILIES, FamilyRow
from model.paging_driver import CPU, Driver, Sequence, prompt, relative_error

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.demo import weights_dir
from gapless.engine import checkers
from gapless.model.config import read_model_config
from gapless.model.loader import load_model

QUICK = ("gemma3", "gpt-oss@")
"""Run by `make test`; the others by `make prove`"""
ROWS = [pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.seeds) for row in FAMILIES]
LENGTHS, TOKENS = (3, 50, 17, 50, 1), 20
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make a row's model and its directory once."""
    kept: dict[str, tuple[transformers.PreTrainedModel, Path]] = {}

    def get(row: FamilyRow) -> tuple[transformers.PreTrainedModel, Path]:
        if row.name not in kept:
            kept.clear()
            model, path = row.make(), tmp_path_factory.mktemp("family")
            model.save_pretrained(path)
            model.set_attn_implementation("eager")
            kept[row.name] = model, path
        return kept[row.name]

    return get


@torch.no_grad()
def eager(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of a run without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy(model: transformers.PreTrainedModel, ids: list[int]) -> list[int]:
    found = list(ids)
    for _ in range(TOKENS):
        found.append(int(eager(model, found)[-1].argmax()))
    return found[len(ids) :]


@pytest.mark.parametrize("row", ROWS)
def test_tokens_of_a_family_are_those_of_its_eager_run_at_every_depth(row, made, captures_all):
    """Twice: in chunks and with preemptions, then behind prefixes that are cached. Replayed, and without a hidden
    synchronisation, which the guard of all tests would raise."""
    model, path = made(row)
    prompts = [prompt(length, 5) for length in LENGTHS]
    wanted = [greedy(model, ids) for ids in prompts]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for depth in ("1", "4", "8"):
        with LLM(
            str(path), device="cpu", tokenizer=str(weights_dir()), max_num_seqs=4, max_num_batched_tokens=24,
            max_model_len=80, num_gpu_blocks_override=12, depth=depth, model_impl=row.impl,
        ) as llm:  # fmt: skip
            for _ in range(2):
                outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
                assert [output.outputs[0].token_ids for output in outputs] == wanted, depth
            stats = llm.stats()
        assert stats.steps.graph_steps > 0 and stats.steps.graph_misses == 0
        assert stats.queue.preemptions > 0 and stats.steps.prefix_hits > 0


@pytest.mark.parametrize("row", ROWS)
def test_logits_of_a_family_equal_the_eager_run_for_chunks_at_every_offset(row, made):
    model, path = made(row)
    config = EngineConfig(model=str(path), model_impl=row.impl, max_model_len=80)
    assert read_model_config(path, impl=row.impl).impl == row.impl
    checkers.connect()
    served, tokens = load_model(config, CPU), prompt(40, 3)
    wanted = eager(model, tokens)
    for cut in range(1, len(tokens)):
        driver, sequence = Driver(served, seed=cut, pages=20, page_size=4), Sequence()
        got = [driver.step(chunks=[(sequence, part)])[0] for part in (tokens[:cut], tokens[cut:])]
        assert relative_error(torch.cat(got), wanted) < TOLERANCE, cut
