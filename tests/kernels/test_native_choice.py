"""The choice between two ways to multiply, here AMX and AVX512-BF16: measured once for each shape, kept, and the same
for any number of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from gapless.base.errors import UserError
from gapless.device import build
from gapless.kernels import native
from gapless.kernels.native import Way, choice

FAST, SLOW = 1 / 2048, 1 / 512
"""Seconds, which sum up without rounding."""
WAYS = (Way.AMX, Way.BF16_DOT)
PAIR = "amx or bf16_dot"


class Products:
    """Stands in for torch.ops.gapless, and for the clock: each path takes its seconds, by rows."""

    def __init__(self, amx=lambda rows: FAST, vectors=lambda rows: SLOW):
        self.seconds, self.calls, self.now = {Way.AMX: amx, Way.BF16_DOT: vectors}, [], 0.0
        self.linear = self
        self.default = self

    def __call__(self, x, packed, outputs, bias, way):
        self.calls.append((len(x), len(packed), outputs, way))
        self.now += self.seconds[way](len(x))


@pytest.fixture
def products(monkeypatch):
    def use(**seconds):
        made = Products(**seconds)
        monkeypatch.setattr(choice.torch.ops, "gapless", made, raising=False)
        monkeypatch.setattr(choice, "perf_counter", lambda: made.now)
        monkeypatch.setattr(choice, "spent", 0.0)
        return made

    return use


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kernels-of-this-build.json"


def asked(kept, outputs=96, inputs=33):
    packed = torch.zeros(outputs * (inputs + 1), dtype=torch.bfloat16)
    return choice.fastest(WAYS, packed, outputs, inputs, kept) is Way.AMX


def test_the_faster_one_serves(products, kept, tmp_path):
    products()
    assert asked(kept)
    products(amx=lambda rows: SLOW, vectors=lambda rows: FAST)
    assert not asked(tmp_path / "other.json")


def test_one_answer_weighs_all_numbers_of_rows(products, kept, tmp_path):
    """Twice the time of the vectors at one row, a quarter of it from eight rows on: AMX; the other way round: not."""
    products(amx=lambda rows: 4 * FAST if rows == 1 else FAST, vectors=lambda rows: 2 * FAST if rows == 1 else 4 * FAST)
    assert asked(kept)
    products(amx=lambda rows: FAST if rows == 1 else 4 * FAST, vectors=lambda rows: 2 * FAST if rows == 1 else FAST)
    assert not asked(tmp_path / "other.json")


def test_both_are_measured_in_turns_at_each_number_of_rows(products, kept):
    made = products()
    asked(kept)
    want = [(rows, 96 * 34, 96, way) for rows in choice.CHOICE_ROWS for _ in range(choice.CHOICE_TURNS) for way in WAYS]
    assert made.calls == want


def test_a_shape_is_measured_once_and_the_answer_kept(products, kept):
    products(amx=lambda rows: SLOW, vectors=lambda rows: FAST)
    assert not asked(kept)
    made = products()  # another process, another moment
    assert not asked(kept) and made.calls == []
    assert asked(kept, outputs=64) and made.calls != []
    four = len(choice.CHOICE_ROWS)
    assert list(json.loads(kept.read_text()).values()) == [[SLOW / FAST] * four, [FAST / SLOW] * four]
    assert {path.name for path in kept.parent.iterdir()} == {kept.name, choice.CHOICES_LOCK}


def test_the_only_way_is_not_measured(products, kept):
    made = products()
    assert choice.fastest([Way.FLOATS], torch.zeros(0), 96, 33, kept) is Way.FLOATS and not made.calls


def test_a_start_without_amx_does_not_take_what_was_measured_with_it(products, kept):
    products(amx=lambda rows: SLOW, vectors=lambda rows: FAST)
    assert not asked(kept)
    made = products(vectors=lambda rows: FAST)
    made.seconds[Way.FLOATS] = lambda rows: SLOW
    packed = torch.zeros(96 * 34, dtype=torch.bfloat16)
    assert choice.fastest((Way.BF16_DOT, Way.FLOATS), packed, 96, 33, kept) is Way.BF16_DOT and made.calls


def test_other_threads_are_another_shape(products, kept):
    products()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            asked(kept)
    finally:
        torch.set_num_threads(before)
    assert list(choice.read(kept)) == [f"{PAIR}: 96 x 33, 1 threads", f"{PAIR}: 96 x 33, 2 threads"]


def test_a_near_tie_is_amx(products, kept):
    kept.write_text(json.dumps({f"{PAIR}: 96 x 33, {torch.get_num_threads()} threads": [1.05] * 4}))
    assert asked(kept)


def test_of_a_large_matrix_the_first_columns_are_measured(products, kept, monkeypatch):
    monkeypatch.setattr(choice, "SAMPLE", 33 * 70)
    made = products()
    asked(kept)
    assert {call[1:3] for call in made.calls} == {(64 * 34, 64)}


def test_the_time_of_measuring_is_bounded(products, kept):
    """A shape that passes the bound is measured whole; those after it get AMX, unmeasured."""
    turns = 2 * choice.CHOICE_TURNS * len(choice.CHOICE_ROWS)
    each = choice.MEASURING_SECONDS / turns * 0.8
    made = products(amx=lambda rows: each, vectors=lambda rows: each)
    assert all(asked(kept, outputs) for outputs in (32, 64, 96, 128))
    assert list(choice.read(kept).values()) == [[1.0] * 4, [1.0] * 4, [], []]
    assert len(made.calls) == 2 * turns


A_PROCESS = """
import sys, time
from pathlib import Path
from gapless.kernels.native import Way, choice
import torch

