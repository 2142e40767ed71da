"""Watches a deep network by hooks: norms of activations and gradients are written into one table on the device, and the
table is downloaded every few steps, a step late.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

DEVICE = torch.device("cuda")
STEPS, EVERY = 6, 3


class Norms:
    """A row for each watched module: norm of its output, norm of its gradient, share of zeros."""

    def __init__(self, model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
        self.names = [name for name, one in model.named_modules() if isinstance(one, kinds)]
        self.table = torch.zeros(len(self.names), 3, device=DEVICE)
        self.home = torch.zeros(len(self.names), 3, pin_memory=True)
        self.copied = torch.cuda.Event()
        self.is_coming = False
        self.handles = []
        modules = dict(model.named_modules())
        for row, name in enumerate(self.names):
            self.handles.append(modules[name].register_forward_hook(partial(self._forward, row)))
            self.handles.append(modules[name].register_full_backward_hook(partial(self._backward, row)))

    def _forward(self, row: int, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        with torch.no_grad():
            self.table[row, 0].copy_(torch.linalg.vector_norm(out.float()))
            self.table[row, 2].copy_((out == 0).float().mean())

    def _backward(self, row: int, module: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        self.table[row, 1].copy_(torch.linalg.vector_norm(outputs[0].float()))

    def send(self) -> None:
        self.home.copy_(self.table, non_blocking=True)
        self.copied.record()
        self.is_coming = True

    def take(self) -> dict[str, list[float]] | None:
        """Return what was sent, once it has come."""
        if not self.is_coming:
            return None
        self.copied.synchronize()  # san: ok(sent a whole step ago)
        self.is_coming = False
        return dict(zip(self.names, self.home.tolist(), strict=True))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Scaled(nn.Module):
    """Scales gradients on their way back, by a hook of the tensor."""

    def __init__(self, inner: nn.Module, by: float) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        if out.requires_grad:
            scale: Callable[[Tensor], Tensor] = lambda grad: grad * self.by  # noqa: E731
            out.register_hook(scale)
        return out


def main() -> None:
    torch.manual_seed(9)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16, device=DEVICE), nn.ReLU())]
    model = nn.Sequential(*layers, Scaled(nn.Linear(16, 4, device=DEVICE), 0.5))
    norms = Norms(model, (nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        # Backward hooks of the first layer need a gradient that goes through it.
        x = torch.randn(10, 16, device=DEVICE, requires_grad=True)
        loss = nn.functional.cross_entropy(model(x), x.detach()[:, :4].argmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        late = norms.take()
        if late is not None:
            seen.append(late)
        if step % EVERY == 0:
            norms.send()
    norms.remove()
    assert len(seen) == 2 and all(rows["0"][0] > 0 and rows["0"][1] > 0 for rows in seen)
    for name, (out, grad, zeros) in seen[-1].items():
        print(f"{name}: out {out:.2f}, grad {grad:.4f}, zeros {zeros:.2f}")


main()
