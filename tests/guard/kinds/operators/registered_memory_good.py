"""registered_memory_bad, mended: the host waits for the copy before it refills the memory."""

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
copied = torch.cuda.Event()
on_device = torch.empty(BYTES // 4, device="cuda")
for step in range(3):
    copied.synchronize()  # san: ok(a step later)
    staging.fill_(step)
    on_device.copy_(staging, non_blocking=True)
    copied.record()
    on_device.mul_(2)
torch.cuda.synchronize()  # san: ok(the end)
runtime.cudaHostUnregister(staging.data_ptr())
