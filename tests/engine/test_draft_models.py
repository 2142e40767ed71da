"""Draft models beside the demo model: their drafts are those of transformers, and tokens those of a run without."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapter_files import write_adapter
from draft_spy import spy_on_drafts
from oracle_drafter import drafts_beside_chunks

from gapless import LLM, SamplingParams
from gapless.base.errors import ConfigError
from gapless.demo import head_dir, weights_dir
from gapless.model.config import read_model_config

pytestmark = pytest.mark.usefixtures("fixed_costs")
SMALL = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 160}
QUESTIONS = [
    "Mia has 14 pens and buys 7 more. How many pens does Mia have?",
    "Mia has 14 pens and buys 9 more. How many pens does Mia have?",
    "What is 48 + 37?",
    "Hello",
    "Tom has 32 apples and gives away 8. How many apples does Tom have?",
]
HOT = {1: {"temperature": 0.8, "seed": 2}, 3: {"temperature": 1.2, "seed": 5}}
PARAMS = [
    SamplingParams(**{"max_tokens": 40 + 9 * place, "temperature": 0, "ignore_eos": place == 2} | HOT.get(place, {}))
    for place in range(len(QUESTIONS))
]


def drafted_by(model: Any = "demo", drafts: int = 4) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": drafts}


def answers(llm: LLM, **asked: Any) -> list[list[int]]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.outputs[0].token_ids for output in llm.chat(chats, PARAMS, use_tqdm=False, **asked)]


@pytest.fixture(scope="module")
def reference():
    with LLM("demo", **SMALL, depth="1", enforce_eager=True) as llm:
        return answers(llm)


@pytest.mark.seeds
@pytest.mark.parametrize("depth", ["1", "2", "4", "8"])
def test_a_model_that_drafts_for_itself_is_right_at_every_depth(reference, depth):
    """Prompts come in chunks, some behind cached prefixes, and requests are preempted."""
    with LLM("demo", **SMALL, depth=depth, num_gpu_blocks_override=11, speculative_config=drafted_by()) as llm:
        assert [answers(llm) for _ in range(2)] == [reference] * 2
        stats = llm.stats()
    assert stats.queue.preemptions
    # Not 1: drafts after the last token of an answer count as wrong, and products of few rows differ in their bits.
    assert sum(stats.drafts.accepted) > 0.85 * stats.drafts.draft_tokens > 100


@pytest.fixture(scope="module")
def other_shape(tmp_path_factory):
    """A random model of the demo's vocabulary, whose layers of KV have another size than the demo's."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=read_model_config(weights_dir()).spec.vocab_size, hidden_size=48, intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    directory: Path = tmp_path_factory.mktemp("draft") / "model"
    model.save_pretrained(directory)
    return directory


@pytest.mark.seeds
def test_drafts_of_a_model_of_another_shape_are_those_of_transformers(monkeypatch, other_shape, reference):
    spies = spy_on_drafts(monkeypatch)
    with (
        LLM("demo", **SMALL, enforce_eager=True, speculative_config=drafted_by(other_shape)) as llm,
        drafts_beside_chunks() as beside,
    ):
        assert answers(llm) == reference
    assert beside
    model = transformers.LlamaForCausalLM.from_pretrained(other_shape)
    ids = torch.arange(model.config.vocab_size)
    seen = [drafted for drafted in spies[0].seen() if drafted.drafts]
    assert len(seen) > 15
    for one in seen:
        with torch.no_grad():
            logits = model(torch.tensor([one.known + one.drafts])).logits[0, len(one.known) - 1 : -1]
        for index, (draft, line) in enumerate(zip(one.drafts, logits, strict=True)):
            scores = one.scores(line, index, ids)
            assert scores[draft] >= scores.max() - 1e-3


@pytest.mark.seeds
def test_rows_with_adapters_are_drafted_for_by_the_model_without(tmp_path):
    adapter = write_adapter(tmp_path / "a", read_model_config(weights_dir()), 8, size=0.2)
    found = []
    for speculative in (None, drafted_by()):
        with LLM("demo", **SMALL, lora_modules=(f"a={adapter}",), speculative_config=speculative) as llm:
            found.append(answers(llm, adapter=["a", "", "a", "", "a"]))
            stats = llm.stats()
    assert found[0] == found[1]
    assert 0 < sum(stats.drafts.accepted) < stats.drafts.draft_tokens


def test_a_draft_model_that_does_not_fit_is_refused_by_name(tmp_path):
    other = Path(shutil.copytree(weights_dir(), tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 4096}))
    for model, says in (
        (other, "vocabulary of 4096 tokens and the model one of 2048"),
        (tmp_path / "none", r"speculative_config\.model: no directory"),
        ("", r"speculative_config\.model must name a small model"),
    ):
        with pytest.raises(ConfigError, match=says):
            LLM("demo", **SMALL, speculative_config=drafted_by(model))
    with pytest.raises(ConfigError, match=r"speculative_config\.model: no directory"):
        LLM("demo", **SMALL, speculative_config={"model": str(tmp_path / "none")})


@pytest.mark.seeds
@pytest.mark.parametrize("model", ["demo", str(head_dir())], ids=("model", "head"))
def test_a_checkpoint_drafts_as_its_config_says_if_no_method_is_named(reference, model):
    with LLM("demo", **SMALL, speculative_config={"model": model}) as llm:
        assert answers(llm) == reference
        assert llm.stats().drafts.drafts > 10