def measured(*weight):
    time.sleep(0.3)  # the other one is at this too, if it may be
    return [float(sys.argv[2])]

choice.measured_ratios = measured
print("ready", flush=True)
for outputs in map(int, sys.stdin.readline().split()):
    way = choice.fastest((choice.Way.AMX, choice.Way.FLOATS), torch.zeros(0), outputs, 8, Path(sys.argv[1]))
    print(way == choice.Way.AMX, flush=True)
"""


@pytest.mark.process
def test_processes_of_one_start_use_the_same_answers(kept):
    """Each would measure another answer than the other."""
    command, pipes = (sys.executable, "-c", A_PROCESS, str(kept)), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as running:
        two = [running.enter_context(subprocess.Popen([*command, own], **pipes, text=True)) for own in ("0.5", "2.0")]
        assert [process.stdout.readline() for process in two] == ["ready\n"] * 2
        for process in two:
            process.stdin.write("16 32 48\n")
            process.stdin.flush()
        one, other = (process.communicate(timeout=60)[0].split() for process in two)
    assert len(one) == 3 and one == other
    assert [str(choice.serves_first(ratios)) for ratios in choice.read(kept).values()] == one


def test_a_process_that_never_ends_its_measuring_is_an_error(products, kept, monkeypatch):
    """Measured beside that process, this one might choose otherwise."""
    made = products()
    monkeypatch.setattr(choice, "CHOICES_LOCK_SECONDS", 0.1)
    with (
        build.only_one(kept.parent / choice.CHOICES_LOCK, 0),
        pytest.raises(UserError, match=f"{choice.CHOICES_LOCK} is still locked"),
    ):
        asked(kept)
    assert not made.calls
    assert asked(kept) and made.calls


def test_a_broken_file_of_choices_is_measured_again(products, kept):
    kept.write_text("{")
    made = products()
    assert asked(kept) and made.calls and choice.read(kept)


def test_a_folder_that_cannot_be_written_is_as_good(products, tmp_path):
    made = products()
    assert asked(tmp_path / "missing" / "kept.json") and made.calls


@pytest.mark.parametrize("missing", ["", "gave wrong sums in a product"])
def test_a_layer_takes_what_serves(monkeypatch, missing):
    """What the layer hands to the product, for every number of rows."""
    seen = []

    class Ops:
        linear_pack = type("", (), {"default": staticmethod(lambda weight: weight.flatten())})
        linear = type("", (), {"default": staticmethod(lambda *given: seen.append(given[-1]))})
        amx_missing = staticmethod(lambda: missing)
        has_bf16_dot = staticmethod(lambda: True)

    monkeypatch.setattr(native.torch.ops, "gapless", Ops, raising=False)
    monkeypatch.setattr(native, "choices_file", lambda: None)
    monkeypatch.setattr(choice, "fastest", lambda ways, *shape: ways[0])
    layer = native.NativeLinear(torch.zeros(16, 32, dtype=torch.bfloat16))
    for rows in (1, 200):
        layer(torch.zeros(rows, 32, dtype=torch.bfloat16))
    assert seen == [Way.BF16_DOT if missing else Way.AMX] * 2


def test_the_choices_are_described(monkeypatch, kept, tmp_path):
    monkeypatch.setattr(native, "load", lambda: object())
    monkeypatch.setattr(native, "ways", lambda dtype: WAYS)
    built = build.Outcome(tmp_path / "kernels-1.so", "", 0.0, notes=tmp_path / "kernels-1.json")
    monkeypatch.setattr(build, "outcomes", {native.NAME: built})
    assert native.chosen() == []
    shapes = {
        f"{PAIR}: 64 x 8, 2 threads": [0.5, 0.5, 0.25, 0.25],
        f"{PAIR}: 8 x 64, 2 threads": [2.0] * 4,
        f"{PAIR}: 8 x 8, 2 threads": [],
        "bf16_dot or floats: 8 x 8, 2 threads": [2.0] * 4,
    }
    (tmp_path / "kernels-1.json").write_text(json.dumps(shapes))
    assert native.chosen() == [
        "64 x 8, 2 threads: amx, amx takes 0.35 of the time of bf16_dot",
        "8 x 64, 2 threads: bf16_dot, amx takes 2.00 of the time of bf16_dot",
        "8 x 8, 2 threads: amx, not measured",
    ]
    monkeypatch.setattr(native, "ways", lambda dtype: [Way.FLOATS])
    assert native.chosen() == []
