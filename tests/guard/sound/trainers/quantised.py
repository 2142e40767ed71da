"""Trains with fake quantisation by custom autograd functions: scales are kept on the device and learned there."""

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

dev = torch.device("cuda")


class Quantise(Function):
    """Round to `2 ** bits` levels; gradients pass straight through where nothing was clipped."""

    @staticmethod
    def forward(ctx, x, scale, bits):
        top = 2 ** (bits - 1) - 1
        levels = x / scale
        inside = (levels >= -top - 1) & (levels <= top)
        rounded = levels.round().clamp_(-top - 1, top)
        ctx.save_for_backward(inside, levels, rounded)
        return rounded * scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        inside, levels, rounded = ctx.saved_tensors
        grad_x = torch.where(inside, grad, 0.0)
        # As in "Learned Step Size Quantization": the step's own gradient.
        grad_scale = (grad * torch.where(inside, rounded - levels, rounded)).sum()
        return grad_x, grad_scale.view(1), None


class ScaleGradient(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class QuantLinear(nn.Linear):
    def __init__(self, inputs, outputs, bits=4):
        super().__init__(inputs, outputs, device=dev)
        self.bits = bits
        self.weight_scale = nn.Parameter(torch.ones(1, device=dev))
        self.input_scale = nn.Parameter(torch.full((1,), 0.2, device=dev))
        with torch.no_grad():
            self.weight_scale.copy_(2 * self.weight.abs().mean() / (2 ** (bits - 1) - 1) ** 0.5)

    def forward(self, x):
        factor = (self.weight.numel() * 2 ** (self.bits - 1)) ** -0.5
        weight = Quantise.apply(self.weight, ScaleGradient.apply(self.weight_scale, factor), self.bits)
        x = Quantise.apply(x, ScaleGradient.apply(self.input_scale, factor), self.bits)
        return nn.functional.linear(x, weight, self.bias)


def main():
    torch.manual_seed(1)
    model = nn.Sequential(QuantLinear(8, 16), nn.ReLU(), QuantLinear(16, 8))
    scales, weights = [], []
    for name, parameter in model.named_parameters():
        (scales if name.endswith("scale") else weights).append(parameter)
    optimizer = torch.optim.Adam([{"params": weights, "lr": 1e-2}, {"params": scales, "lr": 1e-3}], foreach=True)

    best = torch.full((), float("inf"), device=dev)
    first = None
    for _ in range(12):
        x = torch.randn(32, 8, device=dev)
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for scale in scales:
                scale.clamp_(min=1e-4)
        first = loss.detach() if first is None else first
        torch.minimum(best, loss.detach(), out=best)

    with torch.no_grad():
        levels = Quantise.apply(model[0].weight, model[0].weight_scale, model[0].bits) / model[0].weight_scale
        off = (levels - levels.round()).abs().amax()
    start, low, error = torch.stack((first, best, off)).tolist()  # san: ok(all numbers at once, at the end)
    assert low <= start and error < 1e-3
    print(f"loss {start:.3f}, best {low:.3f}")


main()
