"""Triton's kernels on a GPU under capture, and with an outbox in the host's own memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gapless.base.records import NO_TOKEN

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from kernels.products import random
from kernels.sampling_oracle import ALL, Setting, tables_of
from kernels.step_tables import LONGEST, MARK, MAX_PAGES, PAGE_SIZE, SLOTS, STEP, packet

from gapless.kernels import cut_triton, sampling_triton
from gapless.kernels.activation_triton import triton_activate
from gapless.kernels.begin_triton import triton_begin_decode
from gapless.kernels.finish_triton import finish
from gapless.kernels.kinds import Activation
from gapless.kernels.layout import ACTIVE, LINE_TOKENS, MAX_LEN, PARAM_COLUMNS, STATE_COLUMNS
from gapless.kernels.norm_triton import triton_add_rms_norm, triton_rms_norm
from gapless.kernels.rope_triton import triton_angles, triton_rope_and_write
from gapless.kernels.tables import Tables


def outboxes(where: str, rows: int) -> Tensor:
    if where == "pinned":
        return torch.empty(SLOTS, 4 * rows, dtype=torch.int32, pin_memory=True)
    return torch.empty(SLOTS, 4 * rows, dtype=torch.int32, device="cuda")


def test_a_host_that_polls_the_header_finds_the_lines():
    """The engine waits for an event; this is the fence behind the lines alone."""
    rows, lines = list(range(1, 257)), outboxes("pinned", 257)
    state = torch.zeros(257, STATE_COLUMNS, dtype=torch.int32)
    state[1:, ACTIVE] = 1
    params = torch.full((257, PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32)
    params[:, MAX_LEN] = LONGEST
    state, params = state.cuda(), params.cuda()
    history = torch.zeros(257, LONGEST, dtype=torch.int32, device="cuda")
    words = packet(rows, []).cuda()  # each step makes it the next one's
    there, good = torch.tensor(rows, dtype=torch.int32, device="cuda"), torch.ones(256, dtype=torch.bool, device="cuda")
    world = Tables(state, params, history, history, history[:, None, :0])
    out = torch.empty(256, 1, dtype=torch.int32, device="cuda")
    for turn in range(LONGEST - 2):
        tokens, slot = torch.randint(1000, (256,), device="cuda"), turn % SLOTS
        lines.fill_(MARK)
        torch.cuda.synchronize()
        view = lines[slot].numpy().reshape(-1, 4)
        finish(words, there, None, tokens[:, None], good, world, lines, out)
        end = time.monotonic() + 10
        while view[0, 0] != STEP + turn:
            assert time.monotonic() < end
        seen = view[1:, LINE_TOKENS].copy()
        assert seen.tolist() == tokens.tolist()


def captured(program: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """`program` runs twice before it is captured, as the engine does it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            program()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        program()
    return graph


