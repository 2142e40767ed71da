"""Rows of the class order: two streams, or the host and a stream, without a fence between them."""

from __future__ import annotations

import pytest
from harness import VOCAB, Job, LookingModel, checksum_loop, model_loop, script, sizes
from scenes import broken, must_fail, play, request, tokens

from gapless.kernels import plain
from gapless.loop.build import Sizes
from gapless.testing.sim import SimDevice, SimStream

pytestmark = pytest.mark.unguarded

SEEDS = range(8)


@pytest.mark.seeds
def test_lifetime_L1_a_forward_reads_the_page_table_of_its_own_step():
    """The scheduler wrote page table rows while the running forward still read them. Here page table entries travel in
    the packet of the step that needs them, and a row is rewritten only when no step in flight has it."""

    class Looking(LookingModel):
        def __init__(self, max_len):
            super().__init__(VOCAB, max_len)
            self.promised = []

        def look(self, inputs, plan, cache):
            for row, pages in enumerate(self.promised.pop(0)):
                width = min(len(pages), inputs.pages.shape[1])
                assert inputs.pages[row, :width].tolist() == pages[:width], "not the page table of this step"

    def scene(tweak=lambda loop: None):
        for seed in SEEDS:
            model = Looking(48)
            loop = model_loop(model, SimDevice(seed, "lazy"), Sizes(3, 48, 25, 4, 9, 32), 8)
            _promise(loop, model)
            tweak(loop)
            play(loop, [Job(request(key, tokens(key, 7), 25), key, 2 if key % 3 == 1 else None) for key in range(9)])

    scene()

    def table_written_by_the_host(loop):
        table, retire = loop.launcher.executor.program.tables.pages, loop.rows.retire

        def clear(row, last_step):
            table[row] = 0
            retire(row, last_step)

        loop.rows.retire = clear

    with must_fail():
        scene(table_written_by_the_host)


def _promise(loop, model):
    """At each launch, note the pages of every row of the batch, in batch order."""
    launch = loop.launcher.launch

    def noted(plan, requests):
        rows = [*plan.decode, *(chunk.row for chunk in plan.chunks)]
        model.promised.append([list(loop.planner.by_row[row].pages) for row in rows])
        return launch(plan, requests)

    loop.launcher.launch = noted


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
