"""A model whose logits are exact on every processor and full of ties, and the engines over it that must agree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from wishes import WISHES, Wish

from gapless.base.records import Flag, Request
from gapless.device import CpuDevice
from gapless.engine.inputs import stop_ids
from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.testing.checksum import ChecksumModel
from gapless.testing.sim import SimDevice

VOCAB = 2560
EOS = 11
STOPS = tuple(range(3, 240, 8))
MAX_LEN = 128


class Shape(NamedTuple):
    """Logits of a model: (hash * (token + 1) modulo `modulus` - `shift`) / `scale`; a power of two, so exact."""

    modulus: int
    shift: int
    scale: int


SHAPES = {"sharp": Shape(251, 200, 16), "flat": Shape(13, 7, 8)}
"""About 10 tokens have the same logit, or about 200."""


class TiedModel(ChecksumModel):
    """Its hidden state is the checksum of all KV that it may read, so logits depend on each entry."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(VOCAB, MAX_LEN)
        self.shape = shape

    def logits(self, hidden: Tensor) -> Tensor:
        factors = torch.arange(1, VOCAB + 1, device=hidden.device)
        return (hidden * factors % self.shape.modulus - self.shape.shift).float() / self.shape.scale


ENGINES = {
    # 8 rows and pages for all of them; prompts run in chunks of 40 tokens at most
    "roomy": (Sizes(rows=8, max_len=MAX_LEN, pages=8 * 16 + 1, page_size=8, step_tokens=48, queue=200), {}),
    # little more than the pages of one longest sequence: requests are preempted; chunks are short
    "tight": (Sizes(rows=6, max_len=MAX_LEN, pages=32 + 1, page_size=4, step_tokens=17, queue=200), {}),
    "by priority": (
        Sizes(rows=4, max_len=MAX_LEN, pages=16 + 1, page_size=8, step_tokens=24, queue=200),
        {"by_priority": True, "prefix_caching": False},
    ),
}  # fmt: skip
ARMS = (
    ("sim", "roomy", 1), ("sim", "roomy", 2), ("sim", "roomy", 8), ("sim", "roomy", None),
    ("sim", "tight", 1), ("sim", "tight", 8), ("sim", "by priority", 2),
    ("cpu", "roomy", 1), ("cpu", "roomy", 2), ("cpu", "roomy", 8), ("cpu", "roomy", None),
    ("cpu", "tight", 2), ("cpu", "tight", None), ("cpu", "by priority", 8),
)  # fmt: skip
"""(device, engine, depth) of each playback."""


def prompts() -> dict[str, list[int]]:
    random = np.random.default_rng(2024)

    def some(count: int) -> list[int]:
        return random.integers(0, VOCAB, count).tolist()

    shared = some(37)
    own = {name: shared + some(5) for name in ("shared-a", "shared-b", "shared-c")}
    return {"short": some(6), "one": some(1), "middle": some(19), **own, "long": some(75), "longer": some(97)}


def requests(wish: Wish, first_key: int) -> list[Request]:
    """One request a completion, as the front makes them."""
    params, tokens = wish.sampling(STOPS), np.array(prompts()[wish.prompt], np.int32)
    first = Request(
        key=first_key,
        tokens=tokens,
        params=params,
        seed=wish.seed(0),
        stop_ids=stop_ids(params, VOCAB, (EOS,)),
        min_len=len(tokens) + params.min_tokens,
        max_len=min(MAX_LEN, len(tokens) + (params.max_tokens or MAX_LEN)),
        priority=wish.priority,
    )
    others = params.replace(prompt_logprobs=None)
    further = [
        first._replace(key=first_key + index, seed=wish.seed(index), params=others) for index in range(1, params.n)
    ]
    return [first, *further]


def every_request() -> dict[int, tuple[Wish, Request]]:
    """All requests of all wishes by key: 100 keys a wish."""
    return {
        request.key: (wish, request)
        for number, wish in enumerate(WISHES, 1)
        for request in requests(wish, 100 * number)
    }


def play(shape: Shape, device: str, engine: str, depth: int | None) -> tuple[dict[str, dict], Loop]:
    """What every wish gets from this engine, in the form of the record."""
    opened = SimDevice(5 + (depth or 0)) if device == "sim" else CpuDevice(threads=1)
    sizes, options = ENGINES[engine]
    loop = build_loop(opened, TiedModel(shape), sizes, depth, model_name="tied", **options)
    asked = every_request()
    got = {key: Answer() for key in asked}
    for _, request in asked.values():
        loop.submit(request)
    while loop.has_work():
        for settled in loop.turn().tokens:
            take(got, settled)
    opened.close()
    found: dict[str, dict] = {}
    for key, (wish, _) in asked.items():
        found.setdefault(wish.name, {"outputs": []})["outputs"].append(got[key].output())
        if got[key].prompt:
            found[wish.name]["prompt"] = got[key].prompt
    return found, loop


class Answer:
    """What one request got."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason = ""
        self.scored: list[list[list[float]]] = []
        self.prompt: list[list[list[float]]] = []

    def output(self) -> dict:
        scored = {"logprobs": self.scored} if self.scored else {}
        return {"tokens": self.tokens, "reason": self.reason, **scored}


def take(got: dict[int, Answer], settled) -> None:
    """One step's tokens and log-probabilities."""
    for key, token, flag in settled.entries():
        got[key].tokens.append(token)
        got[key].reason = {Flag.LIVE: "", Flag.STOP: "stop", Flag.LENGTH: "length"}[Flag(flag)]
    lines = settled.logprobs
    if lines is None:
        return
    for at, (key, position) in enumerate(zip(lines.keys.tolist(), lines.positions.tolist(), strict=True)):
        _, request = _BY_KEY[key]
        prompt = request.tokens.tolist()
        new = position >= len(prompt)
        token = got[key].tokens[position - len(prompt)] if new else prompt[position]
        wanted = request.params.logprobs if new else request.params.prompt_logprobs
        own = [token, round(float(lines.logprobs[at]), 4), int(lines.ranks[at])]
        tops = zip(lines.top_ids[at, :wanted].tolist(), lines.top_logprobs[at, :wanted].tolist(), strict=True)
        line = [own, *([token, round(value, 4)] for token, value in tops)]
        kept = got[key].scored if new else got[key].prompt
        assert position == len(kept) + (len(prompt) if new else 1), f"request {key}: scored out of order"
        kept.append(line)


_BY_KEY = every_request()
