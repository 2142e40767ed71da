"""On a CPU, steps of a bfloat16 model leave the cores to the kernels' own threads: torch's, among which it shares work
from 32,768 elements on, spin for a while afterwards, where our next product needs them."""

import json
from contextlib import nullcontext

import pytest
import torch
from tiny_models import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_internals import schema_of

from gapless import LLM, SamplingParams
from gapless.demo import weights_dir
from gapless.kernels import native
from gapless.model.decoder import Decoder
from gapless.step.program import StepProgram

GRAIN = 32_768
CONFIG = tiny_config(
    hidden_size=64,
    intermediate_size=128,
    head_dim=32,
    vocab_size=16_384,
    max_position_embeddings=4096,
    eos_token_id=1,
    bos_token_id=0,
    dtype="bfloat16",
)


class SharedWork(TorchDispatchMode):
    """Collects torch's own operators that compute so much that torch would share it among its threads."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        makes = func.namespace != "gapless" and "empty" not in func.name()
        views = any(each.alias_info and not each.alias_info.is_write for each in schema_of(func).returns)
        if makes and not views and any(output.numel() >= GRAIN for output in outputs):
            self.found.add(func.name())
        return result


def test_a_step_with_prompts_and_decoding_rows_shares_no_work_among_torchs_threads(tmp_path, monkeypatch):
    if native.load() is None:
        pytest.skip("no C++ kernels here: products are torch's own")
    found, mixed = set(), []
    forward, program = Decoder.forward, StepProgram.forward

    def watched(self, key, at):
        with nullcontext() if key.packet.prompts else SharedWork(found):  # scoring a prompt is torch's own arithmetic
            program(self, key, at)

    def noted(self, inputs, plan, cache):
        mixed.append(bool(plan.chunks and plan.decode))
        return forward(self, inputs, plan, cache)

    monkeypatch.setattr(StepProgram, "forward", watched)
    monkeypatch.setattr(Decoder, "forward", noted)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with LLM(
        str(tmp_path), load_format="dummy", device="cpu", threads=2, enforce_eager=True, tokenizer=str(weights_dir()),
        max_num_batched_tokens=1024, max_model_len=4096, kv_cache_memory_bytes=1 << 26,
    ) as llm:  # fmt: skip
        prompts = [{"prompt_token_ids": [7 + row] * length} for row, length in enumerate((5, 6, 7, 8, 3000))]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert any(mixed), "no step had prompts beside decoding rows"
    assert found == set()
