"""The machine code of AMX's instructions, which compile also where they may not run, against Intel's manual."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

from gapless.device import compiling, prebuilt
from gapless.kernels import native

pytestmark = pytest.mark.process
KNOWN = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", *prebuilt.AMX_FLAGS)
"""What the sources ask of the compiler before they use AMX: without one of them they have none of it."""
LINE = re.compile(r"^ *[0-9a-f]+:\t((?:[0-9a-f]{2} )+) *\t(ldtilecfg|tile\w+|tdp\w+) *(.*)$")
NONE, F3, F2 = 0, 2, 3  # the prefix in the third byte of VEX
FEW_AND_MANY = {(0, 4, 6), (1, 4, 7), (2, 4, 6), (3, 4, 7), (1, 5, 6), (2, 4, 7), (3, 5, 7)}
MULTIPLIED = {
    "linear_amx": ("tdpbf16ps", FEW_AND_MANY),
    "fp8": ("tdpbf16ps", FEW_AND_MANY),
    "bytes_amx": ("tdpbsud", FEW_AND_MANY),
    "attention_amx": ("tdpbf16ps", {(0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)}),
}
"""How each source multiplies, and (sums, x, weight) of every multiplication"""
OPCODES = {"tdpbf16ps": 0x5C, "tdpbsud": 0x5E}
RELEASE = bytes((0xC4, 0xE2, 0x78, 0x49, 0xC0))


class Instruction(NamedTuple):
    code: bytes
    name: str
    operands: str

    @property
    def tiles(self) -> tuple[int, ...]:
        """In Intel's order: the one written first."""
        return tuple(int(number) for number in reversed(re.findall(r"%tmm(\d)", self.operands)))


@pytest.fixture(scope="module", params=sorted(MULTIPLIED))
def stem(request):
    return request.param


@pytest.fixture(scope="module")
def instructions(tmp_path_factory, stem):
    tmp_path = tmp_path_factory.mktemp(stem)
    if platform.machine() != "x86_64":
        pytest.skip(f"AMX is no part of {platform.machine()}")
    tool, dump = compiling.compiler(), shutil.which("objdump")
    if tool is None or dump is None:
        pytest.skip("no C++ compiler here" if tool is None else "no objdump here")
    flags = [*compiling.FLAGS, *KNOWN]
    (tmp_path / "empty.cpp").touch()
    if subprocess.run([tool, *flags, "-c", tmp_path / "empty.cpp", "-o", tmp_path / "empty.o"]).returncode:
        pytest.skip(f"{tool} does not know AMX")
    source, made = next(path for path in native.SOURCES if path.stem == stem), tmp_path / "made.o"
    subprocess.run([tool, *flags, "-c", source, "-o", made], check=True)
    said = subprocess.run([dump, "-d", "-w", made], check=True, capture_output=True, text=True).stdout
    found = [Instruction(bytes.fromhex(m[1]), m[2], m[3]) for m in map(LINE.match, said.splitlines()) if m]
    if not found and RELEASE in made.read_bytes():
        pytest.skip(f"{dump} does not know AMX")
    return found


def begins(instruction: Instruction, prefix: int, opcode: int, more: int = 0) -> bool:
    """VEX.128.0F38.W0 with this prefix and opcode; `more` is the register in the third byte, 0 for none."""
    vex, map_byte, third, code = instruction.code[:4]
    return (vex, map_byte & 0x1F, third, code) == (0xC4, 2, (~more & 15) << 3 | prefix, opcode)


def from_memory(instruction: Instruction, tile: int, by_index: bool) -> bool:
    """Memory is named; in the tile's moves by base and index, whose register is the stride."""
    kind, register, place = instruction.code[4] >> 6, instruction.code[4] >> 3 & 7, instruction.code[4] & 7
    if by_index and (place != 4 or not re.search(r"\(%\w+,%\w+,1\)", instruction.operands)):
        return False
    return kind != 3 and register == tile


def right(instruction: Instruction) -> bool:
    name, tiles, last = instruction.name, instruction.tiles, instruction.code[4]
    if name == "ldtilecfg":
        return begins(instruction, NONE, 0x49) and from_memory(instruction, 0, False)
    if name == "tilerelease":
        return instruction.code == RELEASE
    if name == "tilezero":
        return begins(instruction, F2, 0x49) and last == 0xC0 | tiles[0] << 3
    if name in ("tileloadd", "tilestored"):
        return begins(instruction, F2 if name == "tileloadd" else F3, 0x4B) and from_memory(instruction, tiles[0], True)
    sums, x, weight = tiles
    return name in OPCODES and begins(instruction, F3, OPCODES[name], weight) and last == 0xC0 | sums << 3 | x


def test_each_instruction_is_what_the_manual_says(instructions):
    assert [one for one in instructions if not right(one)] == []


def test_each_form_is_there_with_its_tiles(instructions, stem):
    forms = {(one.name, one.tiles) for one in instructions}
    sums, factors, (multiplies, triples) = range(4), range(4, 8), MULTIPLIED[stem]
    assert forms == {
        ("ldtilecfg", ()),
        ("tilerelease", ()),
        *(("tilezero", (tile,)) for tile in sums),
        *(("tileloadd", (tile,)) for tile in factors),
        *(("tilestored", (tile,)) for tile in sums),
        *((multiplies, triple) for triple in triples),
    }
