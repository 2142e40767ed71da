"""Contrastive pairs of two encoders: a learned temperature, a queue of negatives in a ring on the device, and retrieval
scores by gather.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

device = torch.device("cuda")
BATCH, QUEUE, DIM = 8, 24, 16


def encoder(inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 32, device=device), nn.GELU(), nn.Linear(32, DIM, device=device))


class Negatives(nn.Module):
    """The embeddings of earlier batches. The place of the next is a number of the host: no tensor is asked."""

    keys: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(QUEUE, DIM, device=device), dim=-1))
        self.place = 0

    @torch.no_grad()
    def push(self, keys: torch.Tensor) -> None:
        self.keys[self.place : self.place + len(keys)].copy_(keys)
        self.place = (self.place + len(keys)) % QUEUE


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = encoder(12), encoder(10)
        self.slow = encoder(10)
        self.slow.load_state_dict(self.texts.state_dict())
        self.slow.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((), math.log(10.0), device=device))
        self.negatives = Negatives()
        self.register_buffer("own", torch.arange(BATCH, device=device), persistent=False)

    @torch.no_grad()
    def follow(self, share: float = 0.1) -> None:
        for slow, fast in zip(self.slow.parameters(), self.texts.parameters(), strict=True):
            slow.lerp_(fast, share)

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = F.normalize(self.images(images), dim=-1), F.normalize(self.texts(texts), dim=-1)
        with torch.no_grad():
            keys = F.normalize(self.slow(texts), dim=-1)
        scale = self.scale.clamp(max=math.log(100.0)).exp()
        in_batch = scale * left @ right.T
        queued = scale * left @ self.negatives.keys.clone().T
        loss = F.cross_entropy(torch.cat((in_batch, queued), dim=1), self.own)
        loss = (loss + F.cross_entropy(in_batch.T, self.own)) / 2
        own = in_batch.detach().gather(1, self.own[:, None])
        rank = (in_batch.detach() > own).sum(1)
        self.negatives.push(keys)
        return loss, (rank == 0).float().mean()


def main() -> None:
    torch.manual_seed(17)
    model = Pairs()
    decayed = [one for one in model.parameters() if one.requires_grad and one.ndim > 1]
    plain = [one for one in model.parameters() if one.requires_grad and one.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, fused=True)
    table = torch.zeros(10, 2, device=device)
    for step in range(10):
        hidden = torch.randn(BATCH, 6, device=device)
        images = torch.cat((hidden, hidden.square()), dim=1)
        texts = F.pad(hidden.sin(), (0, 4))
        loss, first = model(images, texts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow()
        table[step, 0].copy_(loss.detach())
        table[step, 1].copy_(first)
    rows = table.tolist()  # san: ok(when the last step has been launched)
    assert rows[-1][0] < rows[0][0]
    print(f"loss {rows[0][0]:.2f} to {rows[-1][0]:.2f}, first in {rows[-1][1]:.0%}")


main()
