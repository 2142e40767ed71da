"""Products and attention, compiled for GPUs that are not here: each fits, and uses tensor cores and their copies."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
from paged import Heads, paged, queries
from sharpest import sharpest

from gapless.kernels import (
    attention_triton,
    invariant_attention_triton,
    invariant_linear_triton,
    splits_triton,
)
from gapless.kernels import tiles as tiles_of
from gapless.kernels.adapt_fused_triton import NO_ADAPTERS, shares_of
from gapless.kernels.few_rows_triton import matrix_kernel, rows_in_turn_kernel
from gapless.kernels.stream_triton import Plan, stream_kernel, summed_norm_kernel
from gapless.kernels.tiles import FewRowsProduct, FewRowsTiles, choose_tiles
from gapless.kernels.views import Attend, Reach

HOPPER = aot.GPUS[90]
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
MULTIPLIES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""The instruction of the tensor cores; mma.sync on others"""

FEW_TYPES = dict.fromkeys(("x", "weight", "bias", "out", "table"), "*bf16") | {
    "norm": "*fp32", "parts": "*fp32", "arrived": "*i32", "eps": "fp32", "M": "i32", "inner": "*fp32", "slots": "*i64",
}  # fmt: skip


class FewRows(NamedTuple):
    columns: int
    depth: int
    norm: bool = False
    gated: bool = False
    projections: tuple[int, ...] = ()
    """The ends of their columns, where rows have adapters"""

    def shape(self, rows: int) -> FewRowsProduct:
        return FewRowsProduct(rows, self.columns, self.depth, bool(self.projections) and self.norm)

    def tiles(self, rows: int, capability: int | str) -> FewRowsTiles:
        return choose_tiles(self.shape(rows), aot.GPUS[capability])

    def whole(self, rows: int, capability: int | str) -> bool:
        """Whether a program loads its part of the weight at once."""
        tiles = self.tiles(rows, capability)
        return tiles.depth * tiles.splits >= self.depth

    def build(self, rows: int, capability: int | str) -> aot.Resources:
        tiles = self.tiles(rows, capability)
        vector = self.shape(rows).in_turn
        constants: dict[str, Any] = {
            "N": self.columns, "K": self.depth, "BIAS": False, "GATED": self.gated, "ADD": not self.norm,
            "EARLY": aot.GPUS[capability].early, "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth, **NO_ADAPTERS,
        }  # fmt: skip
        if self.projections:
            constants |= {
                "ADAPT": True, "RANK": 16, "PROJECTIONS": len(self.projections), "FIRST": self.projections[0],
                "SECOND": self.projections[min(1, len(self.projections) - 1)], "SHARES": shares_of(self.depth, rows),
            }  # fmt: skip
        if vector:
            constants |= {"ROWS": rows, "NORM": self.norm and not self.projections}
        else:
            constants |= {"BLOCK_M": max(16, rows), "SPLITS": tiles.splits}
        kernel = rows_in_turn_kernel if vector else matrix_kernel
        types = {name: FEW_TYPES[name] for name in kernel.arg_names if name not in constants}
        free = [] if vector else ["M"]
        return aot.build(kernel, capability, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=free)


MATRICES = {
    "qkv": FewRows(4096, 1024, True),
    "output": FewRows(1024, 2048),
    "gate_up": FewRows(6144, 1024, True, True),
    "down": FewRows(1024, 3072),
    "deep": FewRows(4096, 12288),
}


ADAPTED = {
    "qkv": FewRows(4096, 1024, True, projections=(2048, 3072, 4096)),
    "output": FewRows(1024, 2048, projections=(1024,)),
    "gate_up": FewRows(6144, 1024, True, True, projections=(3072, 6144)),
    "down": FewRows(1024, 3072, projections=(1024,)),
    "wide": FewRows(12288, 2048, True, True, projections=(6144, 12288)),
}

SPILLED = {120: 8}
"""Capability -> bytes: in two of its kernels ptxas moves two registers aside, once or twice a program, though it has
more to give."""


