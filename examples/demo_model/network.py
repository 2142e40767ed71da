"""A Qwen3 network for training: plain torch, weights stacked by layer, exported under Hugging Face names."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the network."""

    vocab: int
    width: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head: int = 32
    inner: int = 576
    context: int = 2048
    theta: float = 10000.0
    eps: float = 1e-6


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Hugging Face name inside a layer -> (rows, columns)."""
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    return {
        "self_attn.q_proj": (q, shape.width),
        "self_attn.k_proj": (kv, shape.width),
        "self_attn.v_proj": (kv, shape.width),
        "self_attn.o_proj": (shape.width, q),
        "mlp.gate_proj": (shape.inner, shape.width),
        "mlp.up_proj": (shape.inner, shape.width),
        "mlp.down_proj": (shape.width, shape.inner),
    }


def norms(shape: Shape) -> dict[str, int]:
    """Hugging Face name inside a layer -> length."""
    return {
        "input_layernorm": shape.width,
        "post_attention_layernorm": shape.width,
        "self_attn.q_norm": shape.head,
        "self_attn.k_norm": shape.head,
    }


def _key(name: str) -> str:
    return name.replace(".", "_")


class Network(nn.Module):
    """Weights are float32 and stacked [layers, ...]; the forward runs in the dtype that it is given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab, shape.width) * 0.02)
        self.norm = nn.Parameter(torch.ones(shape.width))
        self.mats = nn.ParameterDict()
        for name, (rows, columns) in matrices(shape).items():
            weight = torch.randn(shape.layers, rows, columns) * columns**-0.5
            out = name.endswith(("o_proj", "down_proj"))
            self.mats[_key(name)] = nn.Parameter(weight * (0.1 if out else 1.0))
        self.scales = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.ones(shape.layers, size)) for name, size in norms(shape).items()}
        )

    def forward(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """ids int64 [rows, length] -> hidden states after the last norm, [rows, length, width] in `dtype`."""
        cos, sin = rotation(torch.arange(ids.shape[1], device=ids.device), self.shape, dtype)
        mats = {key: weight.to(dtype) for key, weight in self.mats.items()}
        scales = {key: weight.to(dtype) for key, weight in self.scales.items()}
        x = F.embedding(ids, self.embedding).to(dtype)
        for layer in range(self.shape.layers):
            weights = {key: weight[layer] for key, weight in (*mats.items(), *scales.items())}
            x = x + attention(normed(x, weights["input_layernorm"], self.shape.eps), weights, cos, sin, self.shape)
            x = x + mlp(normed(x, weights["post_attention_layernorm"], self.shape.eps), weights)
        return normed(x, self.norm.to(dtype), self.shape.eps)

    def layer(self, index: int) -> dict[str, Tensor]:
        """The float32 weights of one layer."""
        return {key: weight[index] for key, weight in (*self.mats.items(), *self.scales.items())}

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, width] -> float32 logits [n, vocab]; the embedding is tied."""
        return F.linear(hidden, self.embedding.to(hidden.dtype)).float()


def normed(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis, the mean in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * scale


def rotation(positions: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding at `positions` [...]; each [..., head]."""
    half = torch.arange(0, shape.head, 2, device=positions.device, dtype=torch.float32) / shape.head
    angles = positions.float()[..., None] * shape.theta**-half
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (i, i + head/2) of x [rows, heads, length, head]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def project(
    x: Tensor, weights: dict[str, Tensor], cos: Tensor, sin: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of x [rows, length, width], normed and turned; each [rows, heads, length, head]."""
    joined = torch.cat([weights[f"self_attn_{name}_proj"] for name in "qkv"])
    heads = F.linear(x, joined).view(*x.shape[:2], -1, shape.head).transpose(1, 2)
    q, k, v = heads.tensor_split((shape.heads, shape.heads + shape.kv_heads), 1)
    q = rotate(normed(q, weights["self_attn_q_norm"], shape.eps), cos, sin)
    k = rotate(normed(k, weights["self_attn_k_norm"], shape.eps), cos, sin)
    return q, k, v


def attention(x: Tensor, weights: dict[str, Tensor], cos: Tensor, sin: Tensor, shape: Shape) -> Tensor:
    """Causal grouped-query attention."""
    q, k, v = project(x, weights, cos, sin, shape)
    length = x.shape[1]
    # Queries of one group share a key head, so they are stacked along the length: no copies of k and v.
    stacked = (q * shape.head**-0.5).reshape(x.shape[0], shape.kv_heads, -1, shape.head)
    scores = (stacked @ k.mT).unflatten(2, (-1, length))
    future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    share = scores.masked_fill(future, float("-inf")).softmax(-1)
    mixed = (share.flatten(2, 3) @ v).reshape(q.shape)
    return F.linear(mixed.transpose(1, 2).flatten(2), weights["self_attn_o_proj"])


def mlp(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The gated feed-forward part."""
    gate, up = F.linear(x, torch.cat((weights["mlp_gate_proj"], weights["mlp_up_proj"]))).chunk(2, -1)
    return F.linear(F.silu(gate) * up, weights["mlp_down_proj"])


def hugging_face_config(shape: Shape, eos: list[int], pad: int) -> dict[str, Any]:
    """config.json of the model directory."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def export(network: Network, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights under Hugging Face names."""
    out = {"model.embed_tokens.weight": network.embedding, "model.norm.weight": network.norm}
    for name in matrices(network.shape):
        out |= {f"model.layers.{i}.{name}.weight": w for i, w in enumerate(network.mats[_key(name)])}
    for name in norms(network.shape):
        out |= {f"model.layers.{i}.{name}.weight": w for i, w in enumerate(network.scales[_key(name)])}
    return {name: tensor.detach().to(dtype).clone().contiguous() for name, tensor in out.items()}


def restore(network: Network, tensors: dict[str, Tensor]) -> None:
    """Fills a network from tensors under Hugging Face names. KeyError if one is missing."""
    with torch.no_grad():
        network.embedding.copy_(tensors["model.embed_tokens.weight"])
        network.norm.copy_(tensors["model.norm.weight"])
        for names, home in ((matrices(network.shape), network.mats), (norms(network.shape), network.scales)):
            for name in names:
                for i in range(network.shape.layers):
                    home[_key(name)][i].copy_(tensors[f"model.layers.{i}.{name}.weight"])
