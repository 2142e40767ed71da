"""Kernels share their work: with helpers that come late or not at all, and with several callers at once."""

from __future__ import annotations

import ctypes
import shutil
import threading

import pytest
import torch
from kernels.native_kernels import load_native

from gapless.device import build
from gapless.kernels import native

ROWS, SIZE = 200, 1024


@pytest.fixture
def three_threads():
    load_native()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_every_piece_is_done_once(three_threads):
    """In place, so that a piece that is done twice, or not at all, is seen. More threads than cores: some come late."""
    kernels = load_native()
    weight, one = torch.ones(SIZE), torch.ones(ROWS, SIZE)
    x = torch.zeros(ROWS, SIZE)
    for turn in range(1, 301):
        kernels.add_rms_norm(x, one, weight, 1e-6)
        assert bool((x == turn).all())


def test_callers_at_once_do_not_disturb_each_other(three_threads):
    """One has the helpers, the others work alone; none disturbs another."""
    kernels, wrong = load_native(), []

    def call(number: int) -> None:
        torch.set_num_threads(3)
        x, step = torch.zeros(ROWS, SIZE), torch.full((ROWS, SIZE), float(number))
        for turn in range(1, 101):
            kernels.add_rms_norm(x, step, torch.ones(SIZE), 1e-6)
            if not bool((x == turn * number).all()):
                wrong.append((number, turn))

    callers = [threading.Thread(target=call, args=(number,)) for number in (1, 2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong


SHARES = """
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include "parallel.h"
using namespace gapless;

// Pieces of some microseconds, so that helpers come in time; the one of this number raises.
static int run(int64_t raises) {
  std::atomic<int> done{0};
  try {
    share(500, true, [&](int64_t i, bool) {
      for (auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(3);
           std::chrono::steady_clock::now() < end;) {}
      if (i == raises) throw std::runtime_error("piece");
      done++;
    });
  } catch (const std::runtime_error&) {
    return -1;
  }
  return done;
}

extern "C" __attribute__((visibility("default"))) int errors_come_back() {
  omp_set_num_threads(3);
  int found = 0;
  for (int turn = 0; turn < 100; turn++) found += run((turn * 37) % 500) == -1 && run(-1) == 500;
  return found;
}

extern "C" __attribute__((visibility("default"))) int child_goes_on() {
  omp_set_num_threads(3);
  run(-1);
  pid_t child = fork();
  if (!child) _exit(run(-1) == 500 && run(-1) == 500 ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}
"""


@pytest.fixture(scope="module")
def shares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shares")
    for source in native.SOURCES:
        if source.stem == "parallel":
            shutil.copy(source, folder)
    (folder / "shares.cpp").write_text(SHARES)
    outcome = build.build("shares", sorted(folder.iterdir()))
    if outcome.library is None:
        pytest.skip(f"no C++ here: {outcome.reason}")
    return ctypes.CDLL(str(outcome.library))


def test_an_error_in_a_piece_comes_back_to_the_caller(shares):
    """Whichever thread ran it, and the next call is as good as any."""
    assert shares.errors_come_back() == 100


def test_a_forked_child_has_helpers_of_its_own(shares):
    assert shares.child_goes_on() == 0
