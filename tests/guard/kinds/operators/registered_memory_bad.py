"""Memory that was mapped and registered with CUDA is refilled while the copy before may still read it."""

import mmap

import numpy as np
import torch

BYTES = 1 << 14
runtime = torch.cuda.cudart()


def registered() -> torch.Tensor:
    """Map memory, as a file of weights or another process's is, and register it."""
    memory = torch.from_numpy(np.frombuffer(mmap.mmap(-1, BYTES), np.float32))
    torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), BYTES, 0))
    assert memory.is_pinned()
    return memory


staging = registered()
on_device = torch.empty(BYTES // 4, device="cuda")
for step in range(3):
    staging.fill_(step)  # finds: race
    on_device.copy_(staging, non_blocking=True)
    on_device.mul_(2)
torch.cuda.synchronize()  # san: ok(the end)
runtime.cudaHostUnregister(staging.data_ptr())
