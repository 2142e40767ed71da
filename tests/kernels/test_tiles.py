"""The tiles of kernels, for shapes of Qwen3 of 0.6B and 8B on GPUs that are not here."""

from __future__ import annotations

import pytest

from gapless.kernels.arch import Arch
from gapless.kernels.tiles import (
    DecodeAttention,
    FewRowsProduct,
    InvariantAttention,
    InvariantProduct,
    PromptAttention,
    StreamProduct,
    choose_tiles,
)

A100, H200 = Arch("nvidia", (8, 0), 108, 163 << 10), Arch("nvidia", (9, 0), 132, 227 << 10)
B200, RTX5090 = Arch("nvidia", (10, 0), 148, 227 << 10), Arch("nvidia", (12, 0), 170, 99 << 10)
TABLE = [
    (FewRowsProduct(1, 4096, 1024), [(8, 1024, 8, 1, 1)] * 4),
    (FewRowsProduct(1, 6144, 1024), [(8, 512, 2, 1, 1)] * 4),
    (FewRowsProduct(1, 1024, 3072), [(4, 4096, 16, 1, 1)] * 4),
    (FewRowsProduct(1, 4096, 12288), [(8, 1024, 4, 1, 1)] * 4),
    (FewRowsProduct(2, 6144, 1024), [(8, 1024, 4, 1, 1)] * 4),
    (FewRowsProduct(2, 1024, 3072), [(2, 4096, 8, 1, 1)] * 4),
    (FewRowsProduct(2, 24576, 4096), [(64, 128, 4, 6, 1), (64, 128, 4, 6, 1), (64, 128, 4, 6, 1), (64, 128, 4, 3, 1)]),
    (FewRowsProduct(16, 6144, 1024), [(64, 128, 4, 6, 1), (64, 1024, 8, 1, 1), (64, 128, 4, 6, 1), (64, 128, 4, 3, 1)]),
    (FewRowsProduct(16, 1024, 3072), [(64, 256, 4, 3, 4), (64, 512, 8, 1, 6), (64, 256, 4, 3, 4), (64, 128, 4, 3, 4)]),
    (FewRowsProduct(32, 1024, 3072), [(64, 256, 4, 3, 4), (64, 256, 4, 3, 4), (64, 256, 4, 3, 4), (64, 128, 4, 3, 4)]),
    (FewRowsProduct(32, 12288, 2048), [(64, 128, 4, 6, 1), (64, 128, 4, 6, 1), (64, 128, 4, 6, 1), (64, 128, 4, 3, 1)]),
    (FewRowsProduct(32, 12288, 2048, adapted=True),
     [(64, 128, 4, 4, 1), (64, 128, 4, 4, 1), (64, 128, 4, 4, 1), (64, 128, 4, 3, 1)]),
    (FewRowsProduct(32, 4096, 4096), [(64, 128, 4, 6, 2), (64, 128, 4, 6, 2), (64, 128, 4, 6, 2), (64, 128, 4, 3, 2)]),
    (StreamProduct(2, 4096, 12288), [(16, 128, 128, 8, 4, 2, 1)] * 4),
    (StreamProduct(17, 4096, 12288), [(32, 128, 128, 8, 4, 1, 1)] * 4),
    (InvariantProduct(1, 1024, 3072, 2),
     [(64, 128, 64, 384, 8, 4), (64, 128, 64, 384, 4, 4), (64, 128, 64, 384, 4, 4), (64, 128, 64, 384, 8, 4)]),
    (InvariantProduct(2048, 24576, 4096, 2), [(128, 128, 64, 4096, 8, 4)] * 4),
    (InvariantProduct(1, 1024, 3072, 4), [(32, 64, 32, 384, 4, 2)] * 4),
    (DecodeAttention(128, 2, 2), [(16, 64, 4, 3)] * 4),
    (DecodeAttention(128, 2, 2, many=True), [(16, 32, 2, 4)] * 4),
    (DecodeAttention(128, 2, 4, many=True, value_bits=8), [(16, 128, 4, 3)] * 4),
    (DecodeAttention(64, 4, 7), [(16, 64, 4, 3)] * 4),
    (PromptAttention(128, 2, 2, 512), [(128, 64, 8, 3)] * 4),
    (PromptAttention(64, 2, 4, 5), [(32, 64, 4, 2)] * 4),
    (PromptAttention(256, 2, 2, 512), [(64, 32, 8, 2)] * 4),
    (InvariantAttention(64, 2, 2), [(64, 32, 8, 4), (64, 64, 4, 3), (64, 64, 4, 3), (64, 32, 8, 4)]),
    (InvariantAttention(128, 2, 4), [(64, 32, 8, 4), (64, 32, 4, 4), (64, 32, 4, 4), (64, 32, 8, 4)]),
    (InvariantAttention(128, 4, 4), [(16, 16, 4, 2)] * 4),
]  # fmt: skip
"""A shape, and its tiles on each of these GPUs"""


@pytest.mark.parametrize("shape, tiles", TABLE, ids=str)
def test_tiles_are_those_of_the_table(shape, tiles):
    assert [tuple(choose_tiles(shape, gpu)) for gpu in (A100, H200, B200, RTX5090)] == tiles


@pytest.mark.parametrize(
    "shape, tiles",
    [
        (FewRowsProduct(16, 6144, 1024), (64, 128, 4, 2, 1)),
        (InvariantProduct(1, 1024, 3072, 2), (64, 128, 64, 384, 8, 2)),
        (DecodeAttention(128, 2, 4, many=True, value_bits=8), (16, 64, 4, 2)),
        (PromptAttention(128, 2, 2, 512), (128, 64, 4, 2)),
    ],
    ids=str,
)
def test_tiles_for_amd_have_few_stages_threads_and_codes(shape, tiles):
    assert tuple(choose_tiles(shape, Arch("amd", (9, 4), 304, 64 << 10))) == tiles


def test_shapes_of_two_kernels_have_tiles_of_their_own_when_their_numbers_are_equal():
    """Choices are kept by shape, and True is 1."""
    numbers = (64, 2, 4, 1)
    assert choose_tiles(DecodeAttention(*numbers), A100) != choose_tiles(PromptAttention(*numbers), A100)


def test_a_choice_is_printed_once_when_the_environment_asks_for_it(monkeypatch, capsys):
    monkeypatch.setenv("GAPLESS_TILES", "1")
    for _ in range(2):
        choose_tiles(FewRowsProduct(3, 4096, 1000), H200)
    assert capsys.readouterr().err == (
        "FewRowsProduct(rows=3, columns=4096, depth=1000, adapted=False) on nvidia 9.0: "
        "FewRowsTiles(columns=64, depth=1024, warps=8, stages=1, splits=1)\n"
    )
