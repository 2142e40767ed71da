"""A drafter that is given the answers."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from harness import VOCAB
from torch import Tensor

from gapless.base.records import Int32s
from gapless.guard.race_index import STATED
from gapless.kernels.layout import ACTIVE, DRAFTED, DRAFTS, LENGTH, MAX_LEN
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables

MOST = 4

_LIBRARY = torch.library.Library("gapless_scripted", "DEF")
_LIBRARY.define("draft(int script, Tensor rows, Tensor(a!) state, Tensor params, Tensor(b!) history) -> ()")
_SCRIPTS: list[Scripted] = []


class Scripted(NamedTuple):
    """Drafts what answers that are known go on with; each token is another one with probability `errs`."""

    number: int
    answers: list[list[int]]
    """Prompts, and what is sampled after them"""
    errs: float

    @classmethod
    def new(cls, answers: list[list[int]], errs: float) -> Scripted:
        _SCRIPTS.append(cls(len(_SCRIPTS), answers, errs))
        return _SCRIPTS[-1]

    def __call__(self, kernels: Kernels, rows: Tensor, tables: Tables) -> None:
        torch.ops.gapless_scripted.draft(self.number, rows, *tables[:3])

    def draft(self, row: int, state: Int32s, params: Int32s, history: Int32s) -> None:
        length = int(state[LENGTH])
        known = history[:length].tolist()
        rest = next((answer[length:] for answer in self.answers if answer[:length] == known), [])
        most = min(MOST, int(params[DRAFTS]), int(params[MAX_LEN]) - 1 - length, len(rest)) * int(state[ACTIVE])
        for index, token in enumerate(rest[: max(0, most)]):
            wrong = random.Random((length + index) * 31 + row).random() < self.errs
            history[length + index] = (token + 1) % VOCAB if wrong else token
        state[DRAFTED] = length + max(0, most)


def _draft(script: int, rows: Tensor, *tables: Tensor) -> None:
    state, params, history = (table.numpy() for table in tables)
    for row in rows.numpy():
        if row:
            _SCRIPTS[script].draft(int(row), state[row], params[row], history[row])


STATED["gapless_scripted::draft"] = lambda args: [(table, args[1].numpy()) for table in args[2:]]
_LIBRARY.impl("draft", _draft, "CPU")
