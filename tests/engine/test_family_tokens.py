"""Tokens of each native family, of random weights in a directory as a user has it, through the whole engine: those of
transformers without a cache, with chunks, prefix hits, preemption, adapters, drafts and new weights."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from adapter_files import additions, write_adapter
from model_harness import reference
from sharpest import sharpest

from gapless import LLM, SamplingParams
from gapless.base.errors import CheckpointError
from gapless.demo import weights_dir
from gapless.model.config import read_model_config
from gapless.model.params import PRODUCTS

pytestmark = pytest.mark.usefixtures("free_drafts", "captures_all")
COUNT = 20
OPTIONS = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 64,
    "num_gpu_blocks_override": 10,
}  # fmt: skip
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
FAMILIES = ("gemma3", "phi3-part", "gemma2", "granite", "mistral", "ministral", "gemma", "phi3", "qwen2-windows")
ASKED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
PROMPTS = [[5, 17, 91, 200], [3], list(range(40, 75)), [7, 8, 9] * 9, [*list(range(40, 73)), 9]]


def checkpoint(folder, family, **changes):
    """A checkpoint of random weights, and the model of transformers that wrote it."""
    theirs = reference(family, vocab_size=2048, max_position_embeddings=256, **changes)
    theirs.save_pretrained(folder)
    shutil.copy(f"{weights_dir()}/tokenizer.json", folder)
    return theirs


def expected(theirs):
    """Greedy tokens, each from a forward of all before it."""
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(COUNT):
            with torch.no_grad():
                tokens.append(int(theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def tokens(llm, **asked):
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, ASKED, use_tqdm=False, **asked)]


def adapted(theirs, folder, config):
    """An adapter of every module, and the tokens of the model that it is merged into."""
    modules = [module.rpartition(".")[2] for name in PRODUCTS for module in config.names.modules(name)]
    write_adapter(folder, config, 3, rank=4, modules=modules, size=0.2)
    merged = copy.deepcopy(theirs)
    with torch.no_grad():
        for name, added in additions(folder).items():
            merged.get_parameter(name).add_(added)
    return expected(merged)


@pytest.mark.parametrize("depth", sharpest(["4", "1"]))
@pytest.mark.parametrize("family", sharpest(FAMILIES, 5))
def test_tokens_of_a_family_are_those_of_transformers(tmp_path, family, depth):
    theirs = checkpoint(tmp_path / "model", family)
    config = read_model_config(tmp_path / "model")
    with_adapter, without = adapted(theirs, tmp_path / "adapter", config), expected(theirs)
    other = copy.deepcopy(theirs)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)), alpha=0.1)
    other.save_pretrained(tmp_path / "other")
    more = {"lora_modules": (f"a={tmp_path / 'adapter'}",), "speculative_config": LOOKUP}
    with LLM(str(tmp_path / "model"), **OPTIONS, depth=depth, **more) as llm:
        assert [tokens(llm) for _ in range(2)] == [without] * 2
        assert tokens(llm, adapter="a") == with_adapter != without
        stats = llm.stats()
        assert stats.steps.graph_misses == 0 and stats.drafts.draft_tokens > 0 and stats.queue.preemptions > 0
        llm.update_weights(str(tmp_path / "other"))
        assert tokens(llm) == expected(other) != without


@pytest.mark.parametrize("family", sharpest(["gemma3", "phi3-part", "granite"]))
def test_a_draft_model_of_the_family_changes_no_token(tmp_path, family):
    theirs = checkpoint(tmp_path / "model", family)
    drafts = {"method": "draft_model", "model": str(tmp_path / "model"), "num_speculative_tokens": 3}
    with LLM(str(tmp_path / "model"), **OPTIONS, speculative_config=drafts) as llm:
        assert tokens(llm) == expected(theirs)
        stats = llm.stats()
    assert sum(stats.drafts.accepted) > 0.85 * stats.drafts.draft_tokens > 20


@pytest.mark.parametrize("family", sharpest(["gemma3", "phi3"]))
def test_dummy_weights_of_a_family_serve(tmp_path, family):
    checkpoint(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    with LLM(str(tmp_path), **OPTIONS, load_format="dummy") as llm:
        assert all(len(found) == COUNT for found in tokens(llm))


def test_a_tensor_that_is_missing_or_left_over_is_refused_by_name(tmp_path):
    theirs = checkpoint(tmp_path, "phi3")
    state, name = dict(theirs.state_dict()), "model.layers.1.self_attn.qkv_proj"
    for change, says in (
        ({f"{name}.bias": torch.zeros(64)}, f"{name}.bias"),
        ({f"{name}.weight": None}, f"{name}.weight"),
    ):
        kept = {key: value for key, value in (state | change).items() if value is not None}
        theirs.save_pretrained(tmp_path, state_dict=kept)
        with pytest.raises(CheckpointError, match=says):
            LLM(str(tmp_path), **OPTIONS)
