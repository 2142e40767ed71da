"""Families from a user's directory through an engine: tokens of transformers, whatever else the engine does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapter_files import additions, write_adapter
from model.model_harness import reference
from model.paging_driver import prompt
from sharpest import sharpest

from gapless import LLM, SamplingParams
from gapless.demo import weights_dir
from gapless.model.config import read_model_config
from gapless.model.params import PRODUCTS

FAMILIES = (
    "gpt2", "olmo3", "cohere2", "gemma3", "phi3-part", "granite", "gemma2", "olmo2", "cohere", "mistral", "gemma",
    "qwen2-windows",
)  # fmt: skip
OPTIONS = {
    "device": "cpu",
    "tokenizer": str(weights_dir()),
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 120,
}
PROMPTS = [prompt(length, 5) for length in (3, 50, 17, 50, 1)]
TOKENS = 24


class Saved:
    """A model of transformers, and its directory."""

    def __init__(self, model: transformers.PreTrainedModel, directory: Path, family: str = "") -> None:
        model.save_pretrained(directory)
        self.model, self.directory, self.family = model, str(directory), family
        self.wanted = [self.greedy(ids) for ids in PROMPTS]

    @torch.no_grad()
    def greedy(self, ids: list[int]) -> list[int]:
        """The tokens of eager runs without a cache."""
        found = list(ids)
        for _ in range(TOKENS):
            found.append(int(self.model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
        return found[len(ids) :]


@pytest.fixture(scope="module", params=sharpest(FAMILIES, 4))
def saved(request, tmp_path_factory):
    return Saved(reference(request.param), tmp_path_factory.mktemp(request.param), request.param)


def answers(llm: LLM, **asked: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False, **asked)]


@pytest.mark.parametrize("depth", ("1", "4"))
def test_tokens_are_those_of_transformers_in_chunks_behind_prefixes_and_preempted(saved, depth):
    with LLM(saved.directory, **OPTIONS, depth=depth, num_gpu_blocks_override=14) as llm:
        assert [answers(llm) for _ in range(2)] == [saved.wanted] * 2
        stats = llm.stats()
    assert stats.steps.graph_steps > 0


def test_drafts_change_no_token(saved, tmp_path, free_drafts):
    reference(saved.family, num_hidden_layers=1).save_pretrained(tmp_path)
    for asked in (
        {"method": "ngram", "num_speculative_tokens": 3},
        {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3},
        {"method": "draft_model", "model": saved.directory, "num_speculative_tokens": 3},
    ):
        with LLM(saved.directory, **OPTIONS, speculative_config=asked) as llm:
            assert answers(llm) == saved.wanted
            drafts = llm.stats().drafts
    assert sum(drafts.accepted) > 0.8 * drafts.draft_tokens > 10, "the model was meant to draft for itself"


def test_an_adapter_adds_what_merged_weights_have(saved, tmp_path):
    config = read_model_config(Path(saved.directory))
    modules = [module.rpartition(".")[2] for name in PRODUCTS for module in config.names.modules(name)]
    path = write_adapter(tmp_path / "adapter", config, 3, modules=modules, size=0.2)
    merged = copy.deepcopy(saved.model)
    with torch.no_grad():
        for name, added in additions(path).items():
            merged.get_parameter(name).add_(added.mT if config.names.transposed else added)
    wanted = Saved(merged, tmp_path / "merged").wanted
    assert wanted != saved.wanted
    with LLM(saved.directory, **OPTIONS, lora_modules=(f"x={path}",)) as llm:
        assert answers(llm, adapter="x") == wanted
        assert answers(llm) == saved.wanted


def test_new_weights_take_the_place_of_the_old(saved, tmp_path):
    other = copy.deepcopy(saved.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape))
    new = Saved(other, tmp_path)
    assert new.wanted != saved.wanted
    with LLM(saved.directory, **OPTIONS) as llm:
        assert answers(llm) == saved.wanted
        llm.update_weights(new.directory)
        assert answers(llm) == new.wanted


def test_dummy_weights_run_without_a_file(saved, tmp_path):
    (tmp_path / "config.json").write_text((Path(saved.directory) / "config.json").read_text())
    with LLM(str(tmp_path), **OPTIONS, load_format="dummy") as llm:
        assert [len(tokens) for tokens in answers(llm)] == [TOKENS] * len(PROMPTS)
