"""The backward of an operator for CUDA asks on the host whether anything was clamped."""

import torch


@torch.library.custom_op("kinds_clamp_bad::clamped", mutates_args=(), device_types="cuda")
def clamped(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-1, 1)


@torch.library.custom_op("kinds_clamp_bad::clamped_backward", mutates_args=(), device_types="cuda")
def clamped_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    outside = x.abs() > 1
    if not outside.any():  # finds: host-read
        return grad.clone()
    return grad.masked_fill(outside, 0)


def backward(ctx, grad):
    return clamped_backward(grad, *ctx.saved_tensors)


clamped.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))

layer = torch.nn.Linear(4, 4, device="cuda")
for _ in range(2):
    clamped(layer(torch.randn(3, 4, device="cuda"))).sum().backward()
assert layer.weight.grad.is_cuda
