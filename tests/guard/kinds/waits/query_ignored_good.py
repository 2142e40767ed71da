"""query_ignored_bad, mended: a buffer whose copy is not done stays in flight, and another one is filled."""

import torch

free = [torch.zeros(256, pin_memory=True) for _ in range(4)]  # san: ok(set-up)
flying = []
target = torch.zeros(256, device="cuda")
for step in range(8):
    free += [buffer for buffer, done in flying if done.query()]
    flying = [(buffer, done) for buffer, done in flying if all(buffer is not one for one in free)]
    if not free:
        flying[0][1].synchronize()  # san: ok(all buffers are in flight)
        free.append(flying.pop(0)[0])
    buffer, done = free.pop(), torch.cuda.Event()
    buffer.fill_(step)
    target.copy_(buffer, non_blocking=True)
    done.record()
    flying.append((buffer, done))
