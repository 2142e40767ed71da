"""Products by quantised weights, in Triton: the weight is decoded in registers, before the sums.

One row is multiplied in float32 by programs that hold it in registers. More rows use tensor cores: the
weight is the first operand, an exact number of the inputs' dtype for each code, and scales multiply float32 sums: of a
whole row at the end, of a group after each part of the depth. Codes are decoded by integer arithmetic, which is exact
on every GPU and in the interpreter.

A row's bits follow from its contents, the weight and the number of rows, and not from other rows.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-redef, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from gapless.kernels.few_rows_triton import _ask, weight_rows
from gapless.kernels.library_triton import all_stored, prefetch

FP8, INT8, INT4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)

ASKED = tl.constexpr(4)
"""Blocks of columns whose weights a program requests before its input is ready"""
_DOWN = tl.constexpr(2.0**69)
"""Factor that sums lack: codes are 2^149 times too small, inputs are made 2^80 times greater."""


@triton.jit
def _store(
    sums, bias, out, block, first, M, N: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write sums [BLOCK_M, BLOCK_N] of the rows from `first` on to `out` [M, N], or [M, N // 2] if GATED, or add
    them."""
    row, inside = weight_rows(block, N, BLOCK_N, GATED)
    if BIAS:
        sums += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    STRIDE: tl.constexpr = N // 2 if GATED else N
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (BLOCK_M, 2, WIDTH)), (0, 2, 1)))
        sums = gate * tl.sigmoid(gate) * up
    token = (first + tl.arange(0, BLOCK_M))[:, None]
    column = block * WIDTH + tl.arange(0, WIDTH)[None, :]
    mine = (token < M) & (column < STRIDE)
    place = out + token.to(tl.int64) * STRIDE + column
    if ADD:
        sums += tl.load(place, mask=mine, other=0.0).to(tl.float32)
    tl.store(place, sums.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _terms(words, value, CODE: tl.constexpr, KIND: tl.constexpr):
    """Return value [CHUNKS, 4] times a code of each of the words [BLOCK_N, CHUNKS, 4]: an E4M3, an int8 + 128, or a
    nibble; all over `_DOWN`. CODE: the byte, or twice the byte and one for its high nibble.

    An integer in the lowest bits of a float32 is a subnormal number, which GPUs multiply as any other: most codes take
    one instruction. PLACE: the code's lowest bit there."""
    if KIND == FP8:
        PLACE: tl.constexpr = 29
        found = ((words << (24 - 8 * CODE)) >> 4) & -0x78100000
    elif KIND == INT8:
        PLACE: tl.constexpr = CODE % 2 * 8
        found = ((words >> (CODE * 8 - PLACE)) ^ (0x80 << PLACE)) & (0xFF << PLACE)
    else:
        PLACE: tl.constexpr = CODE * 4 if CODE < 5 else CODE * 4 - 12
        found = (words >> (CODE * 4 - PLACE)) & (0xF << PLACE)
    return found.to(tl.float32, bitcast=True) * (value * 2.0 ** (80 - PLACE))[None, :, :]


@triton.jit
def _words(lines, row, inside, at, COUNT: tl.constexpr, WORDS: tl.constexpr):
    """The words of the rows' chunks `at` of 16 bytes, [BLOCK_N, CHUNKS, 4]. A row has COUNT chunks in WORDS words."""
    place = row.to(tl.int64)[:, None, None] * WORDS + at[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    mask = inside[:, None, None] & (at < COUNT)[None, :, None]
    return tl.load(lines + place, mask=mask, other=0, eviction_policy="evict_first")


@triton.jit
def _values(x, at, real, KIND: tl.constexpr, HALF: tl.constexpr):
    """Return the inputs of each code of a word, a tuple of float32 [CHUNKS, 4]. x: four numbers of HALF in an int64.
    Inputs of high nibbles are 16 further."""
    WIDE: tl.constexpr = 32 if KIND == INT4 else 16
    place = x + at[:, None] * (WIDE // 4) + tl.arange(0, 4)[None, :]
    four = tl.load(place, mask=real[:, None], other=0)
    if KIND == INT4:
        later = tl.load(place + 4, mask=real[:, None], other=0)
    values = ()
    for code in tl.static_range(8 if KIND == INT4 else 4):
        if KIND == INT4:
            bits = (later if code % 2 else four) >> (code // 2 * 16)
        else:
            bits = four >> (code * 16)
        value = bits.to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
        values = values + (value,)  # noqa: RUF005 (Triton has no other)
    return values


@triton.jit
def quantised_row_kernel(
    x, weight, scale, zero, bias, out, parts, arrived, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One row, int64 [K / 4], times the weight: int32 words [N, K / 4], or [N, K / 8] of nibbles.

    Program (EACH blocks of columns, split) holds its inputs, CHUNKS times the columns in 16 bytes. The last to end of a
    split K sums the parts, in their order: parts float32 [SPLITS, N], arrived as in `quantised_kernel`."""
    WIDE: tl.constexpr = 32 if KIND == INT4 else 16
    COUNT: tl.constexpr = K // WIDE
    WORDS: tl.constexpr = COUNT * 4
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    split = tl.program_id(1)
    at = split * CHUNKS + tl.arange(0, CHUNKS)
    # Together programs read one range of the weight after the other: ranges of their own would share memory channels.
    block, step = tl.program_id(0), tl.num_programs(0)
    row, inside = weight_rows(block, N, BLOCK_N, GATED)
    words = _words(weight, row, inside, at, COUNT, WORDS)
    if EARLY:
        cuda.gdc_launch_dependents()
        if CHUNKS >= 8:
            for turn in tl.static_range(1, ASKED):
                further, _ = weight_rows(block + (turn if turn < EACH else EACH - 1) * step, N, BLOCK_N, GATED)
                line = tl.minimum(split * CHUNKS + tl.arange(0, CHUNKS // 8) * 8, COUNT - 1) * 4
                prefetch(weight + tl.minimum(further, N - 1).to(tl.int64)[:, None] * WORDS + line[None, :])
        cuda.gdc_wait()
    values = _values(x, at, at < COUNT, KIND, out.dtype.element_ty)
    all_x = values[0]
    for code in tl.static_range(1, 8 if KIND == INT4 else 4):
        all_x += values[code]
    all_x = tl.sum(all_x, axis=1)
    for turn in range(EACH):
        row, inside = weight_rows(block + turn * step, N, BLOCK_N, GATED)
        further, more = weight_rows(block + (turn + 1) * step, N, BLOCK_N, GATED)
        ahead = _words(weight, further, more & (further * 0 + turn + 1 < EACH), at, COUNT, WORDS)
        found = tl.zeros([BLOCK_N, CHUNKS, 4], tl.float32)
        for code in tl.static_range(8 if KIND == INT4 else 4):
            found += _terms(words, values[code], code, KIND)
        part = tl.sum(found, axis=2)
        there = inside[:, None] & (at < COUNT)[None, :]
        own = row[:, None] * GROUPS + (at * 0 if GROUP == 0 else at * WIDE // GROUP)[None, :]
        if KIND == INT8:
            part -= (all_x * (128.0 / _DOWN))[None, :]
        if KIND == INT4:
            level = tl.load(zero + own, mask=there, other=0).to(tl.float32)
            part -= level * (all_x / _DOWN)[None, :]
        if GROUP > 0:
            part *= tl.load(scale + own, mask=there, other=0.0)
        total = tl.sum(part, axis=1) * _DOWN
        if GROUP == 0:
            total *= tl.load(scale + row, mask=inside, other=0.0)
        if SPLITS == 1:
            _store(total[None, :], bias, out, block + turn * step, 0, 1, N, BIAS, GATED, ADD, 1, BLOCK_N)
        else:
            tl.store(parts + split * N + row, total, mask=inside)
        words = ahead
    if SPLITS > 1:
        all_stored()
        counter = arrived + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)
            for turn in range(EACH):
                row, inside = weight_rows(block + turn * step, N, BLOCK_N, GATED)
                total = tl.zeros([BLOCK_N], tl.float32)
                for part in tl.static_range(SPLITS):
                    # Past the first-level cache: other programs wrote these.
                    total += tl.load(parts + part * N + row, mask=inside, other=0.0, cache_modifier=".cg")
                _store(total[None, :], bias, out, block + turn * step, 0, 1, N, BIAS, GATED, ADD, 1, BLOCK_N)


@triton.jit
def _exact(bits, FACTOR: tl.constexpr, HALF: tl.constexpr):
    return bits.to(HALF, bitcast=True) * tl.full([], FACTOR, HALF)


@triton.jit
def _number(codes, KIND: tl.constexpr, HALF: tl.constexpr, PACKED: tl.constexpr):
    """Codes of a byte, E4M3 or int8, as numbers of the 16-bit dtype HALF. PACKED: four at a time, on NVIDIA's GPUs."""
    if PACKED and KIND == FP8 and tl.bfloat16 == HALF:
        # Sign, exponent and fraction at their places in two bfloat16, which are 2^120 too small.
        asm: tl.constexpr = """{
            .reg .b32 a, b, c, d, m;
            prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;
            shr.b32 c, a, 4; shr.b32 d, b, 4;
            and.b32 c, c, 0x07F007F0; and.b32 d, d, 0x07F007F0;
            lop3.b32 c, c, a, 0x80008000, 0xF8; lop3.b32 d, d, b, 0x80008000, 0xF8;
            mov.b32 m, 0x7B807B80; mul.bf16x2 $0, c, m; mul.bf16x2 $1, d, m;
        }"""
        found = tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif PACKED and KIND == INT8 and tl.bfloat16 == HALF:
        # 128 and the low seven bits, less 128, or 256 for a code below zero.
        asm: tl.constexpr = """{
            .reg .b32 a, b, c, d, m;
            mov.b32 m, 0x43004300;
            prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
            lop3.b32 c, a, 0x007F007F, m, 0xEA; lop3.b32 d, b, 0x007F007F, m, 0xEA;
            lop3.b32 a, a, 0x00800080, m, 0xEA; lop3.b32 b, b, 0x00800080, m, 0xEA;
            sub.bf16x2 $0, c, a; sub.bf16x2 $1, d, b;
        }"""
        found = tl.inline_asm_elementwise(asm, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif KIND == INT8:
        found = codes.to(tl.int8, bitcast=True).to(HALF)
    elif tl.bfloat16 == HALF:
        wide = codes.to(tl.int16)
        found = _exact(((wide & 0x80) << 8) | ((wide & 0x7F) << 4), 2.0**120, HALF)
    elif tl.float16 == HALF:
        wide = codes.to(tl.int16)
        found = _exact(((wide & 0x80) << 8) | ((wide & 0x7F) << 7), 256.0, HALF)
    else:
        wide = codes.to(tl.int32)
        found = _exact(((wide & 0x80) << 24) | ((wide & 0x7F) << 20), 2.0**120, HALF)
    return found


@triton.jit
def _nibble(codes, HIGH: tl.constexpr, HALF: tl.constexpr):
    """The low or high nibbles of bytes, less 8."""
    wide = codes.to(tl.int16)
    nibble = (wide >> 4) if HIGH else (wide & 0xF)
    if tl.bfloat16 == HALF:
        found = (nibble | 0x4300).to(HALF, bitcast=True) - tl.full([], 136.0, HALF)
    else:
        found = (nibble - 8).to(HALF)
    return found


@triton.jit
def _inputs(rows, real, at, K: tl.constexpr):
    """The inputs `rows` [1, BLOCK_M] at depths `at`."""
    return tl.load(rows + at[:, None], mask=(at < K)[:, None] & real[None, :], other=0.0)


@triton.jit
def _level(zero, own, inside, HALF: tl.constexpr):
    """The zero points of rows, less 8: exact in any HALF."""
    return (tl.load(zero + own, mask=inside, other=8).to(tl.int32) - 8).to(HALF)[:, None]


@triton.jit
def _sums(
    x, weight, scale, zero, row, inside, token, real, begin, K: tl.constexpr, PART: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the weight's rows times the inputs [BLOCK_N, BLOCK_M] from depth `begin` to `begin` + PART; without
    scales if GROUP is 0."""
    HALF: tl.constexpr = x.dtype.element_ty
    CODED: tl.constexpr = tl.float8e4nv == HALF
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = K // 2 if KIND == INT4 else K
    HELD: tl.constexpr = BLOCK_K // 2 if KIND == INT4 else BLOCK_K
    lines = weight + row.to(tl.int64)[:, None] * WIDTH
    rows = x + token.to(tl.int64)[None, :] * K
    k = tl.arange(0, HELD)
    low = k // 16 * 32 + k % 16
    own = row * GROUPS
    if GROUP > 0:
        own += begin // GROUP
        # Read a part ahead: the pipeline holds weights and inputs alone.
        factor = tl.load(scale + own, mask=inside & (row * 0 + begin < K), other=0.0)
    if KIND == INT4:
        level = _level(zero, own, inside & (row * 0 + begin < K), HALF)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(begin, begin + PART, BLOCK_K):
        first = at // 2 if KIND == INT4 else at
        there = inside[:, None] & (first + k < WIDTH)[None, :]
        codes = tl.load(lines + (first + k)[None, :], mask=there, other=0.0 if CODED else 0)
        part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) if GROUP > 0 or CODED else sums
        if GROUP > 0:
            ahead = row * GROUPS + (at + BLOCK_K) // GROUP
            next_factor = tl.load(scale + ahead, mask=inside & (row * 0 + at + BLOCK_K < K), other=0.0)
        if KIND == INT4:
            if GROUP > 0:
                next_level = _level(zero, ahead, inside & (row * 0 + at + BLOCK_K < K), HALF)
            tile = _nibble(codes, False, HALF) - level
            part = tl.dot(tile, _inputs(rows, real, at + low, K), part, input_precision="ieee")
            tile = _nibble(codes, True, HALF) - level
            part = tl.dot(tile, _inputs(rows, real, at + low + 16, K), part, input_precision="ieee")
        else:
            tile = codes if CODED else _number(codes, KIND, HALF, PACKED)
            part = tl.dot(tile, _inputs(rows, real, at + k, K), part, input_precision="ieee")
        if GROUP > 0:
            sums += part * factor[:, None]
            factor = next_factor
            if KIND == INT4:
                level = next_level
        elif CODED:
            # Tensor cores add products of float8 in fewer bits than a float32 has.
            sums += part
        else:
            sums = part
    return sums


@triton.jit(do_not_specialize=["M"])
def quantised_kernel(
    x, factor, weight, scale, zero, bias, out, parts, arrived, M, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr,
    GROUP: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Rows times the weight, bytes [N, K], or [N, K / 2] of nibbles, on the tensor cores. Rows of E4M3 have a `factor`.

    Program (block of columns and of rows, split): the last to end of a split K sums the parts, in their order. parts
    float32 [SPLITS, M, N]; arrived int32 of zeros, one for each block, left as zeros.
    """
    high = tl.cdiv(M, BLOCK_M)
    block, top = tl.program_id(0) // high, tl.program_id(0) % high * BLOCK_M
    row, inside = weight_rows(block, N, BLOCK_N, GATED)
    token = top + tl.arange(0, BLOCK_M)
    split = tl.program_id(1)
    PART: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    if EARLY:
        cuda.gdc_launch_dependents()
        WIDTH: tl.constexpr = K // 2 if KIND == INT4 else K
        SHARE: tl.constexpr = PART // 2 if KIND == INT4 else PART
        _ask(weight + tl.minimum(row, N - 1).to(tl.int64) * WIDTH, split * SHARE, WIDTH, SHARE)
        cuda.gdc_wait()
    sums = _sums(
        x, weight, scale, zero, row, inside, token, token < M, split * PART, K, PART, KIND, GROUP, PACKED, BLOCK_M,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if GROUP == 0:
        sums *= tl.load(scale + row, mask=inside, other=0.0)[:, None]
    if x.dtype.element_ty == tl.float8e4nv:
        sums *= tl.load(factor + token, mask=token < M, other=0.0)[None, :]
    sums = tl.trans(sums)
    if SPLITS == 1:
        _store(sums, bias, out, block, top, M, N, BIAS, GATED, ADD, BLOCK_M, BLOCK_N)
    else:
        place = parts + token.to(tl.int64)[:, None] * N + row[None, :]
        step = M.to(tl.int64) * N
        mine = (token < M)[:, None] & inside[None, :]
        tl.store(place + split * step, sums, mask=mine)
        all_stored()
        counter = arrived + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)
            sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for part in tl.static_range(SPLITS):
                # Past the first-level cache: other programs wrote these.
                sums += tl.load(place + part * step, mask=mine, other=0.0, cache_modifier=".cg")
            _store(sums, bias, out, block, top, M, N, BIAS, GATED, ADD, BLOCK_M, BLOCK_N)


@triton.jit
def numbers_kernel(
    codes, scale, zero, out, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """The numbers of a weight, out [N, K]. Program (row, block of its bytes)."""
    GROUPS: tl.constexpr = 1 if GROUP == 0 else (K + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = K // 2 if KIND == INT4 else K
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = at // 16 * 32 + at % 16 if KIND == INT4 else at
    own = row * GROUPS + (column * 0 if GROUP == 0 else column // GROUP)
    code = tl.load(codes + row * WIDTH + at, mask=at < WIDTH, other=0)
    factor = tl.load(scale + own, mask=at < WIDTH, other=0.0)
    place = out + row * K + column
    if KIND == INT4:
        level = tl.load(zero + own, mask=at < WIDTH, other=0).to(tl.int32)
        low, high = (code & 15).to(tl.int32) - level, (code >> 4).to(tl.int32) - level
        tl.store(place, (low.to(tl.float32) * factor).to(out.dtype.element_ty), mask=at < WIDTH)
        tl.store(place + 16, (high.to(tl.float32) * factor).to(out.dtype.element_ty), mask=at < WIDTH)
    else:
        found = _number(code, KIND, tl.float32, False) * factor
        tl.store(place, found.to(out.dtype.element_ty), mask=at < WIDTH)
