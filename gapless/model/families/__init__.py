"""Model families by the architecture that a config.json names: ours, and plug-ins'. Imports no torch."""

from __future__ import annotations

from gapless.base.plug_ins import load, plug_ins
from gapless.model.families import cohere, gemma, gpt2, granite, llama, mistral, olmo, phi, qwen
from gapless.model.family import Family

MODEL_PLUG_INS = "gapless.models"
"""Group of entry points: an architecture, and its `Family`"""

MODEL_FAMILIES: dict[str, Family] = {
    "Cohere2ForCausalLM": cohere.COHERE2,
    "CohereForCausalLM": cohere.COHERE,
    "GPT2LMHeadModel": gpt2.GPT2,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "GemmaForCausalLM": gemma.GEMMA,
    "GraniteForCausalLM": granite.GRANITE,
    "LlamaForCausalLM": llama.LLAMA,
    "MiMoForCausalLM": qwen.MIMO,
    "MinistralForCausalLM": mistral.MISTRAL,
    "MistralForCausalLM": mistral.MISTRAL,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Olmo3ForCausalLM": olmo.OLMO3,
    "Phi3ForCausalLM": phi.PHI3,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
}
EAGLE_FAMILIES = dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"), llama.EAGLE)
"""Architectures of EAGLE-3 heads"""


def architectures() -> list[str]:
    """Return the architectures of models that have a family."""
    return [*MODEL_FAMILIES, *plug_ins(MODEL_PLUG_INS)]


def family_of(architecture: str) -> Family:
    """Return the family of an architecture that exists. Raises ConfigError if a plug-in cannot be imported."""
    family: Family = (MODEL_FAMILIES | EAGLE_FAMILIES).get(architecture) or load(
        MODEL_PLUG_INS, architecture, "architectures"
    )
    return family
