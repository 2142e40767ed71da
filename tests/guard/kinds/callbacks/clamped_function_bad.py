"""A function of autograd bounds its gradient by a number that its backward reads on the host."""

import torch
from torch.autograd import Function


class Clamped(Function):
    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(bound)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (bound,) = ctx.saved_tensors
        most = bound.cpu().numpy()[0]  # finds: copy-to-host
        return grad.clamp(-float(most), float(most)), None


x = torch.ones(4, device="cuda", requires_grad=True)
bound = torch.full((1,), 0.5, device="cuda")
for _ in range(2):
    Clamped.apply(x, bound).sum().backward()
