"""masked_logits_bad, mended: two buffers take turns, each with an event that is waited for before it is used again."""

import torch

logits = torch.rand(2, 32, device="cuda")
ring = [torch.ones(2, 32, dtype=torch.bool, pin_memory=True) for _ in range(2)]  # san: ok(set-up)
copied = [torch.cuda.Event() for _ in ring]
for step in range(5):
    allowed = ring[step % 2]
    copied[step % 2].synchronize()  # san: ok(two steps ago)
    allowed[:, step] = False
    mask = allowed.to("cuda", non_blocking=True)
    copied[step % 2].record()
    scores = logits.to("cuda", copy=True)
    scores[~mask] = float("-inf")
    token = torch.multinomial(scores.softmax(-1), 1)
