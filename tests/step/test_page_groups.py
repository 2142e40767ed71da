"""Two page groups in one step: each has its part of the page table and a memory of its own."""

from __future__ import annotations

import random

import pytest
import torch
from grouped_model import WINDOW, GroupedModel, continue_grouped
from step_harness import Bench, request

from gapless.base.records import Admission, Chunk, PageWrite
from gapless.kernels import native, plain
from gapless.kernels.tables import Tables
from gapless.model.seam import StepInputs
from gapless.step.inputs import Batch, split_groups

VOCAB, SIZE, LONGEST, PAGES = 97, 4, 64, 60
ENTRIES = LONGEST // SIZE


class Windowed:
    """Rows of a model with groups; window pages go to other rows as soon as no later position reads them."""

    def __init__(self, kernels, pages=9):
        self.bench = Bench(
            GroupedModel(VOCAB, LONGEST), rows=3, max_len=LONGEST, pages=PAGES, size=SIZE, kernels=kernels
        )
        self.free = list(range(1, 1 + pages))
        self.held = {}
        self.handed = []
        """Pages of the window group in the order in which they were handed out"""
        self.fresh = iter(range(1, PAGES))
        self.known, self.found = {}, {}

    def window_pages(self, row, start, size):
        """Page writes for the positions that the row computes next; what lies before their window is given back."""
        held = self.held.setdefault(row, {})
        for entry in [entry for entry in held if (entry + 1) * SIZE <= start - WINDOW + 1]:
            self.free.append(held.pop(entry))
        writes = []
        for entry in range(start // SIZE, (start + size - 1) // SIZE + 1):
            if entry not in held:
                held[entry] = self.free.pop(0)
                self.handed.append(held[entry])
                writes.append(PageWrite(row, ENTRIES + entry, held[entry]))
        return writes

    def begin(self, tokens, decode=()):
        """Admits a prompt and runs it in chunks of 5 tokens beside decode steps of others."""
        asked = request(tokens=tokens, temperature=0.0, max_len=LONGEST, key=len(self.known))
        bench, count = self.bench, len(tokens)
        row = bench.table.take(asked.key, asked.tokens)
        bench.requests[row] = asked
        self.known[row], self.found[row] = count, []
        new = (Admission(row, int(bench.table.generation[row]), asked.key, 0, count),)
        writes = [PageWrite(row, entry, next(self.fresh)) for entry in range(ENTRIES)]
        for start in range(0, count, 5):
            size = min(5, count - start)
            writes += self.window_pages(row, start, size)
            self.step(decode, (Chunk(row, start, size, start + size == count),), new, writes)
            new, writes = (), []
        return row

    def step(self, decode=(), chunks=(), new=(), writes=()):
        writes = list(writes)
        for row in decode:
            writes += self.window_pages(row, self.known[row] - 1, 1)
        outbox = self.bench.run(decode, chunks, new, writes)
        for row, token in zip(outbox.rows.tolist(), outbox.tokens.flatten().tolist(), strict=True):
            self.known[row] += 1
            self.found[row].append(token)


@pytest.fixture(params=["torch", "native"])
def kernels(request):
    found = plain.KERNELS if request.param == "torch" else native.load()
    return found or pytest.skip("no C++ kernels here")


def test_tokens_are_those_of_the_direct_computation_while_pages_of_the_window_go_round(kernels):
    world, rng = Windowed(kernels), random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in (3, 17, 30)]
    rows = [world.begin(prompts[0])]
    rows.append(world.begin(prompts[1], rows))
    rows.append(world.begin(prompts[2], rows))
    for _ in range(20):
        world.step(rows)
    for row, prompt in zip(rows, prompts, strict=True):
        found = world.found[row]
        assert len(found) > 20 and found == continue_grouped(prompt, len(found), VOCAB)
    assert len(world.handed) > 2 * len(set(world.handed)), "pages were overwritten by other rows"


def test_one_page_less_than_the_window_reads_and_tokens_differ(kernels):
    """The model does read its window: what is given back too early changes tokens."""
    world, prompt = Windowed(kernels), list(range(12))
    row = world.begin(prompt)
    spoilt = world.held[row][world.known[row] // SIZE - 1]
    world.bench.program.cache.group(1).data[spoilt] += 1
    world.step((row,))
    assert world.found[row][1:] != continue_grouped(prompt, 2, VOCAB)[1:]


def test_slots_of_the_second_group_are_those_of_its_part_of_the_table():
    """Rows of one and of several tokens, an inert row, and tokens of no row."""
    tables = Tables.new(5, LONGEST, 2 * ENTRIES, torch.device("cpu"))
    tables.pages.copy_(torch.randint(1, PAGES, tables.pages.shape))
    cache = GroupedModel(VOCAB, LONGEST).new_cache(PAGES, SIZE, torch.device("cpu"))
    rows = torch.tensor([4, 2, 5])
    owner = torch.tensor([4, 2, *[5] * 6, 0, 0])
    # The inert row's position is past the end of the table.
    positions = torch.tensor([9, LONGEST + 7, *range(13, 19), 0, 0])
    active = torch.tensor([True, False, *[True] * 6, False, False])
    page = tables.pages[owner, (positions // SIZE).clamp(max=ENTRIES - 1)].long()
    slots = torch.where(active, page * SIZE + positions % SIZE, 0)
    starts = torch.tensor([0, 1, 2, 8])
    inputs = StepInputs(positions, positions, slots, torch.tensor([10, 1, 19]), rows, tables.pages, 99, starts)
    split = split_groups(Batch(inputs, starts[1:] - 1), cache).inputs
    second = split.group(1)
    want = [
        int(tables.pages[row, ENTRIES + position // SIZE]) * SIZE + position % SIZE if live else 0
        for row, position, live in zip(owner.tolist(), positions.tolist(), active.tolist(), strict=True)
    ]
    assert second.slots.tolist() == want
    assert torch.equal(split.group(0).slots, slots)
    assert torch.equal(split.pages, tables.pages[rows, :ENTRIES].long())
    assert torch.equal(second.pages, tables.pages[rows, ENTRIES:].long())
    alone = inputs._replace(starts=None, slots=slots[:3], positions=positions[:3], ids=positions[:3])
    assert split_groups(Batch(alone), cache).inputs.group(1).slots.tolist()[:2] == want[:2]


def test_one_group_is_left_as_it_is():
    model = Bench(GroupedModel(VOCAB, 32)).model
    cache = model.new_cache(7, SIZE, torch.device("cpu"))
    batch = Batch(StepInputs(*[torch.tensor([1])] * 5, torch.ones(2, 4), 3))
    assert split_groups(batch, cache.group(1)) is batch
