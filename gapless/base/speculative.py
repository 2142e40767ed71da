"""The field `speculative_config`, as vLLM spells it."""

from __future__ import annotations

from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.base.json_fields import json_object

DRAFT_METHODS = ("ngram", "suffix", "grammar", "eagle3", "draft_model", "mtp")
TAKE_MODELS = ("eagle3", "draft_model")
IN_PAGES = (*TAKE_MODELS, "mtp")
"""Methods whose drafters have keys and values of their own, in the pages of the model"""
LOOKUP_BOUNDS = ("prompt_lookup_min", "prompt_lookup_max")
BY_MODEL = ""
"""The method of a checkpoint whose config.json decides, until that has been read"""
MAX_DRAFTS = 8
SHORTEST_MATCH = 2
"""Tokens of a match of the method suffix, at least"""
MAX_CACHED_REQUESTS = 20_000


class SpeculativeConfig(NamedTuple):
    """How an engine guesses tokens that it then verifies."""

    method: str = "ngram"
    num_speculative_tokens: int = 4
    """Tokens guessed at a time, for each row"""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    """Bounds of the number of a row's last tokens that are looked for in its history"""
    suffix_decoding_max_tree_depth: int = 24
    """How many tokens a match and the drafts after it have together, at most"""
    suffix_decoding_max_cached_requests: int = 1000
    """Room of the table, in answers of 256 tokens; 0 for drafts from a row's own history alone"""
    suffix_decoding_max_spec_factor: float = 1.0
    """Drafts for each token of the match that they follow, at most"""
    suffix_decoding_min_token_prob: float = 0.1
    """How often a token must have followed the match lately to be drafted"""
    model: str = ""
    """Directory of a head or a draft model, or its name on the hub; the demo model has a head of its own"""

    @property
    def in_pages(self) -> str:
        """The drafter's part with keys and values of its own in the model's pages; empty for none."""
        assert self.method, "a start reads from the checkpoint what it is"
        return f"{self.method} {self.model}" if self.method in IN_PAGES else ""

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Read the JSON of the field. Raises ConfigError naming the wrong part."""
        name = "speculative_config"
        value = _as_vllm_means(json_object(name, text, EXAMPLE))
        if unknown := sorted(set(value) - set(cls._fields)):
            raise ConfigError(f"{name}: {unknown[0]!r} is not known; fields are {', '.join(cls._fields)}")
        config = cls(**value)
        if config.method not in (*DRAFT_METHODS, BY_MODEL):
            raise ConfigError(f"{name}.method must be one of {', '.join(DRAFT_METHODS)}, got {config.method!r}")
        if not isinstance(config.model, str):
            raise ConfigError(f"{name}.model must name a head or a draft model, got {config.model!r}")
        if config.model and config.method not in (*TAKE_MODELS, BY_MODEL):
            others = " or ".join(TAKE_MODELS)
            raise ConfigError(f"{name}.model is of no use to {config.method}: leave it out, or set method to {others}")
        if config.method == "draft_model" and not config.model:
            raise ConfigError(
                f"{name}.model must name a small model for draft_model: its directory, or its name on the hub"
            )
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        _check(f"{name}.num_speculative_tokens", config.num_speculative_tokens, 1)
        _check(f"{name}.prompt_lookup_min", shortest, 1)
        _check(f"{name}.prompt_lookup_max", longest, shortest)
        suffix, least = f"{name}.suffix_decoding", config.num_speculative_tokens + SHORTEST_MATCH
        _check(f"{suffix}_max_tree_depth", config.suffix_decoding_max_tree_depth, least, 1 << 20)
        _check(f"{suffix}_max_cached_requests", config.suffix_decoding_max_cached_requests, 0, MAX_CACHED_REQUESTS)
        _check(f"{suffix}_max_spec_factor", config.suffix_decoding_max_spec_factor, 0, 1000, whole=False)
        _check(f"{suffix}_min_token_prob", config.suffix_decoding_min_token_prob, 0, 1, whole=False)
        return config


def _as_vllm_means(value: dict[str, Any]) -> dict[str, Any]:
    """Return these fields under our names of methods, without null, and with what vLLM takes for a missing one."""
    value = {name: given for name, given in value.items() if given is not None}
    if (parts := value.pop("draft_tensor_parallel_size", 1)) != 1:
        text = f"draft_tensor_parallel_size must be 1, since a drafter has one device here, got {parts!r}"
        raise ConfigError(f"speculative_config.{text}")
    method = str(value.get("method") or (BY_MODEL if value.get("model") else "ngram"))
    value["method"] = "mtp" if method.endswith("_mtp") else "ngram" if method == "ngram_gpu" else method
    bounds = [value[name] for name in LOOKUP_BOUNDS if name in value]
    return value | (dict.fromkeys(LOOKUP_BOUNDS, bounds[0]) if len(bounds) == 1 else {})


def _check(name: str, value: Any, low: int, high: int = MAX_DRAFTS, whole: bool = True) -> None:
    if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
        raise ConfigError(f"{name} must be a {'whole ' * whole}number from {low} to {high}, got {value!r}")


EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
