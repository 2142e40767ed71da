"""A tensor that carries a name checks what is computed from it, by a copy on the host."""

import torch


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, cls) and out.is_floating_point() and out.is_cuda:
            with torch._C.DisableTorchFunctionSubclass():
                checked = out.isfinite().all().to("cpu")  # finds: copy-to-host
                assert checked.item()
        return out


x = torch.ones(4, device="cuda").as_subclass(Named)
for _ in range(2):
    x = x * 0.5
