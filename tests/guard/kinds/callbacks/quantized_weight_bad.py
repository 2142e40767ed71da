"""A quantized weight takes each operator apart, and reads its scale on the host to do so."""

import torch
from torch import Tensor


class Quantized(Tensor):
    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    def whole(self):
        return self.codes.to(self.dtype) * self.scale.numpy(force=True)[0].item()  # finds: copy-to-host

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        return func(*(arg.whole() if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


codes = torch.ones(4, 4, dtype=torch.int8, device="cuda")
weight = Quantized(codes, torch.full((1,), 0.5, device="cuda"))
x = torch.ones(2, 4, device="cuda")
for _ in range(2):
    x = torch.mm(x, weight)
