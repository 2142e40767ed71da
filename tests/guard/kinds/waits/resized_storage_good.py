"""resized_storage_bad, mended: the next gathering comes after the computation with the last weight."""

import torch

compute, gather = torch.cuda.current_stream(), torch.cuda.Stream()
shard = torch.rand(1024, device="cuda")
whole = torch.empty(4096, device="cuda")
size, x = whole.untyped_storage().nbytes(), torch.rand(4096, device="cuda")
whole.untyped_storage().resize_(0)
gather.wait_stream(compute)
for _ in range(3):
    with torch.cuda.stream(gather):
        whole.untyped_storage().resize_(size)
        whole.copy_(shard.repeat(4))
    compute.wait_stream(gather)
    x = x * whole
    whole.untyped_storage().resize_(0)
    gather.wait_stream(compute)
