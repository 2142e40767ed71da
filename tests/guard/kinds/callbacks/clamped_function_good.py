"""clamped_function_bad, mended: the bound is a tensor on the device, and so is what it bounds."""

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
        scale = torch.ones(1, device=grad.device)
        return torch.minimum(torch.maximum(grad * scale, -bound), bound), None


x = torch.ones(4, device="cuda", requires_grad=True)
bound = torch.full((1,), 0.5, device="cuda")
for _ in range(2):
    Clamped.apply(x, bound).sum().backward()
assert x.grad.is_cuda
