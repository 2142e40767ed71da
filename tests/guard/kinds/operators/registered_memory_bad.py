"""Memory that was mapped and registered with CUDA is refilled while the copy before may still read it."""

import mmap

import numpy as np
import torch

BYTES = 1 << 14
runtime = torch.cuda.cudart()
mapped = mmap.mmap(-1, BYTES)
staging = torch.from_numpy(np.frombuffer(mapped, np.float32))
torch.cuda.check_error(runtime.cudaHostRegister(staging.data_ptr(), BYTES, 0))
assert staging.is_pinned()

on_device = torch.empty(BYTES // 4, device="cuda")
for step in range(3):
    staging.fill_(step)  # finds: race
    on_device.copy_(staging, non_blocking=True)
    on_device.mul_(2)
torch.cuda.synchronize()  # san: ok(the end)
runtime.cudaHostUnregister(staging.data_ptr())
