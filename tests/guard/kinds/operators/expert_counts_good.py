"""expert_counts_bad, mended: the ends of the experts' parts stay on the device, as a grouped product takes them."""

import torch

EXPERTS, WIDTH = 4, 8
weights = torch.randn(EXPERTS, WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
router = torch.nn.Linear(WIDTH, EXPERTS, device="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def layer(x: torch.Tensor) -> torch.Tensor:
    expert = router(x).argmax(-1).int()
    order = expert.argsort()
    counts = torch.histc(expert, bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    out = torch.nn.functional.grouped_mm(x[order], weights, offs=ends)
    return torch.empty_like(out).index_copy_(0, order, out)


x = torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
for _ in range(2):
    x = layer(x)
