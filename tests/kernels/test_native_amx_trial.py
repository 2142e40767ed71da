"""Before AMX serves, a process compares it with the vectors; here with emulated tiles, right ones and broken ones."""

from __future__ import annotations

import ctypes
import shutil
import time

import pytest

FAULTS = {
    "odd products": b"gave wrong sums in a product",
    "last row": b"gave wrong sums in a product",
    "kept sums": b"gave wrong sums in a product",
    "second weight": b"gave wrong sums in a product",
    "narrow store": b"gave wrong sums in attention",
    "signed weight": b"gave wrong sums in a product of bytes",
}


@pytest.fixture
def library(emulated_amx, tmp_path, monkeypatch):
    """A copy of its own: what it found out about AMX is forgotten."""
    monkeypatch.delenv("GAPLESS_AMX", raising=False)
    loaded = ctypes.CDLL(shutil.copy(emulated_amx, tmp_path / "own.so"))
    loaded.trial.restype = loaded.missing.restype = ctypes.c_char_p
    loaded.attends.restype = ctypes.c_bool
    return loaded


def test_right_sums_let_amx_serve(library):
    assert library.trial() == library.missing() == b"" and library.attends(ctypes.c_int64(64))


@pytest.mark.parametrize(("fault", "reason"), FAULTS.items())
def test_wrong_sums_keep_it_off(library, fault, reason):
    library.set_fault(1 + list(FAULTS).index(fault))
    assert library.trial() == library.missing() == reason
    library.set_fault(0)
    assert library.trial() == b""
    assert library.missing() == reason and not library.attends(ctypes.c_int64(64)), "found out once"


def test_the_reason_of_linux_is_given(library):
    library.set_refusal(b"refused by Linux: Operation not permitted")
    assert library.missing() == b"refused by Linux: Operation not permitted"
    assert not library.attends(ctypes.c_int64(64))


@pytest.mark.parametrize(
    ("word", "off"), [*((no, True) for no in ("0", "off", "no", "false")), ("", False), ("on", False)]
)
def test_the_switch_turns_it_off_and_may_say_on(library, monkeypatch, word, off):
    monkeypatch.setenv("GAPLESS_AMX", word)
    assert library.missing() == (b"switched off by GAPLESS_AMX" if off else b"")
    assert library.attends(ctypes.c_int64(64)) == (not off)


def test_a_trial_of_amx_takes_a_bounded_time(library):
    """Even with emulated tiles, which are a hundred times slower than real ones."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        library.trial()
        times.append(time.perf_counter() - start)
    assert min(times) < 2
