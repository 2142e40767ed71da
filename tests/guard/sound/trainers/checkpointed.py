"""Recomputes activations in backward: blocks alternate between the two kinds of torch's checkpoint, with dropout."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

torch.manual_seed(5)
DEVICE = torch.device("cuda", 0)
HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 16, 2, 4, 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, device=DEVICE)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, device=DEVICE)
        self.out = nn.Linear(HIDDEN, HIDDEN, device=DEVICE)
        self.mlp = nn.Sequential(
            nn.LayerNorm(HIDDEN, device=DEVICE),
            nn.Linear(HIDDEN, 2 * HIDDEN, device=DEVICE),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * HIDDEN, HIDDEN, device=DEVICE),
        )

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, HIDDEN // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, HIDDEN, device=DEVICE)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.tail = nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN, device=DEVICE), nn.Tanh()) for _ in "ab"))
        self.head = nn.Linear(HIDDEN, vocab, bias=False, device=DEVICE)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for at, block in enumerate(self.blocks):
            if not self.training:
                x = block(x)
            elif at % 2:
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = checkpoint(block, x, use_reentrant=False)
        x = checkpoint_sequential(self.tail, 2, x, use_reentrant=False)
        return self.head(x)


def main() -> None:
    vocab = 32
    model = Model(vocab).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    ids = torch.randint(0, vocab, (BATCH, LENGTH + 1), device=DEVICE)
    history = []
    for _ in range(4):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        history.append(loss.detach())

    model.eval()
    with torch.no_grad():
        right = (model(ids[:, :-1]).argmax(-1) == ids[:, 1:]).float().mean()
    *losses, share = torch.stack([*history, right]).cpu().tolist()  # san: ok(the end)
    assert losses[-1] < losses[0]
    print([round(loss, 2) for loss in losses], round(share, 2))


main()
