"""An EAGLE-3 head for training: plain torch, several unrolled steps, exported under the names of the field.

The head drafts the token after x(s) from the embedding of x(s) and the hidden states of the demo model before it, those
of x(s - 1). Each further token is drafted from the last one and the head's own output, as the engine does it.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.demo_model.network import Network, Shape, attention, mlp, normed, rotate, rotation

LAYERS = (2, 4, 6)
"""After how many layers of the demo model its hidden states are read."""


class Hidden(NamedTuple):
    """What the demo model says about a batch: `states` [rows, length, 3 * width], `best` int64 [rows, length]."""

    states: Tensor
    best: Tensor


@torch.no_grad()
def hidden_of(network: Network, ids: Tensor) -> Hidden:
    """Hidden states after the layers that the head reads, and the most likely next tokens."""
    shape = network.shape
    cos, sin = rotation(torch.arange(ids.shape[1]), shape, torch.float32)
    x, found = F.embedding(ids, network.embedding), []
    for index in range(shape.layers):
        weights = network.layer(index)
        x = x + attention(normed(x, weights["input_layernorm"], shape.eps), weights, cos, sin, shape)
        x = x + mlp(normed(x, weights["post_attention_layernorm"], shape.eps), weights)
        if index + 1 in LAYERS:
            found.append(x)
    return Hidden(torch.cat(found, -1), network.logits(normed(x, network.norm, shape.eps)).argmax(-1))


class Chains(NamedTuple):
    """The places of a batch from which drafts begin: C a row, padded."""

    at: Tensor
    """int64 [rows, C] positions"""
    there: Tensor
    """bool [rows, C]: False for padding"""


class Keys(NamedTuple):
    """Keys of one kind, and their values: [rows, kv_heads, length, head]."""

    keys: Tensor
    values: Tensor


class Head(nn.Module):
    """Weights of the head, under the names of its checkpoint with `_` for `.`; matrices are [out, in]."""

    def __init__(self, network: Network, tokens: Tensor) -> None:
        """`tokens` int64 [draft vocabulary], ascending, are those that the head can draft."""
        super().__init__()
        shape = network.shape
        self.shape, self.tokens = shape, tokens
        self.embedding = network.embedding.detach()
        width, q, kv = shape.width, shape.heads * shape.head, shape.kv_heads * shape.head
        sizes = {
            "fc": (width, len(LAYERS) * width),
            "self_attn_q_proj": (q, 2 * width),
            "self_attn_k_proj": (kv, 2 * width),
            "self_attn_v_proj": (kv, 2 * width),
            "self_attn_o_proj": (width, q),
            "mlp_gate_proj": (shape.inner, width),
            "mlp_up_proj": (shape.inner, width),
            "mlp_down_proj": (width, shape.inner),
        }
        self.mats = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(*size) * size[1] ** -0.5) for name, size in sizes.items()}
        )
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.ones(width)) for name in names})
        self.norm = nn.Parameter(network.norm.detach().clone())
        self.lm_head = nn.Parameter(network.embedding.detach()[tokens].clone())

    def unrolled(self, ids: Tensor, states: Tensor, chains: Chains, drafts: int) -> list[Tensor]:
        """Logits of each draft after each chain's place, [rows, C, draft vocabulary], as if all before it were right.

        `states` [rows, length, 3 * width] are zeros where there are none.
        """
        before = F.pad(F.linear(states, self.mats["fc"]), (0, 0, 1, 0))[:, :-1]
        past = self._keys(self._inputs(ids, before), torch.arange(ids.shape[1]))
        rows = torch.arange(len(ids))[:, None]
        seen = torch.arange(ids.shape[1]) <= chains.at[:, None, :, None]
        x, own, found = before[rows, chains.at], list[Keys](), []
        for draft in range(drafts):
            at = chains.at + draft
            inputs = self._inputs(ids[rows, at.clamp(max=ids.shape[1] - 1)], x)
            if draft:  # the first one's keys are among those of the past
                own.append(self._keys(inputs, at[:, None]))
            x = x + self._attend(self._queries(inputs, at), past, seen, own)
            x = x + mlp(normed(x, self.scales["post_attention_layernorm"], self.shape.eps), dict(self.mats.items()))
            found.append(F.linear(normed(x, self.norm, self.shape.eps), self.lm_head))
        return found

    def _inputs(self, ids: Tensor, x: Tensor) -> Tensor:
        embedded = normed(F.embedding(ids, self.embedding), self.scales["input_layernorm"], self.shape.eps)
        return torch.cat((embedded, normed(x, self.scales["hidden_norm"], self.shape.eps)), -1)

    def _keys(self, inputs: Tensor, positions: Tensor) -> Keys:
        shape = (*inputs.shape[:2], self.shape.kv_heads, self.shape.head)
        k, v = (F.linear(inputs, self.mats[f"self_attn_{name}_proj"]).view(shape).transpose(1, 2) for name in "kv")
        return Keys(rotate(k, *rotation(positions, self.shape, torch.float32)), v)

    def _queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """[rows, kv_heads, group, C, head], scaled."""
        shape = (*inputs.shape[:2], self.shape.heads, self.shape.head)
        q = F.linear(inputs, self.mats["self_attn_q_proj"]).view(shape).transpose(1, 2)
        q = rotate(q, *rotation(positions[:, None], self.shape, torch.float32)) * self.shape.head**-0.5
        grouped: Tensor = q.reshape(len(q), self.shape.kv_heads, -1, *q.shape[2:])
        return grouped

    def _attend(self, q: Tensor, past: Keys, seen: Tensor, own: list[Keys]) -> Tensor:
        """A chain reads the past up to its place, and its own keys after that."""
        scores = (q @ past.keys[:, :, None].mT).masked_fill(~seen[:, None], float("-inf"))
        mine = [(q * keys[:, :, None]).sum(-1, keepdim=True) for keys, _ in own]
        share = torch.cat((scores, *mine), -1).softmax(-1)
        length = past.keys.shape[2]
        mixed = share[..., :length] @ past.values[:, :, None]
        for index, (_, values) in enumerate(own):
            mixed = mixed + share[..., length + index, None] * values[:, :, None]
        flat = mixed.flatten(1, 2).transpose(1, 2).flatten(2)
        return F.linear(flat, self.mats["self_attn_o_proj"])

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights under the names of EAGLE-3 checkpoints."""
        named = (*self.mats.items(), *self.scales.items(), ("norm", self.norm), ("lm_head", self.lm_head))
        weights = {_name(name): weight for name, weight in named}
        draftable = torch.zeros(self.shape.vocab, dtype=torch.bool)
        draftable[self.tokens] = True
        ids = {"d2t": self.tokens - torch.arange(len(self.tokens)), "t2d": draftable}
        return {name: weight.detach().to(dtype).contiguous() for name, weight in weights.items()} | ids


def restore_head(network: Network, tensors: dict[str, Tensor]) -> Head:
    """The head of a checkpoint. KeyError if a tensor is missing."""
    head = Head(network, tensors["d2t"] + torch.arange(len(tensors["d2t"])))
    with torch.no_grad():
        for name, weight in (*head.mats.items(), *head.scales.items(), ("norm", head.norm), ("lm_head", head.lm_head)):
            weight.copy_(tensors[_name(name)])
    return head


def _name(key: str) -> str:
    path = key.replace("self_attn_", "self_attn.").replace("mlp_", "mlp.")
    return f"{'' if key in ('fc', 'norm', 'lm_head') else 'midlayer.'}{path}.weight"


def head_config(shape: Shape, drafted: int) -> dict[str, Any]:
    """config.json of the head's directory; `drafted` is the size of its vocabulary."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "draft_vocab_size": drafted,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "use_aux_hidden_state": True},
        "torch_dtype": "float16",
    }
