"""named_tensor_bad, mended: what was not finite is counted on the device."""

import torch

wrong = torch.zeros((), device="cuda")


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, cls) and out.is_floating_point() and out.is_cuda:
            with torch._C.DisableTorchFunctionSubclass():
                wrong.add_(out.isfinite().logical_not().sum())
        return out


x = torch.ones(4, device="cuda").as_subclass(Named)
for _ in range(2):
    x = x * 0.5
