"""Masked language modelling with ragged rows: padding, random masks and their loss at fixed shapes, then an evaluation
that downloads its answer once.
"""

import numpy as np
import torch
from torch import Tensor, nn

DEVICE = "cuda"
VOCAB, MASK, PAD, LONGEST, WIDTH = 24, 1, 0, 12, 16


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD, device=DEVICE)
        self.places = nn.Parameter(0.02 * torch.randn(LONGEST, WIDTH, device=DEVICE))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, device=DEVICE)
        self.norm = nn.LayerNorm(WIDTH, device=DEVICE)
        self.head = nn.Linear(WIDTH, VOCAB, device=DEVICE)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places[: ids.shape[1]]
        bias = torch.zeros(ids.shape, device=ids.device).masked_fill_(ids == PAD, float("-inf"))
        mixed, _ = self.attention(hidden, hidden, hidden, key_padding_mask=bias, need_weights=False)
        return self.head(self.norm(hidden + mixed))


class Corpus:
    """Sentences on the host, uploaded as one padded table. Their lengths stay beside it, as numbers of the host."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(4, LONGEST + 1, rows).tolist()
        padded = torch.zeros(rows, LONGEST, dtype=torch.int64, pin_memory=True)
        for row, length in enumerate(self.lengths):
            start = int(rng.integers(2, VOCAB))
            padded[row, :length] = torch.from_numpy(2 + (start + np.arange(length)) % (VOCAB - 2))
        self.table = torch.empty(rows, LONGEST, dtype=torch.int64, device=DEVICE)
        self.table.copy_(padded, non_blocking=True)
        # Held so that no other buffer is given its memory while the copy reads it.
        self._padded = padded

    def batch(self, start: int, rows: int) -> Tensor:
        longest = max(self.lengths[start : start + rows])
        return self.table[start : start + rows, :longest]


def hide(ids: Tensor, generator: torch.Generator, share: float = 0.3) -> tuple[Tensor, Tensor]:
    """Replace some tokens by MASK, or by random ones; returns the inputs and where the loss counts."""
    chance = torch.rand(ids.shape, generator=generator, device=ids.device)
    chosen = (chance < share) & (ids != PAD)
    random = torch.randint(2, VOCAB, ids.shape, generator=generator, device=ids.device)
    inputs = torch.where(chosen & (chance < 0.8 * share), MASK, ids)
    return torch.where(chosen & (chance >= 0.9 * share), random, inputs), chosen


def masked_loss(logits: Tensor, ids: Tensor, chosen: Tensor) -> Tensor:
    each = nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    return torch.where(chosen, each, 0.0).sum() / chosen.sum().clamp(min=1)


def main() -> None:
    torch.manual_seed(70)
    generator = torch.Generator(DEVICE).manual_seed(71)
    model, corpus, rows = Tagger(), Corpus(24, seed=72), 6
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, foreach=True)
    for epoch in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 / (1 + epoch)
        for start in range(0, 24, rows):
            ids = corpus.batch(start, rows)
            inputs, chosen = hide(ids, generator)
            loss = masked_loss(model(inputs), ids, chosen)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    model.eval()
    hits, count = (torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(2))
    with torch.inference_mode():
        for start in range(0, 24, rows):
            ids = corpus.batch(start, rows)
            inputs, chosen = hide(ids, generator)
            hits += ((model(inputs).argmax(-1) == ids) & chosen).sum()
            count += chosen.sum()
    right, total = torch.stack((hits, count)).tolist()  # san: ok(the evaluation's one download)
    assert 0 < total < 24 * LONGEST
    print(f"{right} of {total} hidden tokens are right")


main()
