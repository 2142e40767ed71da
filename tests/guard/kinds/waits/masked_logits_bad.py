"""A sampler masks logits by a number and copies them; then the next step's allowed tokens are staged too early."""

import torch

logits = torch.rand(2, 32, device="cuda")
allowed = torch.ones(2, 32, dtype=torch.bool, pin_memory=True)  # san: ok(set-up)
for step in range(3):
    allowed[:, step] = False  # finds: race
    mask = allowed.to("cuda", non_blocking=True)
    scores = logits.to("cuda", copy=True)
    scores[~mask] = float("-inf")
    token = torch.multinomial(scores.softmax(-1), 1)
