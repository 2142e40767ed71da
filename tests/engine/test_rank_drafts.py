"""Heads and draft models of several ranks: tokens are those of one rank, and so are the counts of right drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_mtp_layers import FAMILIES, MTP, Direct, answers

from gapless import LLM, SamplingParams
from gapless.base.errors import ConfigError
from gapless.demo import weights_dir

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("free_drafts")]
DEMO: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 160,
}  # fmt: skip
QUESTIONS = ["Mia has 14 pens and buys 7 more. How many pens does Mia have?", "What is 48 + 37?", "Hello", "Tell me"]
ASKED = [SamplingParams(temperature=heat, seed=7, max_tokens=40) for heat in (0.0, 0.8, 0.0, 1.1)]


def demo(ranks: int, drafts: dict[str, Any], **options: Any) -> tuple[list[list[int]], int]:
    """Tokens, and the drafts that were right."""
    with LLM("demo", **DEMO, **options, speculative_config=json.dumps(drafts), tensor_parallel_size=ranks) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        found = [output.outputs[0].token_ids for output in llm.chat(chats, ASKED, use_tqdm=False)]
        return found, llm.stats().drafts.right


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("depth", ["auto", "1"])
def test_drafts_of_two_ranks_are_those_of_one(method, depth):
    drafts = {"method": method, "num_speculative_tokens": 3} | ({"model": "demo"} if method == "draft_model" else {})
    (alone, right), (shared, right_too) = (demo(ranks, drafts, depth=depth) for ranks in (1, 2))
    assert shared == alone
    assert right > 30 and abs(right_too - right) <= right // 5, "as many drafts are right: steps may fall differently"


def test_an_mtp_layer_of_two_ranks(tmp_path):
    path = Direct.new(FAMILIES["qwen"]).save(tmp_path)
    one, two = (answers(path, speculative_config=json.dumps(MTP), tensor_parallel_size=ranks) for ranks in (1, 2))
    assert one == two


def test_a_draft_model_whose_heads_do_not_divide_is_refused_by_name(tmp_path):
    config = json.loads((weights_dir() / "config.json").read_text())
    odd = config | {"num_attention_heads": 3, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(odd))
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=r"speculative_config\.model: 3 heads cannot be shared by 2 ranks: 1"):
        demo(2, drafts, load_format="dummy")
