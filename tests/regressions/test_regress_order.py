"""Rows of the class order: two streams, or the host and a stream, without a fence between them."""

from __future__ import annotations

import pytest
from harness import checksum_loop, script, sizes
from scenes import broken, play

from gapless.kernels import plain
from gapless.testing.sim import SimDevice, SimStream

pytestmark = pytest.mark.unguarded

SEEDS = range(8)


@pytest.mark.seeds
def test_lifetime_L2_no_fence_depends_on_the_kind_of_device():
    """The barrier was there only where the device called itself CUDA, so another vendor's had none. Here no fence asks
    for the kind: under any name a device gets the same operations in the same order, and the same tokens."""

    def operations(kind, seed):
        device = SimDevice(seed)
        device.kind = kind
        shape = sizes(seed)
        # The kernels are another's choice, and CUDA's do not run here.
        play(checksum_loop(device, shape, 4, kernels=plain.KERNELS), script(seed, shape.max_len))
        return list(device.trace)

    def scene():
        for seed in SEEDS[:4]:
            assert operations("rocm", seed) == operations("npu", seed) == operations("cpu", seed)
            assert operations("cuda", seed) == operations("cpu", seed)

    scene()

    def where_it_is_cuda(stream, fence):
        if stream.device.kind == "cuda":
            after(stream, fence)

    after = SimStream.after
    with broken(SimStream, "after", where_it_is_cuda):
        scene()
