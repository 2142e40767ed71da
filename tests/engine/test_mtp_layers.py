"""MTP layers with random weights, by each family's names: drafts are those of a direct computation by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from draft_spy import spy_on_drafts
from oracle_drafter import drafts_beside_chunks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, pad

from gapless import LLM, SamplingParams
from gapless.base.errors import CheckpointError
from gapless.base.files import SINGLE
from gapless.demo import weights_dir

VOCAB, HIDDEN = 97, 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 56, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "eos_token_id": 2,
}  # fmt: skip
SMALL = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 96,
    "tokenizer": str(weights_dir()), "enable_prefix_caching": False,
}  # fmt: skip
PROMPTS = [[(7 * row + 5 * index) % VOCAB for index in range(3 + 11 * row)] for row in range(4)]
PARAMS = [
    SamplingParams(temperature=heat, seed=3, max_tokens=30, ignore_eos=True, detokenize=False)
    for heat in (0, 0.7, 0, 1.0)
]
MTP = {"method": "mtp", "num_speculative_tokens": 3}


class Family(NamedTuple):
    """A kind of model, and how its checkpoints name the parts of an MTP layer."""

    architecture: str
    kind: str
    """What the names of its classes in transformers begin with, which imports them when they are first asked for."""
    layer: str
    join: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool = False
    normed: bool = True


LAST, ZERO = "model.layers.2", "model.mtp_layers.0"
FAMILIES = {
    "qwen": Family(
        "Qwen3ForCausalLM", "Qwen3", "mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden", "mtp.norm",
    ),
    "mimo": Family(
        "MiMoForCausalLM", "Qwen2", ZERO, f"{ZERO}.input_proj", f"{ZERO}.token_layernorm",
        f"{ZERO}.hidden_layernorm", f"{ZERO}.final_layernorm", hidden_first=True,
    ),
    "deepseek": Family(
        "LlamaForCausalLM", "Llama", LAST, f"{LAST}.eh_proj", f"{LAST}.enorm", f"{LAST}.hnorm",
        f"{LAST}.shared_head.norm", normed=False,
    ),
}  # fmt: skip


def random_model(family: Family, layers: int, seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family.kind}Config")(**SIZES, num_hidden_layers=layers)
    model = getattr(transformers, f"{family.kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


class Direct(NamedTuple):
    """A model of transformers, and another one of one layer that is its MTP layer."""

    family: Family
    model: transformers.PreTrainedModel
    block: transformers.PreTrainedModel
    join: Tensor
    embedding_norm: Tensor
    hidden_norm: Tensor

    @classmethod
    def new(cls, family: Family) -> Direct:
        block, vectors = random_model(family, 1, 6), torch.randn(2, HIDDEN) * 0.2 + 1
        return cls(family, random_model(family, 2, 5), block, torch.randn(HIDDEN, 2 * HIDDEN) * 0.2, *vectors)

    def save(self, directory: Path) -> Path:
        """Write the checkpoint, with a second MTP layer that is not read."""
        self.model.save_pretrained(directory)
        family, tensors = self.family, load_file(directory / SINGLE)
        for name, tensor in self.block.model.layers[0].state_dict().items():
            tensors[f"{family.layer}.{name}"] = tensor
        own = (family.join, self.join), (family.embedding_norm, self.embedding_norm)
        own += (family.hidden_norm, self.hidden_norm), (family.norm, self.block.model.norm.weight.detach())
        tensors |= {f"{name}.weight": tensor for name, tensor in own}
        tensors[f"{family.layer[:-1]}{int(family.layer[-1]) + 1}.eh_proj.weight"] = torch.zeros(1)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / SINGLE)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"architectures": [family.architecture]}))
        return directory

    @torch.no_grad()
    def logits(self, known: list[int], drafts: list[int]) -> list[Tensor]:
        """Logits of each draft after `known`, as if the drafts before it were right."""
        hidden = self.model.model(torch.tensor([known])).last_hidden_state[0]
        before, found = pad(hidden, (0, 0, 1, 0))[: len(known)], []
        for count in range(len(drafts)):
            states = self._states(known + drafts[:count], before)
            normed = self._norm(states, self.block.model.norm.weight)
            found.append(self.model.lm_head(normed[-1]))
            before = torch.cat((before, (normed if self.family.normed else states)[-1:]))
        return found

    def _states(self, ids: list[int], before: Tensor) -> Tensor:
        """What the decoder layer makes of tokens and the hidden states before them."""
        embedded = self._norm(self.model.model.embed_tokens(torch.tensor(ids)), self.embedding_norm)
        pair = embedded, self._norm(before, self.hidden_norm)
        joined = linear(torch.cat(pair[::-1] if self.family.hidden_first else pair, dim=1), self.join)
        states: list[Tensor] = []
        hook = self.block.model.layers[0].register_forward_hook(lambda *call: states.append(call[-1]))
        self.block.model(inputs_embeds=joined[None])
        hook.remove()
        return (states[0][0] if isinstance(states[0], tuple) else states[0]).view(len(ids), -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.rms_norm(x, (HIDDEN,), weight, 1e-6)


@pytest.fixture(autouse=True)
def drafts_pay(free_drafts, monkeypatch):
    monkeypatch.setattr("gapless.pace.draft_gate.PAYS", 0.0)


def answers(directory: Path, **options: Any) -> list[list[int]]:
    with LLM(str(directory), **SMALL, **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.seeds
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_of_an_mtp_layer_are_those_of_transformers(monkeypatch, tmp_path, name):
    direct = Direct.new(FAMILIES[name])
    directory = direct.save(tmp_path / "model")
    reference = answers(directory, depth="1")
    spies = spy_on_drafts(monkeypatch)
    with drafts_beside_chunks() as beside:
        assert answers(directory, enforce_eager=True, speculative_config=MTP) == reference
    assert len(beside) > 1
    monkeypatch.undo()
    assert answers(directory, depth="4", speculative_config=MTP) == reference
    seen = [drafted for drafted in spies[0].seen() if drafted.drafts]
    assert len(seen) > 30 and max(len(one.drafts) for one in seen) == 3
    for one in seen:
        for index, (draft, line) in enumerate(zip(one.drafts, direct.logits(one.known, one.drafts), strict=True)):
            scores = one.scores(line, index, torch.arange(VOCAB))
            assert scores[draft] >= scores.max() - 1e-3


def test_a_checkpoint_without_mtp_layers_is_refused():
    with pytest.raises(CheckpointError, match=r"no MTP layer of a known kind.*mtp\.fc.*layers\.6\.eh_proj"):
        LLM("demo", device="cpu", speculative_config=MTP)


def test_a_missing_tensor_of_an_mtp_layer_is_named(tmp_path):
    directory = Direct.new(FAMILIES["qwen"]).save(tmp_path / "model")
    tensors = load_file(directory / SINGLE)
    del tensors["mtp.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / SINGLE)
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.mlp\.up_proj\.weight"):
        LLM(str(directory), **SMALL, speculative_config=MTP)
