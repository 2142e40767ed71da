"""checkpointed_input_bad, mended: the host waits for the load of the second forward, which is the last one."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

host = torch.zeros(4, pin_memory=True)  # san: ok(set-up)
layer = nn.Linear(4, 4, device="cuda")
loaded = torch.cuda.Event()


def block(x):
    bias = host.to("cuda", non_blocking=True)
    loaded.record()
    return torch.tanh(layer(x) + bias)


x = torch.ones(3, 4, device="cuda", requires_grad=True)
for step in range(2):
    host.fill_(step)
    y = checkpoint(block, x, use_reentrant=False)
    y.sum().backward()
    loaded.synchronize()  # san: ok(the second forward has read it, too)
