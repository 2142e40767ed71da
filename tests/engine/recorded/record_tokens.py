"""Records what the engine answers now: `python record_tokens.py` in this folder, with the project on PYTHONPATH.

Refuses when two engines disagree, or when a recorded choice of the exact model hangs on the last bits of a logarithm.
"""

from __future__ import annotations

import json
from pathlib import Path

import demo_engines
import numpy as np
import tied_model
from tied_model import SHAPES, VOCAB, Shape, every_request

from gapless.base.records import Request
from gapless.engine import checkers
from gapless.testing.checksum import PRIME

HERE = Path(__file__).parent
TIED, DEMO = HERE / "tied_model.json", HERE / "demo.json"
CLEAR = 1e-5
"""The best score is further than this from the second, and a filter that cuts this much elsewhere changes nothing."""


def main() -> None:
    checkers.connect()
    tied = {}
    for name, shape in SHAPES.items():
        tied[name] = agreed([tied_model.play(shape, *arm)[0] for arm in tied_model.ARMS[:2]])
        check_clear(shape, tied[name])
    write(TIED, tied)
    demo: dict = {"arithmetic": demo_engines.arithmetic()}
    for kernels in demo_engines.KERNELS:
        demo[kernels] = agreed([demo_engines.play(*arm) for arm in demo_engines.ARMS if arm[0] == kernels])
    write(DEMO, demo)


def agreed(plays: list[dict]) -> dict:
    """The first, when all others say the same. The last place of a log-probability may be another."""
    first = plays[0]
    for other in plays[1:]:
        assert not list(demo_engines.differences(first, other)), "engines disagree"
    return first


def write(path: Path, record: dict) -> None:
    """A line a request, so that a change can be read."""
    lines = []
    for part, found in record.items():
        inner = [f" {json.dumps(name)}:{json.dumps(each, separators=(',', ':'))}" for name, each in found.items()]
        lines.append(f"{json.dumps(part)}:{{\n" + ",\n".join(inner) + "\n}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(path.name, path.stat().st_size, "bytes")


def check_clear(shape: Shape, record: dict) -> None:
    """Every recorded token is that of a computation in float64, and stays so when filters cut a little elsewhere."""
    answers: dict[str, int] = {}
    for wish, request in every_request().values():
        index = answers[wish.name] = answers.get(wish.name, -1) + 1
        recorded = record[wish.name]["outputs"][index]["tokens"]
        tokens, fold = request.tokens.tolist(), 0
        for place in range(len(tokens) + len(recorded)):
            if place >= len(tokens):
                tokens.append(recorded[place - len(request.tokens)])
            if place >= len(request.tokens):
                for nudge in (0.0, CLEAR, -CLEAR):
                    chosen, clear = choose(direct_logits(shape, fold), request, place, nudge)
                    assert chosen == tokens[place] and clear > CLEAR, f"{wish.name}: not clear at {place} ({clear})"
            value = (tokens[place] * 7_368_787 + place * 104_729 + 15_485_863) % PRIME
            fold = (fold + value * ((place * 48_271 + 1_299_709) % PRIME)) % PRIME


def direct_logits(shape: Shape, fold: int) -> np.ndarray:
    return (fold * np.arange(1, VOCAB + 1) % shape.modulus - shape.shift) / shape.scale


def choose(logits: np.ndarray, request: Request, place: int, nudge: float) -> tuple[int, float]:
    """The token at `place`, and by how much its score is the best."""
    params, logits = request.params, logits.copy()
    if place + 1 <= request.min_len:
        logits[list(request.stop_ids)] = -np.inf
    order = np.lexsort((np.arange(VOCAB), -logits))
    if params.temperature == 0:
        return int(order[0]), 1.0
    order = order[: params.top_k or VOCAB]
    weight = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    before = (weight.cumsum() - weight) / weight.sum()
    kept = (before < params.top_p + nudge) | (params.top_p >= 1.0)
    kept &= (weight == 1.0) | (weight >= params.min_p * (1 + nudge))  # that of the best is 1 on every processor
    kept[0] = True
    scores = logits[order[kept]] / params.temperature + noise(place, request.seed)[order[kept]]
    best = np.argsort(-scores, kind="stable")
    clear = scores[best[0]] - scores[best[1]] if len(best) > 1 else 1.0
    return int(order[kept][best[0]]), float(clear)


def noise(place: int, seed: int) -> np.ndarray:
    """Gumbel noise of all tokens at a place: Philox4x32-10 by its definition."""
    word, mask = np.uint64(0xFFFFFFFF), 0xFFFFFFFF
    block = np.arange(-(-VOCAB // 4), dtype=np.uint64)
    a, b = block, np.full_like(block, place)
    c, d = np.zeros_like(block), np.zeros_like(block)
    low, high = seed & mask, seed >> 32 & mask
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (q >> np.uint64(32)) ^ b ^ np.uint64(low), q & word
        c, d = (p >> np.uint64(32)) ^ d ^ np.uint64(high), p & word
        low, high = (low + 0x9E3779B9) & mask, (high + 0xBB67AE85) & mask
    words = np.stack((a, b, c, d), 1).ravel()[:VOCAB]
    return -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2**32))


if __name__ == "__main__":
    main()