def test_a_captured_layer_and_its_sampling_follow_their_buffers():
    rows, hidden, heads, kv_heads, dim = 5, 64, 4, 2, 16
    dtype = torch.bfloat16
    weight, table = random((hidden,), torch.float32, "cuda", 1), random((LONGEST, dim), torch.float32, "cuda", 2)
    head_norm = random((heads + kv_heads, dim), torch.float32, "cuda", 3)
    settings = [Setting(t, top_k=k, top_p=0.9, seed=t_k) for t, k, t_k in ((0.0, 9, 1), (1.0, 0, 2), (0.7, 40, 3))]
    made = tables_of([*settings, Setting(), Setting(0.0)], "cuda")
    index = torch.tensor([1, 2, 2, 2], dtype=torch.int32, device="cuda")

    def program(x, delta, qkv, cache, positions, slots, gate_up, logits):
        y = triton_rms_norm(x, weight, 1e-6)
        triton_rope_and_write(qkv, head_norm, 1e-6, triton_angles(positions, table), slots, cache, 1)
        y = triton_add_rms_norm(x, delta + y, weight, 1e-6)
        cut_triton.cut(logits, index, *made, ALL)
        return (
            y,
            x,
            qkv,
            cache,
            triton_activate(gate_up, Activation.SILU, True),
            *sampling_triton.sample(logits, *made, None),
            made[1].state.clone(),
        )

    def inputs(seed):
        return [
            random((rows, hidden), dtype, "cuda", seed),
            random((rows, hidden), dtype, "cuda", seed + 1),
            random((rows, heads + 2 * kv_heads, dim), dtype, "cuda", seed + 2),
            random((4, 2, 2, PAGE_SIZE, kv_heads, dim), dtype, "cuda", seed + 3),
            torch.randperm(LONGEST, device="cuda")[:rows],
            torch.randperm(4 * PAGE_SIZE, device="cuda")[:rows],
            random((rows, 2 * hidden), dtype, "cuda", seed + 4),
            random((rows, 5000), torch.float32, "cuda", seed + 5),
        ]

    fixed, results = inputs(0), []
    graph = captured(lambda: results.append(program(*fixed)))
    for seed in (100, 200):
        fresh = inputs(seed)
        for buffer, value in zip(fixed, fresh, strict=True):
            buffer.copy_(value)
        graph.replay()
        for got, expected in zip(results[-1], program(*fresh), strict=True):
            assert torch.equal(got, expected)


def test_captured_steps_go_on_by_themselves():
    """One graph of begin and finish, replayed until every row has met its length; outboxes in turn, pinned."""
    count, page_size = 6, PAGE_SIZE
    rows = [3, 1, 4, 2, 0, 0]
    state = torch.zeros(5, STATE_COLUMNS, dtype=torch.int32)
    params = torch.full((5, PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32)
    for row in range(1, 5):
        state[row, :7] = torch.tensor([row * 11, 1, 2, 1, 0, 0, 0])
        params[row, MAX_LEN] = 2 + row * 3
    params[0] = 0
    start = state.clone()
    state, params = state.cuda(), params.cuda()
    history = torch.zeros(5, LONGEST, dtype=torch.int32, device="cuda")
    pages = torch.zeros(5, MAX_PAGES, dtype=torch.int32, device="cuda")
    pages[1:] = torch.arange(1, 1 + 4 * MAX_PAGES, dtype=torch.int32, device="cuda").view(4, MAX_PAGES)
    words, lines = packet(rows, [(0, 0)]).cuda(), outboxes("pinned", count + 1)
    good = torch.ones(count, dtype=torch.bool, device="cuda")
    world = Tables(state, params, history, pages, pages[:, None, :0])
    out = torch.empty(count, 1, dtype=torch.int32, device="cuda")
    seen = []

    def program():
        batch = triton_begin_decode(words, count, 1, 1, state, history, pages, page_size)
        seen.append(batch)
        tokens = batch[2] * 10 + batch[0]  # position and row
        finish(words, batch[0].int(), None, tokens[:, None], good, world, lines, out)

    graph = captured(program)
    state.copy_(start)
    history.zero_()
    words.copy_(packet(rows, [(0, 0)]))
    for step in range(15):
        graph.replay()
        torch.cuda.synchronize()
        table = lines[step % SLOTS].view(-1, 4).tolist()
        assert table[0] == [STEP + step, count, 0, 0]
        for row, (number, generation, flag, token) in zip(rows, table[1:], strict=True):
            left = row * 3 - 1 - step
            live = row > 0 and left >= 0
            assert (number, generation) == (row, row * 11)
            assert token == ((1 + step) * 10 + row if live else NO_TOKEN)
            assert flag == ((2 if left == 0 else 0) if live else 4)
    assert [line[: 2 + 3 * row] for row, line in enumerate(history.tolist())][1:] == [
        [0, 0, *((1 + step) * 10 + row for step in range(3 * row))] for row in range(1, 5)
    ]
