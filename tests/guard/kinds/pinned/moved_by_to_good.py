"""A batch is moved to the device from pinned memory by `to`: that is written again when it has moved."""

import torch

staged = torch.zeros(64).pin_memory()
moved = torch.cuda.Event()
batch = staged.to("cuda", non_blocking=True)
moved.record()
moved.synchronize()  # san: ok(the memory of the next batch)
staged.fill_(1)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
batch.record_stream(side)
back = torch.empty(64, pin_memory=True)
with torch.cuda.stream(side):
    back.copy_(batch, non_blocking=True)
torch.cuda.current_stream().wait_stream(side)
again = back.to("cuda", non_blocking=True)
