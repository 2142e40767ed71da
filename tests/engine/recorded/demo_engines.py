"""The demo model through `LLM`, and the rule by which its answers are compared with recorded ones.

Its logits are sums of float32 products, whose last bits belong to a processor and to torch's matrix kernels. Where both
are those of the record, tokens must be equal. Elsewhere a token may differ where the model as it runs here gives both
candidates the same score to within NEAR, and the answer is not compared any further, since another text follows.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from wishes import WISHES, Wish

from gapless import LLM, SamplingParams
from gapless.kernels import native
from gapless.kernels.random import gumbel

NEAR = 2e-3
"""Of a score, which is a log-probability over the temperature plus noise. Roundings differ by less than 1e-4."""
ROUNDED = 1.5e-4
"""Log-probabilities are stored with four places."""
KERNELS = ("native", "torch")
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"max_num_seqs": 16},
    "tight": {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 176, "num_gpu_blocks_override": 14},
    "by priority": {"max_num_seqs": 6, "scheduling_policy": "priority", "enable_prefix_caching": False,
                    "max_num_batched_tokens": 64},
    "eager": {"enforce_eager": True, "max_num_seqs": 32, "block_size": 4},
}  # fmt: skip
ARMS = (
    ("native", "tight", "4"), ("native", "roomy", "auto"), ("native", "tight", "1"), ("native", "by priority", "2"),
    ("native", "eager", "2"), ("torch", "roomy", "2"), ("torch", "tight", "2"), ("torch", "eager", "auto"),
)  # fmt: skip
"""(kernels, engine, depth) of each playback, the sharpest first."""
_SHARED = (
    "Question: A baker bakes 24 loaves on Monday and twice as many on Tuesday. She sells half of all the loaves. "
    "How many loaves are left?\nAnswer:"
)
TEXTS = {
    "short": "Question: What is 12 + 30?\nAnswer:",
    "one": "A",
    "middle": "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?\nAnswer:",
    "shared-a": _SHARED + " On Monday",
    "shared-b": _SHARED + " 24 loaves",
    "shared-c": _SHARED + "",
    "long": " ".join(f"Question: What is {n} + {n + 9}?\nAnswer: {2 * n + 9}" for n in (7, 12, 30)) + "\nQuestion:",
    "longer": " ".join(f"{n} plus {n} is {2 * n}." for n in range(8)) + " 9 plus 9 is",
}


def arithmetic() -> dict[str, str]:
    """What the last bits of the model's sums may depend on."""
    flags, cpu = "", Path("/proc/cpuinfo")
    if cpu.exists():
        line = next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "")
        flags = " ".join(sorted(flag for flag in line.split() if flag.startswith(("avx", "amx", "fma"))))
    return {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "processor": flags,
    }


def open_demo(kernels: str, engine: str, depth: str) -> LLM:
    """An engine over the demo model, with the C++ kernels or plain torch."""
    options = {"device": "cpu", "threads": 1, "kv_cache_memory_bytes": 64 << 20, **ENGINES[engine], "depth": depth}
    if kernels == "native":
        return LLM("demo", **options)
    with patch.object(native, "load", lambda: None):
        return LLM("demo", **options)


def stop_ids(llm: LLM) -> tuple[int, ...]:
    """Tokens that the demo model likes to write: digits, an equals sign and a new line."""
    encode = llm.get_tokenizer().encode
    return tuple(sorted({token for text in ("=", " =", "4", "2", "\n") for token in encode(text)}))


def play(kernels: str, engine: str, depth: str) -> dict[str, dict]:
    """What every wish gets from this engine, in the form of the record."""
    with open_demo(kernels, engine, depth) as llm:
        assert native.load() or kernels == "torch", "no C++ compiler here"
        stops = stop_ids(llm)
        outputs = llm.generate(
            [TEXTS[wish.prompt] for wish in WISHES],
            [wish.sampling(stops) for wish in WISHES],
            use_tqdm=False,
            priority=[wish.priority for wish in WISHES],
        )
    return {wish.name: record(output) for wish, output in zip(WISHES, outputs, strict=True)}


def record(output) -> dict:
    """One request's answers as the record holds them."""
    found: dict = {"outputs": []}
    for one in output.outputs:
        scored = {"logprobs": [scores(place) for place in one.logprobs]} if one.logprobs else {}
        found["outputs"].append({"tokens": one.token_ids, "reason": one.finish_reason, **scored})
    if output.prompt_logprobs:
        found["prompt"] = [scores(place) for place in output.prompt_logprobs[1:]]
    return found


def scores(place) -> list[list[float]]:
    """[token, log-probability, rank] of each token of one place."""
    return [[token, round(float(one.logprob), 4), one.rank] for token, one in place.items()]


def differences(recorded: dict[str, dict], found: dict[str, dict]) -> Iterator[tuple[str, int, int]]:
    """(wish, completion, place of the first token that differs) of all answers whose tokens differ."""
    assert list(recorded) == list(found), "the requests are not those of the record: record again"
    for name, want in recorded.items():
        got = found[name]["outputs"]
        assert len(want["outputs"]) == len(got), f"{name}: {len(got)} completions instead of {len(want['outputs'])}"
        for index, (old, new) in enumerate(zip(want["outputs"], got, strict=True)):
            if (old["tokens"], old["reason"]) != (new["tokens"], new["reason"]):
                pairs = zip(old["tokens"], new["tokens"], strict=False)
                shorter = min(len(old["tokens"]), len(new["tokens"]))
                yield name, index, next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def gap(llm: LLM, wish: Wish, index: int, prefix: list[int], tokens: tuple[int, int]) -> float:
    """How far apart the scores of two candidates for the next token after `prefix` are, as the model runs here."""
    temperature = wish.sampling(()).temperature
    probe = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    ids = [llm.get_tokenizer().encode(TEXTS[wish.prompt]) + prefix + [token] for token in tokens]
    places = [output.prompt_logprobs[-1] for output in llm.generate(ids, probe, use_tqdm=False)]
    scores = [place[token].logprob for place, token in zip(places, tokens, strict=True)]
    if temperature > 0:
        seed = torch.tensor([wish.seed(index)]).view(torch.int32)[None]
        noise = gumbel(None, llm.info.vocab_size, torch.tensor([[len(ids[0]) - 1]]), seed)[0].tolist()
        scores = [score / temperature + noise[token] for score, token in zip(scores, tokens, strict=True)]
    return abs(scores[0] - scores[1])


def worst(old: list, new: list) -> float:
    """How far the log-probabilities of two lists of scored places are apart at most. inf: other places or tokens."""
    if len(old) != len(new):
        return math.inf
    far = 0.0
    for before, after in zip(old, new, strict=True):
        if before[0][0] != after[0][0] or len(before) != len(after):
            return math.inf
        values = {line[0]: line[1] for line in after}
        # Tokens at the end of a list may change places with one of the same score.
        far = max(far, *(abs(value - values.get(token, after[-1][1])) for token, value, *_ in before))
    return far
