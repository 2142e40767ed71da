"""Forms of waits in code that torch calls back, each with one that does not wait, for san_truth.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def forms() -> dict[str, tuple[str, bool, Callable[[], Any]]]:
    """Return calls by name, with the rule and whether they wait."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    host = torch.ones(64, 64, requires_grad=True)

    def hooked(hook: Callable[[Tensor], Any]) -> Callable[[], Any]:
        y = x * 2
        y.register_hook(lambda grad: (hook(grad), None)[1])
        return lambda: y.sum().backward(retain_graph=True)

    up, down = host.to("cuda"), x.cpu()
    seed = torch.ones(64, 64)
    return {
        "a hook that reads, bad": ("host-read", True, hooked(lambda grad: grad[0, 0].tolist())),
        "a hook that adds, good": ("host-read", False, hooked(lambda grad: grad.add(1))),
        "the gradient of a host leaf, bad": ("copy-to-host", True, lambda: up.sum().backward(retain_graph=True)),
        "the gradient of a device leaf, good": ("copy-to-host", False, lambda: (x * 2).sum().backward()),
        "the gradient of a download, bad": ("upload", True, lambda: down.backward(seed, retain_graph=True)),
    }
