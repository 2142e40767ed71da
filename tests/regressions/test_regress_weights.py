"""Rows about weights that change under a running engine."""

from __future__ import annotations

from other_weights import checkpoint
from scenes import broken

from gapless import LLM, SamplingParams
from gapless.memory.index import PrefixIndex
from gapless.memory.prefix import PrefixHasher

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_model_len": 512, "num_gpu_blocks_override": 70}
PROMPT = "The quick brown fox jumps over the lazy dog near the river bank. " * 10


def answer(llm):
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    return output.outputs[0].token_ids


def test_row_085_no_answer_reads_kv_of_weights_that_were_replaced(tmp_path):
    """Rollouts used KV from weights up to 17 updates old, since an update left the prefix cache as it was. Here an
    update gives all pages other names: the index is empty, and no request asks for the copies in tiers."""
    other = str(checkpoint(tmp_path / "other"))
    with LLM(other, **OPTIONS) as llm:
        expected = answer(llm)

    def scene():
        with LLM("demo", **OPTIONS, kv_tiers=["host:16MiB"]) as llm:
            answer(llm)
            llm.update_weights(other)
            assert answer(llm) == expected

    def only_named(index, model):
        index.hasher = PrefixHasher(model, index.hasher.page_size)  # chains of earlier prompts are found as before

    scene()
    with broken(PrefixIndex, "rename", lambda index, model: None):
        scene()
    with broken(PrefixIndex, "rename", only_named):
        scene()
