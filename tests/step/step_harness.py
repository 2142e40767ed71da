"""Rows of sampler settings, written down without the packet."""

from __future__ import annotations

import numpy as np
import torch

from gapless.base.params import MAX_STOP_IDS, SamplingParams
from gapless.base.records import Request
from gapless.step.launcher import _mode, _union
from gapless.step.tables import NO_TOKEN, RowParams


def request(params=None, seed=0, stop_ids=(), min_len=0, max_len=64, tokens=(1,), key=0, **sampling):
    params = params or SamplingParams(**{"max_tokens": None, **sampling})
    return Request(key, np.array(tokens, np.int32), params, seed, tuple(stop_ids), min_len, max_len)


def row_params(requests):
    """RowParams of requests, field by field."""

    def column(values, dtype):
        return torch.tensor(values, dtype=dtype)[:, None]

    settings = [r.params for r in requests]
    padded = [list(r.stop_ids) + [NO_TOKEN] * (MAX_STOP_IDS - len(r.stop_ids)) for r in requests]
    return RowParams(
        min_len=torch.tensor([r.min_len for r in requests], dtype=torch.int32),
        max_len=torch.tensor([r.max_len for r in requests], dtype=torch.int32),
        temperature=column([s.temperature for s in settings], torch.float32),
        top_k=column([s.top_k for s in settings], torch.int32),
        top_p=column([s.top_p for s in settings], torch.float32),
        min_p=column([s.min_p for s in settings], torch.float32),
        seed=torch.tensor([r.seed for r in requests]).view(torch.int32).view(-1, 2),
        stop_ids=torch.tensor(padded, dtype=torch.int32),
    )


def mode_of(requests):
    """The narrowest mode that serves all of them, as a step would choose it."""
    return _union([_mode(r) for r in requests])
