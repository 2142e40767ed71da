"""A small dense model whose steps with chunks are captured, as on a GPU; C++ kernels stand for Triton's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from tiny_models import tiny_config

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from native_kernels import load_native

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.loop.spec import Sizes
from gapless.model.loader import load_model
from gapless.step import graphs
from gapless.testing.loops import loop_of

VOCAB, LONGEST, REQUESTS = 97, 40, 120
SHAPE = Sizes(rows=5, max_len=LONGEST, pages=30, page_size=8, step_tokens=70, queue=64)
CONFIG = tiny_config(vocab_size=VOCAB)
SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "min_tokens": 3},
    *[{"temperature": 0.0}] * 8,
    {"temperature": 0.0, "logprobs": 3},
)


def dense_model(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(model=str(folder), load_format="dummy", dtype="float32")
    return load_model(config, torch.device("cpu"), load_native())


def engine(device, model, depth=2, mixed=graphs.ON_GPU, shape=SHAPE, **options):
    return loop_of(device, model, shape, depth, kernels=load_native(), mixed=mixed, **options)


def drive(loop, settings, apart=4, scores=None):
    """REQUESTS, every `apart` turns up to three at once, the last of which is aborted; the others' tokens.

    `scores` gets the log-probabilities, by request and position.
    """
    random = np.random.default_rng(0)
    found, key = {}, 0
    for turn in range(2_000):
        if key < REQUESTS and turn % apart == 0:
            for _ in range(min(1 + turn % 3, REQUESTS - key)):
                tokens = np.concatenate((np.arange(9), random.integers(0, VOCAB, 1 + key * 7 % 25))).astype(np.int32)
                params = SamplingParams(max_tokens=None, **settings[key % len(settings)])
                length = min(LONGEST, len(tokens) + 2 + key % 9)
                loop.submit(Request(key, tokens, params, key << 30, (7, 8), len(tokens) + params.min_tokens, length))
                key += 1
        if key == REQUESTS:
            loop.abort(key - 1)
            found.pop(key - 1, None)
        if not loop.has_work() and key == REQUESTS:
            return found
        for step in loop.turn().tokens:
            for one, token, _ in step.entries():
                found.setdefault(one, []).append(token)
            if scores is not None and step.logprobs is not None:
                keys, positions, values = (column.tolist() for column in step.logprobs[:3])
                scores.update(zip(zip(keys, positions, strict=True), values, strict=True))
    raise AssertionError("requests did not end")
