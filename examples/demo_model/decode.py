"""Greedy decoding of many prompts at once with the training network: a key-value cache, float32, no engine."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from examples.demo_model.documents import Conversation
from examples.demo_model.network import Network, Shape, mlp, normed, project, restore, rotation
from examples.demo_model.tokenizer import end_ids, segments


def prompt_text(conversation: Conversation) -> str:
    """The templated prompt of a conversation that ends with the user's turn."""
    if conversation.plain:
        return conversation.messages[-1][1]
    return "".join(text for text, _ in segments(conversation)) + "<|im_start|>assistant\n"


class Decoder:
    """A model directory, ready to answer."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.network = Network(Shape(self.tokenizer.get_vocab_size()))
        restore(self.network, load_file(str(directory / "model.safetensors")))
        self.ends = end_ids(self.tokenizer)

    @torch.inference_mode()
    def greedy(self, prompts: list[str], limit: int = 320) -> list[str]:
        """The replies, each at most `limit` tokens, without the end mark."""
        ids = [self.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
        cache = _Cache(self.network, ids, limit)
        token, written = cache.prefill(ids), []
        ends = torch.tensor(self.ends)
        done = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(limit):
            written.append(token)
            done |= torch.isin(token, ends)
            if bool(done.all()):
                break
            token = cache.step(token)
        return [self.text_of(row) for row in torch.stack(written, 1).tolist()]

    def text_of(self, ids: list[int]) -> str:
        """The text of generated ids up to the first end mark."""
        cut = min((ids.index(end) for end in self.ends if end in ids), default=len(ids))
        return str(self.tokenizer.decode(ids[:cut], skip_special_tokens=False))


class _Cache:
    """Keys and values of every row, right-padded: row r holds `length[r]` tokens."""

    def __init__(self, network: Network, ids: list[list[int]], room: int) -> None:
        self.network, self.shape = network, network.shape
        self.length = torch.tensor([len(row) for row in ids])
        self.size = int(self.length.max()) + room
        sizes = (2, self.shape.layers, len(ids), self.shape.kv_heads, self.size, self.shape.head)
        self.keys, self.values = torch.zeros(sizes)

    def prefill(self, ids: list[list[int]]) -> Tensor:
        """Reads the prompts; returns the first token of every row."""
        width = int(self.length.max())
        table = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        rows = torch.arange(len(ids))
        hidden = self._forward(table, torch.arange(width).expand(len(ids), width))
        return self.network.logits(hidden[rows, self.length - 1]).argmax(-1)

    def step(self, token: Tensor) -> Tensor:
        """Reads one token a row; returns the next."""
        hidden = self._forward(token[:, None], self.length[:, None])
        self.length = self.length + 1
        return self.network.logits(hidden[:, 0]).argmax(-1)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        shape, network = self.shape, self.network
        cos, sin = (table[:, None] for table in rotation(positions, shape, torch.float32))
        seen = torch.arange(self.size) <= positions[:, None, :, None]
        x = F.embedding(ids, network.embedding)
        for layer in range(shape.layers):
            weights = network.layer(layer)
            q, k, v = project(normed(x, weights["input_layernorm"], shape.eps), weights, cos, sin, shape)
            x = x + self._attend(layer, q, k, v, positions, seen) @ weights["self_attn_o_proj"].mT
            x = x + mlp(normed(x, weights["post_attention_layernorm"], shape.eps), weights)
        return normed(x, network.norm, shape.eps)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        rows = torch.arange(len(positions))[:, None]
        for cache, new in ((self.keys[layer], k), (self.values[layer], v)):
            cache[rows, :, positions] = new.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, self.keys[layer], self.values[layer], seen, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)
