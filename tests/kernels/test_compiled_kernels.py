"""Kernels of steps, sampling and what stands between products, compiled for GPUs that are not here: each fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import aot
from sharpest import sharpest

from gapless.kernels import (
    adapt_triton,
    cut_triton,
    drafts_triton,
    masks_triton,
    mixed_triton,
    norm_triton,
    pages_triton,
    rope_triton,
    sampling_triton,
    score_triton,
    suffixes_triton,
)
from gapless.kernels.activation_triton import activate_kernel
from gapless.kernels.adapt_fused_triton import MOST_HELD, NORM_WARPS, adapted_norm_kernel
from gapless.kernels.adjust_triton import ADJUST_BLOCK, adjust_kernel
from gapless.kernels.begin_triton import begin_decode_kernel
from gapless.kernels.finish_triton import finish_kernel, stops_at_once
from gapless.kernels.kinds import Activation
from gapless.kernels.layout import line_words, score_words

VOCAB, HISTORY, SPLITS = 151_936, 40_960, 75
GPUS = (90, 80, 100)
HALF = ("x", "y", "delta", "qkv", "cache", "lines", "changed", "down", "up")
LONG = ("slots", "positions", "by_row", "by_token", "adapters")
REAL = ("weight", "bias", "qk_norm", "angles", "norm", "inner", "parts", "table", "values", "noisy", "sums", "adjusted")
NUMBERS = (
    "count", "batch", "writes", "admissions", "decode", "splits", "samples", "slot_words", "mail_words", "factor",
    "least", "src_stride", "dst_stride", "used", "first", "second", "last", "M", "layer", "top_k", "level", "shift",
    "start", "sent",
)  # fmt: skip
KNOWN = dict.fromkeys(HALF, "*bf16") | dict.fromkeys(LONG, "*i64") | dict.fromkeys(REAL, "*fp32")
KNOWN |= dict.fromkeys(NUMBERS, "i32") | {"eps": "fp32", "finite": "*i1"}


class Build(NamedTuple):
    """A kernel, and how it is launched. Parameters that no list above knows are `*i32`, but for `types`."""

    kernel: Any
    constants: dict[str, Any]
    warps: int = 4
    types: dict[str, str] = {}  # noqa: RUF012
    free: tuple[str, ...] = ()
    """Parameters that a launch does not specialise"""
    registers: int = 128
    gpus: tuple[int, ...] = GPUS
    stages: int = 3
    most: int | None = None
    look: Callable[[str], bool] = lambda ptx: True
    """Whether the machine code is as it should be"""

    def compiled(self, capability: int | str) -> aot.Resources:
        names = self.kernel.arg_names
        constants = {name: value for name, value in self.constants.items() if name in names}
        if "EARLY" in constants:
            constants["EARLY"] = constants["EARLY"] and aot.GPUS[capability].early
        types = {name: (KNOWN | self.types).get(name, "*i32") for name in names if name not in constants}
        free = [name for name in self.free if name in types]
        return aot.build(
            self.kernel, capability, types, constants, warps=self.warps, stages=self.stages, unaligned=free,
            registers=self.most,
        )  # fmt: skip


def builds() -> Iterator[tuple[str, Build]]:
    yield from elementwise()
    yield from begins_and_ends()
    yield from sampling()
    yield from lanes()


NO_ADAPTERS = {"RANK": 0, "INNER_ROW": 0, "INNER_SLOT": 0, "inner": None, "adapters": None, "lines": None, "up": None}
ADD_NORM = {"WIDTH": 8192, "ROW": 8192, "BLOCK": 8192}
SILU = {"WIDTH": 3072, "ROW": 6144, "BLOCK": 512, "KIND": 0, "GATED": True}
ROPE = {
    "ROW": 4096, "ANGLES_ROW": 128, "LAYERS": 28, "PAGE": 16, "TURNED": 24, "KV_HEADS": 8, "HALF": 64, "NORM": True,
    "HEADS": 4, "BLOCK": 64, "scales": None,
}  # fmt: skip


def eight_at_a_time(ptx: str) -> bool:
    return ".v4.b32" in ptx


def elementwise() -> Iterator[tuple[str, Build]]:
    free, out = ("layer",), {"out": "*bf16"}
    rms = {"WIDTH": 1024, "EARLY": False, "BLOCK": 1024}
    sizes = {"WIDTH": 128, "MAX_LEN": HISTORY, "BLOCK": 128}
    yield "angles", Build(rope_triton.angles_kernel, sizes, 1, {"out": "*fp32"}, registers=64, look=eight_at_a_time)
    yield "rms_norm", Build(norm_triton.rms_norm_kernel, rms, 4, out, registers=64, look=eight_at_a_time)
    sizes = {"WIDTH": 4096, "WEIGHTED": True, "BIASED": True, "BLOCK": 4096}
    yield "layer_norm", Build(norm_triton.layer_norm_kernel, sizes, 16, out, registers=64, look=eight_at_a_time)
    for kind in list(Activation)[1:]:
        sizes = SILU | NO_ADAPTERS | {"KIND": int(kind), "GATED": False}
        yield f"activate {kind.name}", Build(activate_kernel, sizes, 2, out, (), 64, look=eight_at_a_time)
    kinds = {
        "add_rms_norm": (norm_triton.add_rms_norm_kernel, ADD_NORM, 16, 16),
        "activate": (activate_kernel, SILU, 2, 4),
        "rope_and_write": (rope_triton.rope_and_write_kernel, ROPE, 1, 2),
    }
    for name, (kernel, sizes, warps, more) in kinds.items():
        alone = sizes | NO_ADAPTERS
        yield name, Build(kernel, alone, warps, out, free, 64, look=eight_at_a_time)
        joined = sizes | {"RANK": 16, "ROW": sizes["ROW"] + 240, "INNER_ROW": sizes["ROW"] + 240, "INNER_SLOT": 48}
        yield f"{name} after a joined product", Build(kernel, joined, more, out | {"inner": "*bf16"}, free, 255)
    for width, chunk, projections, shares, rows in ((1024, 16, 3, 1, 32), (1024, 16, 3, 2, 256), (4096, 4, 2, 3, 32)):
        sizes = {
            "WIDTH": width, "SHARES": shares, "RANK": 16, "LINES": 16 * projections, "PROJECTIONS": projections,
            "EARLY": True, "BLOCK_M": rows, "BLOCK": width, "CHUNK": chunk, "HOLD": 16,
            "TILES": projections if rows <= MOST_HELD else 1,
        }  # fmt: skip
        # Two programs share a multiprocessor.
        most = 255 if rows <= MOST_HELD else 128
        types = out | {"before": "*fp32"}
        yield f"adapted_norm {width} {rows}", Build(adapted_norm_kernel, sizes, NORM_WARPS, types, ("M",), most)
    for kind, high, gpus in (("*bf16", 16, (90,)), ("*fp32", 16, GPUS), ("*bf16", 64, GPUS)):
        types, free = dict.fromkeys(("x", "y", "down", "up"), kind) | {"tokens": "i32"}, ("tokens", "used")
        sizes = {"K": 4096, "WIDTH": 48, "RANK": 16, "DEPTH": 256, "BLOCK_T": high, "BLOCK_K": adapt_triton.BLOCK_K}
        yield f"adapt down {kind} {high}", Build(adapt_triton.down_kernel, sizes, 4, types, free, 255, gpus)
        sizes = {"N": 6144, "WIDTH": 48, "RANK": 16, "SHARES": 16, "BLOCK_T": high, "BLOCK_N": adapt_triton.BLOCK_N}
        yield f"adapt up {kind} {high}", Build(adapt_triton.up_kernel, sizes, 4, types, free, 255, gpus, 2)


def header_last(ptx: str) -> bool:
    """The header follows a fence that the host sees too, and a line of the outbox is one store."""
    lines = [line for line in ptx.splitlines() if "st.global" in line or "atom." in line]
    fenced = ".sys.acq_rel." in lines[-2] and "st.global" in lines[-1]
    return fenced and any("st.global.v4.b32" in line for line in lines)


def begins_and_ends() -> Iterator[tuple[str, Build]]:
    sizes = {"MAX_LEN": HISTORY, "MAX_PAGES": 2560, "PAGE": 16}
    for block, places in ((64, 1), (256, 5), (1024, 1)):
        own = sizes | {"BLOCK": block, "PLACES": places}
        kernel, types, free = begin_decode_kernel, {"out": "*i64"}, ("count", "writes")
        yield f"begin_decode {block}", Build(kernel, own, block // 64, types, free, 96)
    # Steps with drafts have few rows.
    for block, width, gpus in (
        (64, 1, (90,)), (1024, 1, GPUS), (256, 1, GPUS), (64, 5, GPUS), (256, 5, (90,)), (64, 9, (90,))
    ):  # fmt: skip
        line = line_words(width)
        own = {"HISTORY": HISTORY, "SIZES": True, "BLOCK": block, "GROUP": stops_at_once(block), "WIDTH": width}
        own |= {"LINE": line, "COLUMNS": 1 << (line - 1).bit_length()}
        # All of a block's threads fit into one multiprocessor; a slot is whole 64 bytes.
        registers, free = min(255, 65_536 // block), ("count", "samples", "slots")
        types = {"tokens": "*i64", "slots": "i32", "lines": "*i32"}
        yield (
            f"finish {block} {width}",
            Build(finish_kernel, own, block // 32, types, free, registers, gpus, look=header_last),
        )
    own, free = {"BLOCK": mixed_triton.MIXED_BLOCK, "COLUMNS": 64}, ("count", "writes", "admissions")
    yield "begin_mixed apply", Build(mixed_triton.apply_kernel, own, 2, {}, free, 64)
    for places in (1, 5):
        own = sizes | {"BLOCK": mixed_triton.MIXED_BLOCK, "ROWS": 1024, "PLACES": places}
        free = ("count", "decode", "tokens", "sent", "splits")
        yield f"begin_mixed gather {places}", Build(mixed_triton.gather_kernel, own, 2, {"tokens": "i32"}, free)
    yield "copy_pages", Build(
        pages_triton.copy_kernel, {"TILE": pages_triton.COPY_TILE}, 8, {"sums": "*i64", "words": "i32"},
        ("count", "places", "sums"),
    )  # fmt: skip


def sampling() -> Iterator[tuple[str, Build]]:
    few, many = sampling_triton.CHUNKS[0][1], sampling_triton.MANY_ROWS_BLOCKS
    numbers = {"slots": "i32"}
    for kind, blocks in (("*bf16", many), ("*fp32", few), ("*bf16", few), ("*fp32", many)):
        own = {"VOCAB": VOCAB, "ROOM": 1, "BLOCKS": blocks, "LANES": 256, "SPLITS": 149}
        own |= {"BLOCK": sampling_triton.SAMPLING_BLOCK}
        types, free = {"logits": kind} | numbers, ("rows", "slots", "batch")
        yield f"best {kind} {blocks}", Build(sampling_triton.best_kernel, own, 4, types, free, 80)
        yield f"drawn {kind} {blocks}", Build(sampling_triton.drawn_kernel, own, 4, types, free)
    own, types = {"VOCAB": VOCAB, "SPLITS": 149, "LANES": 256}, {"tokens": "*i64"}
    yield "choose", Build(sampling_triton.choose_kernel, own, 1, types, ("rows", "batch"), 96)
    for kind, tile in product(("*bf16", "*fp32"), (cut_triton.CUT_TILE, cut_triton.FEW_ROWS_TILE)):
        own = {"VOCAB": VOCAB, "ROOM": 1, "TILE": tile, "BITS": 32 if kind == "*fp32" else 16, "LANES": 256}
        own |= {"CLEARED": 2048, "EARLY": True}
        types = {"logits": kind, "search": "*i64", "tops": "*i64", "parts": "*i16", "counts": "i32"} | numbers
        free = ("rows", "batch", "slots", "top_k", "counts", "level", "shift")
        for name in ("begin", "count", "weigh"):
            most = cut_triton.COUNT_REGISTERS if name == "count" else None
            yield f"cut {name} {kind} {tile}", Build(
                getattr(cut_triton, f"{name}_kernel"), own, 4, types, free, gpus=(90,), most=most,
                look=lambda ptx, name=name, tile=tile: few_exponentials(ptx, name, tile),
            )  # fmt: skip
    for kind, width in (("*bf16", 5), ("*fp32", 20), ("*bf16", 0)):
        own = {"COLUMNS": 1, "VOCAB": VOCAB, "TILE": score_triton.SCORE_TILE, "SPLITS": SPLITS, "WIDTH": width}
        own |= {"LANES": 128}
        line = score_words(width)
        own |= {"BEST_LANES": 1 << (SPLITS * max(width, 1)).bit_length(), "LINE": line}
        own |= {"LINE_LANES": 1 << line.bit_length()}
        types, free = {"logits": kind, "best": "*i64"} | numbers, ("batch", "slots", "slot_words", "start")
        yield f"score {kind} {width}", Build(score_triton.spread_kernel, own, 4, types, ("batch",))
        yield f"score line {width}", Build(score_triton.line_kernel, own, 4, types | {"logits": "*bf16"}, free)


def few_exponentials(ptx: str, name: str, tile: int) -> bool:
    """One of each token, and no more than one for each digit of a pass beside them."""
    waits = ("griddepcontrol.wait" in ptx) == (name != "begin")
    return waits and (ptx.count("ex2") <= tile // 128 + 3 or name == "count")


def lanes() -> Iterator[tuple[str, Build]]:
    for kind, drafts, gpus in (("*bf16", 0, (90,)), ("*fp32", 0, GPUS), ("*bf16", 1, GPUS)):
        own = {"VOCAB": VOCAB, "HISTORY": HISTORY, "BLOCK": ADJUST_BLOCK, "DRAFTS": drafts}
        free, types = ("rows", "batch", "slots"), {"logits": kind, "slots": "i32"}
        yield f"adjust {kind} {drafts}", Build(adjust_kernel, own, 4, types, free, gpus=gpus)
    shape, looks = {"HISTORY": 4096}, masks_triton.LOOKS
    fetch = {"ROOM": 9, "PLACES": 5, "COUNT": 4748, "WORDS": masks_triton.WORDS, "ALIGN": 4}
    for name, kernel, own, warps in (
        ("late", masks_triton.late_kernel, shape | {"PLACES": 1, "LANES": 2, "LOOKS": looks}, 1),
        ("late after drafts", masks_triton.late_kernel, shape | {"PLACES": 5, "LANES": 8, "LOOKS": looks}, 1),
        ("fetch", masks_triton.fetch_kernel, fetch, 4),
        ("reply", masks_triton.reply_kernel, shape | {"WIDTH": 1, "DRAFTS": 0, "MOST": 0, "LANES": 1}, 1),
        ("reply with drafts", masks_triton.reply_kernel, shape | {"WIDTH": 5, "DRAFTS": 4, "MOST": 4, "LANES": 8}, 1),
    ):
        yield f"mask {name}", Build(kernel, own, warps, {}, ("rows",))
    own, types = {"HISTORY": HISTORY, "PLACES": 5, "WIDTH": 5, "BLOCK": 64}, {"tokens": "*i64", "out": "*i64"}
    yield "accept", Build(drafts_triton.accept_kernel, own, 2, types, ("rows", "count"), 96)
    own = {"HISTORY": HISTORY, "MOST": 4, "SHORTEST": 2, "LONGEST": 4, "BLOCK": drafts_triton.MATCH_BLOCK}
    yield "look_up", Build(drafts_triton.look_up_kernel, own, 4, {}, ("rows",))
    sizes = {"HISTORY": HISTORY, "ENTRIES": 1 << 18}
    own = sizes | {"WIDTH": 5, "LONGEST": 8, "BLOCK": 64}
    yield "remember", Build(suffixes_triton.remember_kernel, own, 4, {}, ("rows", "tokens", "count"))
    own = sizes | {"MOST": 4, "PARTS": 3}
    yield "recall", Build(suffixes_triton.recall_kernel, own, 1, {}, ("rows", "factor", "least"))


BUILDS = dict(builds())
CASES = [(name, gpu) for name, build in BUILDS.items() for gpu in build.gpus]
FIRST = [("rms_norm", 90), ("finish 1024 1", 90), ("cut weigh *bf16 2048", 90)]


@pytest.mark.parametrize(("name", "capability"), sharpest([*FIRST, *(c for c in CASES if c not in FIRST)], 3, "aot"))
def test_a_kernel_fits_its_gpu(name: str, capability: int) -> None:
    build = BUILDS[name]
    used = build.compiled(capability)
    assert not used.trouble(capability) and used.registers <= build.registers
    assert build.look(used.code)


def test_groups_of_any_number_of_pages_share_one_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    pages, places = torch.zeros(4, 64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    sums, kernel = torch.zeros(8, dtype=torch.int64), pages_triton.copy_kernel
    with aot.launches_compile(90):
        before = aot.compiled(kernel)
        for first, count in ((0, 2), (0, 1), (1, 2), (2, 3)):  # where the places of a group begin, and how many it has
            here = places[2 * first : 2 * (first + count)].view(2, -1)
            pages_triton.copy_pages(pages, pages, here, sums[first : first + count])
        assert aot.compiled(kernel) - before == 1
