"""Activations are copied to the host on a stream of their own, and their storages freed by `resize_(0)` at once."""

import torch

compute, offload = torch.cuda.current_stream(), torch.cuda.Stream()
hosts = [torch.zeros(1024, pin_memory=True) for _ in range(3)]  # san: ok(set-up)
x, saved = torch.rand(1024, device="cuda"), []
for host in hosts:
    activation = torch.sin(x)  # finds: race
    offload.wait_stream(compute)
    with torch.cuda.stream(offload):
        host.copy_(activation, non_blocking=True)
    saved.append(activation)
    activation.untyped_storage().resize_(0)
offload.synchronize()  # san: ok(the end)
print(float(hosts[0].sum()))
