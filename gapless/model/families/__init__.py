"""Model families by the architecture that a config.json names: ours, and plug-ins'. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec

from gapless.base.plug_ins import load, plug_ins
from gapless.model.families import cohere, gpt2, llama, olmo, qwen
from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.known_fields import OTHER_FORWARD
from gapless.model.spec import CountedSpec

MODEL_PLUG_INS = "gapless.models"
"""Group of entry points: an architecture, and its `Family`"""

MODEL_FAMILIES: dict[str, Family] = {
    "CohereForCausalLM": cohere.COHERE,
    "GPT2LMHeadModel": gpt2.GPT2,
    "LlamaForCausalLM": llama.LLAMA,
    "MiMoForCausalLM": qwen.MIMO,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
}
EAGLE_FAMILIES = dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"), llama.EAGLE)
"""Architectures of EAGLE-3 heads"""


def _counted(fields: Fields) -> CountedSpec:
    from gapless.model.transformers_config import read_spec  # imports transformers, which other families do not need

    return read_spec(fields)


TRANSFORMERS = Family((), _counted, reads=frozenset(OTHER_FORWARD))
"""Any architecture, if transformers has a class for it"""


def architectures() -> list[str]:
    """Return the architectures of models that have a family."""
    return [*MODEL_FAMILIES, *plug_ins(MODEL_PLUG_INS)]


def family_of(architecture: str) -> Family:
    """Return the family of an architecture that exists. Raises ConfigError if a plug-in cannot be imported."""
    found = (MODEL_FAMILIES | EAGLE_FAMILIES).get(architecture)
    if found is None and architecture not in plug_ins(MODEL_PLUG_INS) and find_spec("transformers"):
        return TRANSFORMERS
    family: Family = found or load(MODEL_PLUG_INS, architecture, "architectures")
    return family
