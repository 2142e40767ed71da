"""The Triton kernels but attention on a GPU: the checks of tests/kernels with bfloat16 and real sizes, under capture,
and with an outbox in the host's own memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from fused_cases import (
    RopeShape,
    check_add_rms_norm,
    check_rms_norm,
    check_rope_and_write,
    check_silu_mul,
    random,
)
from sampling_cases import (
    check_bad_logits,
    check_greedy,
    check_independence,
    check_noise,
    check_random,
)
from sampling_oracle import (
    ALL,
    Setting,
    check_bad_rows,
    check_hard_rows,
    check_masks_of_places,
    drawn,
    kept_mask,
    mask_by,
    tables_of,
)
from score_cases import KINDS, check_alone, check_score
from step_cases import (
    LONGEST,
    MARK,
    MAX_PAGES,
    PAGE_SIZE,
    SLOTS,
    STEP,
    check_begin_decode,
    check_begin_mixed,
    check_finish,
    packet,
)  # fmt: skip

from gapless.kernels import cut_triton, sampling_triton
from gapless.kernels.activation_triton import triton_silu_mul
from gapless.kernels.all_triton import TRITON_KERNELS
from gapless.kernels.begin_triton import triton_begin_decode
from gapless.kernels.finish_triton import finish
from gapless.kernels.layout import ACTIVE, LINE_TOKENS, MAX_LEN, NO_TOKEN, PARAM_COLUMNS, STATE_COLUMNS
from gapless.kernels.norm_triton import triton_add_rms_norm, triton_rms_norm
from gapless.kernels.rope_triton import triton_rope_and_write
from gapless.kernels.score_triton import score
from gapless.kernels.tables import Tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
    # Triton 3.9 says once how its next version will differ.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VOCAB = 151_936


@pytest.mark.parametrize("rows, width", [(3, 7), (257, 1024), (5, 2560), (64, 8192)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norms_equal_float64(dtype, rows, width):
    check_rms_norm("cuda", dtype, rows, width)
    check_add_rms_norm("cuda", dtype, rows, width)


@pytest.mark.parametrize("rows, width", [(1, 3), (300, 1300), (64, 3072)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_product_equal_float64(dtype, rows, width):
    check_silu_mul("cuda", dtype, rows, width)


@pytest.mark.parametrize(
    "shape",
    [
        RopeShape(tokens=1, heads=1, kv_heads=1, width=2, page_size=1, norm=False),
        RopeShape(tokens=9, heads=5, kv_heads=1, width=24, page_size=5, norm=True),
        RopeShape(tokens=70, heads=16, kv_heads=8, width=128, page_size=16, norm=True),
        RopeShape(tokens=70, heads=32, kv_heads=4, width=80, page_size=32, norm=False),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_and_cache_writes_equal_the_reference(dtype, shape):
    check_rope_and_write("cuda", dtype, shape)


@pytest.mark.parametrize("rows, vocab", [(1, VOCAB), (9, 2050), (65, VOCAB)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_rows_take_the_first_best_token(dtype, rows, vocab):
    check_greedy("cuda", dtype, rows, vocab)


@pytest.mark.parametrize("vocab", [7, VOCAB])
def test_bad_logits_are_flagged_in_their_rows_alone(vocab):
    check_bad_logits("cuda", vocab)


@pytest.mark.parametrize("seed", [0, -1, 2**31, -(2**63), 0x1234_5678_9ABC_DEF0])
def test_noise_equals_the_cipher_in_python(seed):
    check_noise("cuda", seed, 0)
    check_noise("cuda", seed, 131_071)


def test_draws_are_those_of_torch():
    assert check_random("cuda", torch.float32, 2000, 3000, 2.0) >= 0.999
    assert check_random("cuda", torch.float32, 30, VOCAB, 1.0) >= 0.9
    assert check_random("cuda", torch.bfloat16, 30, VOCAB, 3.0) >= 0.9


@pytest.mark.parametrize("vocab", [13, 1025, 20_001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_where_searches_go_wrong(dtype, vocab):
    check_hard_rows(TRITON_KERNELS, vocab, dtype, "cuda")


@pytest.mark.parametrize("vocab", [40, VOCAB])
def test_rows_that_are_not_finite_and_padding(vocab):
    check_bad_rows(TRITON_KERNELS, vocab, "cuda")


@pytest.mark.parametrize("vocab", [40, VOCAB])
def test_each_place_of_a_row_draws_what_its_mask_leaves(vocab):
    check_masks_of_places(TRITON_KERNELS, vocab, "cuda")


@pytest.mark.parametrize("count", [1, 5, 40, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_of_a_real_vocabulary(dtype, count):
    """However many rows share the launches, each keeps what the definition does."""
    asked = [Setting(top_p=0.9), Setting(top_k=50), Setting(0.7, 40, 0.8, 0.02), Setting(1.5, min_p=0.1)]
    settings = [asked[i % 4]._replace(seed=i) for i in range(count)]
    rows, tables = tables_of(settings, "cuda")
    logits = random((count, VOCAB), dtype, "cuda", 5, 3.0)
    TRITON_KERNELS.cut(logits, torch.arange(count, dtype=torch.int32, device="cuda"), rows, tables, ALL)
    tokens, finite = TRITON_KERNELS.sample(logits, rows, tables, None)
    assert bool(finite.all())
    for i in range(0, count, max(1, count // 12)):
        row, found = logits[i].cpu(), mask_by(tables, int(rows[i]), logits[i], settings[i])
        assert not (kept_mask(row, settings[i], -2e-6) & ~found).any(), settings[i]
        assert not (found & ~kept_mask(row, settings[i], 2e-6)).any(), settings[i]
        assert found[int(tokens[i])]
    if count == 40:
        same = [int(tokens[i]) == drawn(logits[i].cpu(), settings[i], VOCAB) for i in range(count)]
        assert sum(same) >= 36, "scores tie in the last bits of a logarithm but seldom"


def test_a_draw_is_independent_of_its_batch():
    check_independence("cuda", 200, VOCAB)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("listed", [[0], [0, 2, 5, 5], [*range(32)]], ids=len)
@pytest.mark.parametrize("width, pinned", [(0, False), (1, True), (5, True), (20, True)])
def test_scores_equal_the_direct_computation(width, pinned, listed, kind):
    check_score(score, kind, torch.bfloat16, "cuda", 33, VOCAB, listed, width, pinned)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_other_sizes_equal_the_direct_computation(dtype):
    check_score(score, "ties", dtype, "cuda", 5, 3, [1, 4], 20)
    check_score(score, "masked", dtype, "cuda", 9, 4999, [0, 3, 8, 8], 5)
    check_alone(score, "cuda", dtype, VOCAB)


@pytest.mark.parametrize(
    "used, padding, writes", [(1, 0, 0), (1, 0, 1), (0, 4, 2), (40, 3, 40), (200, 56, 300), (1500, 548, 1500)]
)
def test_the_begin_of_a_decode_step_equals_the_reference(used, padding, writes):
    for seed in range(3):
        check_begin_decode("cuda", seed, 1600, used, padding, writes)


@pytest.mark.parametrize(
    "decode, chunks, spare, new",
    [
        (0, [1], 0, 0),
        (3, [7, 1, 30], 0, 2),
        (30, [5, 2, 8, 40], 300, 4),
        (400, [40] * 200, 5000, 150),
        (0, [0, 9], 3, 1),
    ],
)
def test_the_begin_of_a_mixed_step_equals_the_reference(decode, chunks, spare, new):
    for seed in range(3):
        check_begin_mixed("cuda", seed, 650, decode, chunks, spare, new)


@pytest.mark.parametrize("used, padding", [(1, 0), (0, 3), (61, 4), (300, 4), (1500, 548)])
@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("where", ["device", "pinned"])
@pytest.mark.parametrize("width", [1, 5])
def test_the_finish_of_a_step_equals_the_reference(used, padding, chunks, where, width):
    lines = outboxes(where, 2 * 2100)
    for seed in range(3):
        check_finish("cuda", seed, 1600, used, padding, chunks=chunks, lines=lines, width=width)


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
    weight, table = random((hidden,), dtype, "cuda", 1), random((LONGEST, dim), torch.float32, "cuda", 2)
    head_norm = random((heads + kv_heads, dim), dtype, "cuda", 3)
    settings = [Setting(t, top_k=k, top_p=0.9, seed=t_k) for t, k, t_k in ((0.0, 9, 1), (1.0, 0, 2), (0.7, 40, 3))]
    made = tables_of([*settings, Setting(), Setting(0.0)], "cuda")
    index = torch.tensor([1, 2, 2, 2], dtype=torch.int32, device="cuda")

    def program(x, delta, qkv, cache, positions, slots, gate_up, logits):
        y = triton_rms_norm(x, weight, 1e-6)
        triton_rope_and_write(qkv, head_norm, 1e-6, positions, table, slots, cache, 1)
        y = triton_add_rms_norm(x, delta + y, weight, 1e-6)
        cut_triton.cut(logits, index, *made, ALL)
        return (
            y,
            x,
            qkv,
            cache,
            triton_silu_mul(gate_up),
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
