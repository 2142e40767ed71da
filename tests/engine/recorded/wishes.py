"""What the recorded requests ask for: every kind of request that the engine knows, for any model."""

from __future__ import annotations

from typing import Any, NamedTuple

from gapless.base.params import SamplingParams
from gapless.engine.inputs import child_seed, mix


class Wish(NamedTuple):
    """One request. `prompt` names a prompt of the model's own; `stops` wants the model's own stop ids."""

    name: str
    prompt: str
    params: dict[str, Any]
    stops: bool = False
    priority: int = 0

    def sampling(self, stop_ids: tuple[int, ...]) -> SamplingParams:
        """Its parameters, with `stop_ids` where it wants some. Seeds are fixed; greedy where no temperature is said."""
        stops = {"stop_token_ids": list(stop_ids)} if self.stops else {}
        defaults = {"temperature": 0.0, "max_tokens": 20}
        return SamplingParams(**{**defaults, **stops, **self.params})

    def seed(self, index: int) -> int:
        """What its completion `index` draws from. The one wish without a seed gets the engine's first."""
        given = self.params.get("seed")
        return child_seed(mix(0, 1) if given is None else given & (2**63 - 1), index)


def _seeded(seed: int, **params: Any) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": seed, "ignore_eos": True, **params}


PROMPTS = ("short", "one", "middle", "shared-a", "shared-b", "shared-c", "long", "longer")
"""Names of prompts. The three that share begin alike, over several pages; the long ones take several chunks."""

GREEDY = (
    Wish("greedy", "short", {}),
    Wish("greedy, one token of prompt", "one", {}),
    Wish("greedy, eos ignored", "short", {"ignore_eos": True, "max_tokens": 40}),
    Wish("greedy, stop ids", "short", {"max_tokens": 40}, stops=True),
    Wish("greedy, stop ids, eos ignored", "middle", {"max_tokens": 40, "ignore_eos": True}, stops=True),
    Wish("greedy, min_tokens with stop ids", "short", {"max_tokens": 40, "min_tokens": 12}, stops=True),
    Wish("greedy, min_tokens is max_tokens", "middle", {"max_tokens": 16, "min_tokens": 16}, stops=True),
    Wish("greedy, one token", "middle", {"max_tokens": 1}),
    Wish("greedy, shared a", "shared-a", {}),
    Wish("greedy, shared b", "shared-b", {}, priority=1),
    Wish("greedy, shared c", "shared-c", {"max_tokens": 30, "ignore_eos": True}, priority=-1),
    Wish("greedy, long", "long", {}),
    Wish("greedy, longer", "longer", {}, priority=2),
    Wish("greedy, n=4", "middle", {"n": 4, "max_tokens": 8}),
)
RANDOM = (
    Wish("temperature 1", "short", _seeded(1)),
    Wish("temperature 0.7", "middle", _seeded(2, temperature=0.7)),
    Wish("temperature 1e-5", "short", _seeded(3, temperature=1e-5)),
    Wish("temperature 0.01", "middle", _seeded(4, temperature=0.01)),
    Wish("temperature 3", "short", _seeded(5, temperature=3.0)),
    Wish("temperature 100", "short", _seeded(6, temperature=100.0)),
    Wish("no seed", "short", {"temperature": 1.0, "ignore_eos": True}),
    Wish("seed -1", "short", _seeded(-1)),
    Wish("seed 0", "short", _seeded(0)),
    Wish("least seed", "short", _seeded(-(2**63))),
    Wish("greatest seed", "short", _seeded(2**63 - 1), priority=-3),
    Wish("n=4", "shared-a", _seeded(7, n=4, max_tokens=10)),
    Wish("temperature, long", "long", _seeded(8)),
    Wish("temperature, min_tokens with stop ids", "short", {**_seeded(9, min_tokens=8), "max_tokens": 40}, stops=True),
)
FILTERS = (
    Wish("top_k 1", "short", _seeded(10, top_k=1)),
    Wish("top_k 5", "short", _seeded(11, top_k=5)),
    Wish("top_k 50", "middle", _seeded(12, top_k=50, temperature=1.5)),
    Wish("top_k 1023", "short", _seeded(13, top_k=1023, temperature=5.0)),
    Wish("top_k 1024", "short", _seeded(14, top_k=1024, temperature=5.0)),
    Wish("top_k 1500", "short", _seeded(15, top_k=1500, temperature=5.0)),
    Wish("top_k above the vocabulary", "short", _seeded(16, top_k=100_000, temperature=2.0)),
    Wish("top_p 0.05", "short", _seeded(17, top_p=0.05)),
    Wish("top_p 0.5", "short", _seeded(18, top_p=0.5, temperature=1.5)),
    Wish("top_p 0.9", "shared-b", _seeded(19, top_p=0.9)),
    Wish("top_p 0.999", "short", _seeded(20, top_p=0.999, temperature=2.0), priority=3),
    Wish("min_p 0.02", "short", _seeded(21, min_p=0.02)),
    Wish("min_p 0.5", "middle", _seeded(22, min_p=0.5, temperature=1.5)),
    Wish("min_p 1", "short", _seeded(23, min_p=1.0)),
    Wish("top_k and top_p", "short", _seeded(24, top_k=41, top_p=0.8, temperature=1.5)),
    Wish("top_k and min_p", "short", _seeded(25, top_k=30, min_p=0.1, temperature=2.0)),
    Wish("top_p and min_p", "short", _seeded(26, top_p=0.9, min_p=0.05)),
    Wish("all three", "long", _seeded(27, top_k=64, top_p=0.95, min_p=0.02, temperature=1.5)),
    Wish("all three, hot", "short", _seeded(28, top_k=1200, top_p=0.7, min_p=0.001, temperature=50.0)),
    Wish("all three, cold", "short", _seeded(29, top_k=3, top_p=0.99, min_p=0.001, temperature=1e-4)),
    Wish("all three, n=4", "shared-c", _seeded(30, top_k=64, top_p=0.95, min_p=0.02, n=4, max_tokens=8)),
    Wish("all three, min_tokens with stop ids", "short",
         _seeded(31, top_k=101, top_p=0.9, min_p=0.01, min_tokens=10, max_tokens=40), stops=True),
    Wish("filters of a greedy request", "short", {"top_k": 7, "top_p": 0.3, "min_p": 0.2, "min_tokens": 3}, stops=True),
)  # fmt: skip
SCORED = (
    Wish("logprobs 0", "short", {"logprobs": 0}),
    Wish("logprobs 5", "middle", {"logprobs": 5, "max_tokens": 8, "ignore_eos": True}),
    Wish("logprobs 20", "short", {"logprobs": 20, "max_tokens": 5, "ignore_eos": True}),
    Wish("logprobs 3, all three", "short",
         _seeded(32, logprobs=3, top_k=51, top_p=0.9, min_p=0.01, max_tokens=8, temperature=2.0)),
    Wish("logprobs 1, min_tokens with stop ids", "short", {"logprobs": 1, "min_tokens": 6}, stops=True),
    Wish("logprobs 0, n=4", "one", _seeded(33, logprobs=0, n=4, max_tokens=4)),
    Wish("prompt_logprobs 0", "shared-a", {"prompt_logprobs": 0, "max_tokens": 3}),
    Wish("prompt_logprobs 2", "middle", {"prompt_logprobs": 2, "logprobs": 2, "max_tokens": 3}, priority=1),
    Wish("prompt_logprobs 0, long", "long", {"prompt_logprobs": 0, "max_tokens": 3}),
)  # fmt: skip
WISHES = (*GREEDY, *RANDOM, *FILTERS, *SCORED)
