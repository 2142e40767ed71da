"""A consumer polls a deque, to which the thread that downloads appends each buffer once it is there."""

import time
from collections import deque
from threading import Thread

import torch

STEPS = 3
buffers = [torch.empty(16, pin_memory=True) for _ in range(STEPS)]  # san: ok(once, at set-up)
done = deque()


def download():
    x = torch.ones(16, device="cuda")
    for buffer in buffers:
        x.mul_(2)
        buffer.copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()  # san: ok(on the thread that downloads, which launches nothing else)
        done.append((buffer, copied))


thread = Thread(target=download)
thread.start()
for _ in range(STEPS):
    while not done:
        time.sleep(0.001)
    buffer, copied = done.popleft()
    print(buffer.sum())
thread.join()