@pytest.mark.parametrize(
    ("name", "rows", "capability"), sharpest(aot.spread([90, 80, 86, 100, 120], MATRICES, [16, 1, 2, 32]), 1, "aot")
)
def test_a_product_of_few_rows_fits_its_gpu(name: str, rows: int, capability: int | str) -> None:
    used, whole = MATRICES[name].build(rows, capability), MATRICES[name].whole(rows, capability)
    assert used.trouble(capability, SPILLED.get(capability, 0)) == []
    vector = MATRICES[name].shape(rows).in_turn
    if vector:
        assert ".v4.b32" in used.code, "weights are loaded eight at a time"
    else:
        assert whole or "cp.async" in used.code
        assert MULTIPLIES.get(capability, "mma.sync") in used.code
    if capability >= 90:
        before = used.code[: used.code.index("griddepcontrol.wait")]
        asked = ".v4.b32" if vector or whole else "prefetch.global.L2"
        assert asked in before, "the weight is asked for before the kernel in front has ended"
        assert not whole or vector or "st.shared" in before, "and is in shared memory"


@pytest.mark.aot
@pytest.mark.parametrize(("name", "rows", "capability"), aot.spread([90, 80, 100], ADAPTED, [1, 2, 32]))
def test_a_product_of_few_rows_with_adapters_fits_its_gpu(name: str, rows: int, capability: int | str) -> None:
    used = ADAPTED[name].build(rows, capability)
    assert used.trouble(capability) == []
    if capability == 90 and not name.startswith(("output", "down")):
        before = used.code[: used.code.index("griddepcontrol.wait")]
        assert before.count("ld.global") > 16, "adapters are asked for before the kernel in front has ended"


@pytest.mark.parametrize(
    ("columns", "depth", "gated", "left", "rows"),
    sharpest([
        (24576, 4096, True, False, 32), (24576, 4096, True, False, 16), (4096, 12288, False, True, 32),
        (6144, 4096, False, False, 16), (5120, 25600, False, True, 16), (1000, 1000, True, False, 32),
    ], 1, "aot"),
)  # fmt: skip
def test_a_product_of_stream_k_fits_hopper(columns: int, depth: int, gated: bool, left: bool, rows: int) -> None:
    plan = Plan.of(rows, columns, depth, HOPPER, None)
    tiles = plan.tiles
    constants = {
        "N": columns, "K": depth, "BIAS": False, "GATED": gated, "EARLY": True, "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns, "BLOCK_K": tiles.depth, "HELD": tiles.held, "PROGRAMS": plan.programs,
        "ASKED": tiles.asked, "LEFT": left,
    }  # fmt: skip
    types = {name: FEW_TYPES[name] for name in stream_kernel.arg_names if name not in constants}
    used = aot.build(stream_kernel, 90, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=["M"])
    assert used.trouble(90) == []
    before = used.code[: used.code.index("griddepcontrol.wait")]
    assert "ld.global" in before and "bulk.prefetch.L2" in before, "the weight is asked for early"
    assert "cp.async.cg" in used.code and MULTIPLIES[90] in used.code


@pytest.mark.aot
def test_a_norm_after_stream_k_fits_hopper() -> None:
    plan = Plan.of(32, 5120, 25600, HOPPER, None)
    constants = {
        "WIDTH": 5120, "DEEP": plan.deep, "UNITS": plan.units, "PROGRAMS": plan.programs, "GIVERS": plan.givers,
        "BLOCK_M": plan.tiles.rows, "BLOCK_N": plan.tiles.columns, "BIAS": False, "EARLY": True, "BLOCK": 8192,
    }  # fmt: skip
    types = FEW_TYPES | {"weight": "*fp32"}
    types = {name: types[name] for name in summed_norm_kernel.arg_names if name not in constants}
    assert aot.build(summed_norm_kernel, 90, types, constants, warps=16, stages=3).trouble(90) == []


