"""Two ranks of a launcher pass blocks around a ring, and fill the next block while the last one is being sent."""
# runs: process

import os
import subprocess
import sys

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    block, other = torch.full((64,), float(rank), device=device), torch.empty(64, device=device)
    for _ in range(3):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, block, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        )
        block.add_(1)  # finds: race
        for work in works:
            work.wait()
        block, other = other, block
    assert block.device == device
    dist.destroy_process_group()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main()
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        sys.exit(subprocess.run(launcher, check=False).returncode)
