"""Gemma: scaled embeddings, norms whose weights lack one, and a gated MLP with GELU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import gelu

from gapless.model.attention import AttentionPlan
from gapless.model.dense import NO_TAPS, DenseModel, LayerTaps
from gapless.model.families import Family
from gapless.model.fields import Fields
from gapless.model.params import Params
from gapless.model.seam import KVCache, StepInputs


class Gemma(DenseModel):
    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.config.hidden_size**0.5

    def forward(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache, taps: LayerTaps = NO_TAPS) -> Tensor:
        angles = self.kernels.angles(inputs.positions, self.rope)
        ops = self.separate_ops(self.embed(inputs.ids), inputs, plan, cache)
        y = ops.norm(self.blocks[0].input_norm)
        for i, block in enumerate(self.blocks):
            qkv = ops.product(y, block.qkv)
            found = ops.attend(qkv, block.rotation(angles), self.first_layer + i, block.attend)
            y = ops.add(found, block.output, block.mlp_norm)
            gate, up = ops.product(y, block.gate_up).chunk(2, dim=-1)
            y = ops.add(gelu(gate, approximate="tanh") * up, block.down, block.next_norm)
            if i + 1 in taps.layers:
                taps.copy(i + 1, ops.x)
        return y


def flags(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias, "tied": fields.flag("tie_word_embeddings", True)}


def add_one(params: Params) -> None:
    params.norm.add_(1)
    for layer in params.layers:
        layer.input_norm.add_(1)
        layer.mlp_norm.add_(1)


FAMILY = Family(
    model_types=("gemma",),
    flags=flags,
    activations=("gelu_pytorch_tanh",),
    reads=frozenset({"hidden_activation"}),
    model=Gemma,
    loaded=add_one,
)