class InvariantProduct(NamedTuple):
    """A product for a GPU; the numbers are those of a layer of Qwen3-0.6B."""

    rows: int
    columns: int = 1024
    depth: int = 3072
    dtype: str = "bf16"

    def build(self, capability: int | str) -> aot.Resources:
        shape = tiles_of.InvariantProduct(self.rows, self.columns, self.depth, BYTES[self.dtype])
        tiles = choose_tiles(shape, aot.GPUS[capability])
        constants = {
            "N": self.columns, "K": self.depth, "BIAS": True, "SEGMENT": tiles.segment,
            "SEGMENTS": -(-self.depth // tiles.segment), "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns,
            "BLOCK_K": tiles.depth,
        }  # fmt: skip
        types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{self.dtype}")
        types |= {"parts": "*fp32", "arrived": "*i32", "rows": "i32", "each": "i32"}
        how = {"warps": tiles.warps, "stages": tiles.stages, "unaligned": ("rows", "each")}
        return aot.build(invariant_linear_triton.product_kernel, capability, types, constants, **how)


class Kind(NamedTuple):
    """What a layer asks for, as constants of a kernel."""

    reach: Reach = Reach.CAUSAL
    size: int = 0
    cap: float = 0.0
    sinks: bool = False
    spans: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        absent = {name: None for name in ("sinks", "spans") if not getattr(self, name)}
        return {"REACH": int(self.reach), "SIZE": self.size, "CAP": self.cap, **absent}


GEMMA2, GEMMA3 = Kind(Reach.WINDOW, 4096, 50.0), Kind(Reach.WINDOW, 1024, spans=True)
GPT_OSS, LLAMA4 = Kind(Reach.WINDOW, 128, sinks=True), Kind(Reach.CHUNK, 8192)
EVERYTHING = Kind(Reach.WINDOW, 1024, 30.0, True, True)


class InvariantAttention(NamedTuple):
    dim: int
    group: int = 2
    dtype: str = "bf16"
    kind: Kind = Kind()

    def build(self, capability: int | str) -> aot.Resources:
        kernel = invariant_attention_triton.attention_kernel
        shape = tiles_of.InvariantAttention(self.dim, BYTES[self.dtype], self.group)
        tiles = choose_tiles(shape, aot.GPUS[capability])
        constants: dict[str, Any] = {
            "HEADS": 8, "GROUP": self.group, "D": self.dim, "PAGE": 16, "BLOCK_M": tiles.rows,
            "BLOCK_Q": invariant_attention_triton.queries_of(tiles, self.group), "BLOCK_N": tiles.entries,
            "LEAST": invariant_attention_triton.LEAST_IN_SEGMENT, "MOST": invariant_attention_triton.MOST_SEGMENTS,
            "scales": None, **self.kind.constants,
        }  # fmt: skip
        known = {"table": "*i32", "rows": "*i64", "starts": "*i64", "lens": "*i64", "factor": "fp32"}
        known |= (
            {"spans": "*i32"}
            | dict.fromkeys(("partial", "sums", "sinks"), "*fp32")
            | dict.fromkeys(("q", "cache", "out"), f"*{self.dtype}")
        )
        types = {name: known.get(name, "i32") for name in kernel.arg_names if name not in constants}
        free = ("layer", "tokens", "chunks", "single", "most", *invariant_attention_triton.TABLES)
        return aot.build(kernel, capability, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=free)


INVARIANT = (
    InvariantProduct(1), InvariantProduct(2048), InvariantAttention(64), InvariantAttention(128),
    InvariantAttention(64, 8, kind=GPT_OSS), InvariantAttention(128, kind=EVERYTHING),
)  # fmt: skip


def instructions(ptx: str) -> set[str]:
    """The tensor cores' instructions, with their shapes."""
    return set(re.findall(r"wgmma\.mma_async\S*|mma\.sync\S*|tcgen05\.mma\S*", ptx))


@pytest.mark.aot
@pytest.mark.parametrize("capability", [90, 80, 86, 100, 120])
@pytest.mark.parametrize("variant", INVARIANT, ids=str)
def test_an_invariant_kernel_fits_its_gpu(variant, capability):
    found = variant.build(capability)
    assert found.trouble(capability, IN_LOOPS * (getattr(variant, "kind", Kind()) != Kind())) == []
    assert "cp.async" in found.code and instructions(found.code)


@pytest.mark.aot
@pytest.mark.parametrize("capability", [80, 90])
def test_few_rows_and_many_multiply_by_one_instruction(capability):
    few, many = (instructions(InvariantProduct(rows).build(capability).code) for rows in (1, 2048))
    assert few == many and len(few) == 1


@pytest.mark.aot
def test_one_invariant_kernel_serves_every_batch(monkeypatch):
    """Products of up to 256 rows, whichever program computes a segment; attention of decode rows and of chunks."""
    for module in (invariant_linear_triton, invariant_attention_triton):
        monkeypatch.setattr(module, "arch", lambda device: HOPPER)
    monkeypatch.setattr(invariant_linear_triton, "counters", lambda device, count: torch.zeros(8, dtype=torch.int32))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    bf16, heads = torch.bfloat16, Heads(16, 8, 128)
    batch, small = paged(heads, [40, 600, 70, 1], dtype=bf16, width=2560), torch.zeros(20, dtype=torch.int64)
    q, x, weight = queries(heads, 40, dtype=bf16), torch.zeros(256, 1024, dtype=bf16), torch.zeros(4096, 1024)
    with aot.launches_compile(90):
        for rows in (1, 2, 16, 17, 256):
            invariant_linear_triton.product(x[:rows], weight.to(bf16), None)
        for rows, layer in ((4, 0), (1, 1), (2, 16)):
            lens, args = small[rows : 2 * rows], (batch.cache, layer, *batch[1:3])
            invariant_attention_triton.invariant_decode(q[:rows], *args, lens, lens, 0.1)
            invariant_attention_triton.invariant_decode(q[:rows], *args, lens, lens, 0.1, shares=1)
            invariant_attention_triton.invariant_prefill(
                q[rows:], *args, lens, small[1 : 2 + rows], lens, None, *Attend(0.1), 512
            )
    kinds = (
        invariant_linear_triton.product_kernel, invariant_attention_triton.attention_kernel,
        invariant_attention_triton.combine_kernel,
    )  # fmt: skip
    assert [aot.compiled(kind) for kind in kinds] == [1, 1, 1]


KV_HEADS, PAGE = 8, 16
FREE = (
    "layer", "batch", "wanted", "at_once", "least", "most", "whole", "tokens", "chunks", "rows", "starts", "lens",
    "slots",
)  # fmt: skip
"""What a launch does not specialise."""


class Attention(NamedTuple):
    kernel: str
    dim: int
    dtype: str = "bf16"
    group: int = 2
    turn: bool = False
    many: bool = False
    split: bool = False
    kind: Kind = Kind()
    kv: str = ""
    """Triton's type of a memory in fewer bits"""

    def build(self, capability: int | str) -> aot.Resources:
        kernel = getattr(attention_triton, f"{self.kernel}_kernel")
        constants, tiles = self._constants(capability)
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        types = {name: self._type(name) for name in kernel.arg_names if name not in constants}
        free = [name for name in FREE if name in types]
        return aot.build(kernel, capability, types, constants, warps=tiles.warps, stages=tiles.stages, unaligned=free)

    def _constants(self, capability: int | str) -> tuple[dict[str, Any], Any]:
        size = BYTES[self.dtype]
        prompt = tiles_of.PromptAttention(self.dim, size, self.group, 512)
        decode = tiles_of.DecodeAttention(
            self.dim, size, self.group, self.many, {"fp8e4nv": 8, "u8": 4}.get(self.kv, 16)
        )
        tiles = choose_tiles(prompt if self.kernel == "prefill" else decode, aot.GPUS[capability])
        if self.kernel.startswith("combine"):
            tiles = tiles._replace(warps=4, stages=1)
        many, early = self.many or self.kernel == "combine", aot.GPUS[capability].early
        return {
            "HEADS": KV_HEADS, "GROUP": self.group, "D": self.dim, "PAGE": PAGE, "BLOCK_M": tiles.rows,
            "BLOCK_Q": tiles.rows // self.group, "BLOCK_N": tiles.entries, "RUN": PAGE,
            "SPLITS_PAD": splits_triton.MOST_SPLITS if many else 2, "EARLY": early, "ANGLES_ROW": self.dim,
            "TURN": self.turn, "NORM": self.turn, "MANY": self.many, "SPLIT": self.split, **self.kind.constants,
            **({} if self.kv else {"scales": None}),
        }, tiles  # fmt: skip

    def _type(self, name: str) -> str:
        known = {"table": "*i32", "arrived": "*i32", "rows": "*i64", "starts": "*i64", "lens": "*i64", "factor": "fp32"}
        known |= {"qk_norm": "*fp32", "slots": "*i64", "angles": "*fp32", "eps": "fp32", "spans": "*i32"}
        known |= dict.fromkeys(("q", "cache", "out"), f"*{self.dtype}")
        known |= dict.fromkeys(("partial", "logs", "sinks", "scales"), "*fp32")
        known |= {"cache": f"*{self.kv}"} if self.kv else {}
        return known.get(name, "i32")


DECODE, PREFILL = Attention("decode", 128), Attention("prefill", 128)
TURNS = DECODE._replace(turn=True)
LONG = TURNS._replace(many=True)
"""Decode of up to four rows, and of more"""
SHARING = (
    *(TURNS._replace(group=group) for group in (4, 7)),
    *(LONG._replace(group=group) for group in (4, 7, 8)),
    *(one._replace(dim=96) for one in (TURNS, LONG)),
    LONG._replace(dim=64, group=7),
)
"""What Llama, Qwen2 and models of heads of 96 run in steps of few rows"""
MOVED_ASIDE, IN_MEMORY, IN_LOOPS = 8, 128, 48
"""ptxas may move two registers aside if heads are padded, or their number is. Prefill has more sums than a small GPU
has registers, and keeps up to 32 of a thread in memory."""
FEWER_BITS = [
    one._replace(kv=kv) for kv in ("fp8e4nv", "u8") for one in (LONG._replace(group=4), DECODE, TURNS, PREFILL)
]
IN_TILES = 512
"""What prefill keeps of a tile of nibbles in memory, of a thread"""
ASKED = [
    *(one._replace(dim=dim, group=group, kind=kind) for one in (PREFILL, LONG)
      for dim, group, kind in ((64, 8, GPT_OSS), (256, 2, GEMMA2), (128, 4, EVERYTHING))),
    DECODE._replace(group=4, kind=LLAMA4), DECODE._replace(kind=EVERYTHING), PREFILL._replace(dim=256, kind=GEMMA3),
    PREFILL._replace(group=4, kind=LLAMA4, split=True), Attention("combine", 128, kind=EVERYTHING),
    Attention("combine_chunks", 128, kind=GPT_OSS),
]  # fmt: skip
"""What layers with windows, chunks, caps, sinks and spans run"""
FITS = [
    *((one, 90, 0) for one in (DECODE, PREFILL, TURNS, LONG, PREFILL._replace(split=True))),
    *((one._replace(dim=64), 90, 0) for one in (DECODE, LONG, PREFILL)),
    *((Attention(kernel, 128), 90, 0) for kernel in ("combine", "combine_chunks")),
    *((one, 90, MOVED_ASIDE) for one in SHARING),
    # sm_100 gets every size and setting in as few kernels as that takes, an older GPU what needs most of one.
    *((one, 100, 0) for one in (DECODE._replace(dim=64), LONG, PREFILL._replace(dim=64), PREFILL)),
    *((one, 80, 0) for one in (LONG, PREFILL)),
    # GPUs whose blocks have less shared memory: all is compiled for one, and every size and setting for the other.
    *((one, 120, IN_MEMORY * (one.kernel == "prefill")) for one in (TURNS, LONG, DECODE, PREFILL)),
    *((one, gpu, 0) for one in (LONG._replace(group=7), DECODE._replace(dim=256)) for gpu in (86, 120)),
    *((PREFILL._replace(dim=256), gpu, IN_MEMORY) for gpu in (86, 120)),
    *((one, 90, IN_LOOPS) for one in ASKED),
    *((one, 90, IN_TILES * (one.kv == "u8")) for one in FEWER_BITS),
    *((one._replace(kind=kind), 100, IN_LOOPS) for one, kind in ((LONG, EVERYTHING), (PREFILL, GEMMA2))),
]


@pytest.mark.parametrize("variant, capability, spilled", sharpest(FITS, 1, "aot"), ids=str)
def test_an_attention_kernel_fits_its_gpu(variant, capability, spilled):
    found = variant.build(capability)
    assert found.trouble(capability, spilled) == []
    assert ("e4m3x2" in found.code) == bool(variant.kv), "e4m3 is converted by instructions"
    if not variant.kernel.startswith("combine"):
        assert "cp.async" in found.code
        wanted = MULTIPLIES.get(capability, "mma.sync") if variant.kernel == "prefill" else "mma.sync"
        assert wanted in found.code


@pytest.mark.aot
def test_launches_that_differ_in_values_and_beginnings_of_tensors_compile_once(monkeypatch):
    monkeypatch.setattr(attention_triton, "arch", lambda device: HOPPER)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    heads, small = Heads(16, 8, 128), torch.zeros(20, dtype=torch.int64)
    batch = paged(heads, [40, 600, 70, 1], dtype=torch.bfloat16, width=2560)
    q = queries(heads, 40, dtype=torch.bfloat16)
    with aot.launches_compile(90):
        for rows, layer in ((4, 0), (3, 1), (2, 16)):
            lens = small[rows : 2 * rows]
            attention_triton.decode_attention(q[:rows], batch.cache, layer, *batch[1:3], lens, lens, 0.1)
            chunks = (lens, small[1 : 2 + rows], lens)
            attention_triton.prefill_attention(
                q[rows:], batch.cache, layer, *batch[1:3], *chunks, None, *Attend(0.1), 512
            )
    kinds = (
        attention_triton.decode_kernel,
        attention_triton.combine_kernel,
        attention_triton.prefill_kernel,
        attention_triton.combine_chunks_kernel,
    )
    assert [aot.compiled(kind) for kind in kinds] == [1, 1, 1, 1]
