"""The configuration of a Hugging Face model directory, read by our own schema. Imports no torch.

`config.json` gives the architecture, `generation_config.json` (optional) the end tokens and default sampling.
Everything wrong in them is one CheckpointError that names the file and the field.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gapless.base.config import DEMO_MODEL, LAYOUT_PLUG_INS, EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.plug_ins import plug_ins
from gapless.model.families import MODEL_FAMILIES, Family, architectures, family_of
from gapless.model.fields import Fields, Heard, says_nothing
from gapless.model.generation import generation_fields, read_end_tokens, read_sampling, sampling_of
from gapless.model.known_fields import CONFIG_FIELDS, MUST_BE_TRUE, OTHER_FORWARD

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding settings, as transformers names them; what a type does not use keeps its default."""

    type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder. The families differ only in the flags at the end."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    dtype: str
    """The checkpoint's own dtype; float32 if the file has none."""
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layout: str = "dense"
    """Layout of the weights of layers: dense, or a plug-in's"""
    counted: int = 0
    """Parameters of a model that the Transformers backend computes; 0 for others"""
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that generation_config.json sets; temperature 0 where it is greedy."""
    files: tuple[Fields, ...] = field(default=(), repr=False, compare=False)
    """The file that this was read from"""

    @property
    def heard(self) -> list[Heard]:
        """Every field of its files, and what became of it."""
        return [one for file in self.files for one in file.heard()]

    @property
    def length_limit(self) -> int:
        """Longest sequence that the position encoding is made for, in tokens."""
        stretched = {
            "yarn": self.rope.original_max,
            **dict.fromkeys(("linear", "dynamic"), self.max_position_embeddings),
        }
        return max(self.max_position_embeddings, int(stretched.get(self.rope.type, 0) * self.rope.factor))


def resolve_model_dir(name: str) -> Path:
    """The directory of a model: the embedded demo model's for 'demo', else `name` as a path."""
    if name == DEMO_MODEL:
        from gapless.demo import weights_dir  # the demo is a leaf beside the house and costs nothing if not asked for

        return Path(weights_dir())
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name.lower().endswith(".gguf"):
        raise ConfigError(f"model: {name!r}: GGUF files are not read; name a checkpoint of safetensors files")
    if path.exists():
        raise ConfigError(f"model: {name!r} is a file; give the directory that holds config.json and the weights")
    raise ConfigError(
        f"model: no directory {name!r}; give that of a checkpoint, a name on the hub (org/name), or '{DEMO_MODEL}'"
    )


def load_config(engine: EngineConfig) -> ModelConfig:
    """Return the model's config without its weights: vocabulary, end tokens and limits."""
    model = read_model_config(resolve_model_dir(engine.model))
    asked = (engine.generation_config, engine.override_generation_config)
    return replace(model, default_sampling=sampling_of(*asked, model.default_sampling, model.max_position_embeddings))


def model_length(engine: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence to serve, in tokens: the requested one, or the model's max_position_embeddings."""
    if engine.max_model_len is None:
        return model.max_position_embeddings
    if engine.max_model_len > model.length_limit:
        longest, scaled = model.max_position_embeddings, model.length_limit
        raise ConfigError(
            f"max_model_len ({engine.max_model_len}) must not exceed what the model is made for: "
            f"max_position_embeddings is {longest}"
            + (f", with its rope scaling {scaled}: " if scaled > longest else ": ")
            + f"ask for {scaled} or less, or write rope_scaling into config.json, in a copy of the checkpoint"
        )
    return engine.max_model_len


def read_model_config(directory: Path, known: Collection[str] = ()) -> ModelConfig:
    """Parse `directory`/config.json and generation_config.json of a model of one of these architectures, by default
    of any family. Raises CheckpointError naming the file and the field."""
    fields = Fields.of_file(directory / "config.json", CONFIG_FIELDS)
    if not known and _by_transformers(fields):
        from gapless.model.transformers_load import read_config

        return read_config(directory)
    architecture = _architecture(fields, known)
    family = family_of(architecture)
    _refuse_unsupported(fields, architecture, family)
    generation, sizes = generation_fields(directory, fields), _sizes(fields, architecture)
    return ModelConfig(
        architecture=architecture,
        **sizes,
        norm_eps=fields.real("rms_norm_eps", 1e-6, above=0.0),
        rope=_rope(fields),
        dtype=_dtype(fields),
        layout=_layout(fields),
        **{"tied": fields.flag("tie_word_embeddings", False), **family.flags(fields)},
        eos_token_ids=read_end_tokens(generation, fields, sizes["vocab_size"]),
        default_sampling=read_sampling(generation, sizes["max_position_embeddings"]),
        files=(fields,) if generation is fields else (fields, generation),
    )


def read_draft_config(name: str, model: ModelConfig) -> ModelConfig:
    """Read the config of a draft model. Raises ConfigError where there is no such directory, or the vocabularies differ
    in size; CheckpointError naming the file and the field."""
    draft = read_model_config(_drafter_dir(name))
    if draft.vocab_size != model.vocab_size:
        raise ConfigError(
            f"speculative_config.model: {name!r} has a vocabulary of {draft.vocab_size} tokens and the model one of "
            f"{model.vocab_size}, but a draft must be a token of the model: choose a smaller model of its family"
        )
    return draft


def drafter_method(name: str) -> str:
    """Return the method of speculation of this checkpoint, by its architecture. Raises ConfigError where
    there is no such directory, CheckpointError where it has no config.json."""
    names = Fields.of_file(_drafter_dir(name) / "config.json").values.get("architectures")
    return "eagle3" if "Eagle3" in str(names) else "draft_model"


def _drafter_dir(name: str) -> Path:
    try:
        return resolve_model_dir(name)
    except ConfigError as error:
        raise ConfigError(f"speculative_config.{error}") from error


def _architecture(fields: Fields, known: Collection[str]) -> str:
    names, kind = fields.get("architectures"), fields.get("model_type")
    ours = known or MODEL_FAMILIES
    if (
        not isinstance(names, list)
        or not names
        or (names[0] not in ours and (known or names[0] not in architectures()))
    ):
        names_of = ", ".join(known or architectures())
        rule = f"must be one of {names_of} (the manual's page Models says which models are served)"
        raise fields.error("architectures", rule, names)
    if names[1:]:
        fields.unused("architectures", "the first one counts")
    kinds = family_of(names[0]).model_types
    if kinds and kind not in (None, *kinds):
        raise fields.error("model_type", f"must be {' or '.join(map(repr, kinds))}, as architectures says {names[0]}")
    return str(names[0])


def _by_transformers(fields: Fields) -> bool:
    """Return whether an architecture has no native family, and transformers is installed."""
    names = fields.get("architectures")
    named = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    return named and names[0] not in architectures() and find_spec("transformers") is not None


def _refuse_unsupported(fields: Fields, architecture: str, family: Family) -> None:
    if fields.get("auto_map") and architecture != "MiMoForCausalLM":  # a Qwen2 that transformers does not name
        raise CheckpointError(
            f"{fields.path}: auto_map asks for code from the model directory, which is never run; "
            "remove the field if the architecture is a plain one"
        )
    if fields.text("hidden_act", family.activations[0]) not in family.activations:
        raise fields.error("hidden_act", f"must be {family.activations[0]!r}")
    for name, neutral in OTHER_FORWARD.items():
        if name not in family.reads and not says_nothing(value := fields.get(name)) and value not in neutral:
            raise fields.error(name, f"changes what the model computes, as {architecture} here does not: leave it out")
    for name in MUST_BE_TRUE:
        if not fields.flag(name, True):
            raise fields.error(name, "must be true: only decoders are supported")
    _refuse_sliding_window(fields, architecture)


def _layout(fields: Fields) -> str:
    """Return the layout of a layer's weights. Raises CheckpointError for one that neither we nor a plug-in has."""
    asked = fields.get("quantization_config")
    if asked is None:
        return "dense"
    method = asked.get("quant_method") if isinstance(asked, dict) else None
    if method not in plug_ins(LAYOUT_PLUG_INS):
        raise CheckpointError(
            f"{fields.path}: quantization_config: quantised checkpoints are not supported; "
            "use the bfloat16, float16 or float32 one"
        )
    return str(method)


def _refuse_sliding_window(fields: Fields, architecture: str) -> None:
    kinds = fields.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise fields.error("layer_types", "must be full_attention in every layer")
    if architecture == "LlamaForCausalLM":
        return
    window, first = fields.get("sliding_window"), fields.whole("max_window_layers", 28, low=0)
    if not fields.flag("use_sliding_window", False) or window is None or kinds is not None:
        return
    if first < fields.whole("num_hidden_layers"):
        raise fields.error("use_sliding_window", "must be false: sliding-window attention is not supported")


def _sizes(fields: Fields, architecture: str) -> dict[str, Any]:
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"must divide num_attention_heads ({heads})")
    # transformers' default for Qwen3 is 128, not the quotient
    head_dim = fields.whole("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads, low=2)
    if head_dim % 2:
        raise fields.error("head_dim", "must be even")
    return {
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.whole("intermediate_size"),
        "layers": fields.whole("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.whole("max_position_embeddings"),
    }


def _dtype(fields: Fields) -> str:
    name = "dtype" if "dtype" in fields else "torch_dtype"
    value = fields.text(name, "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.error(name, f"must be one of {', '.join(DTYPES)}")
    if fields.text("torch_dtype", value).removeprefix("torch.") != value:
        fields.unused("torch_dtype", "dtype counts")
    return value


def _rope(fields: Fields) -> RopeConfig:
    """Both spellings: `rope_parameters` of transformers 5, and `rope_scaling` of before, which counts beside it."""
    names = ["rope_scaling", "rope_parameters"]
    name, other = names if fields.values.get(names[0]) else names[::-1]
    rope = fields.sub(name)
    if "full_attention" in rope:
        raise rope.error("full_attention", "must not be there: one rope for all layers is supported")
    theta = rope.real("rope_theta", fields.real("rope_theta", 10_000.0, above=0.0), above=0.0)
    if fields.real("rope_theta", theta) != theta:
        fields.unused("rope_theta", f"{name}.rope_theta counts")
    kind = rope.text("rope_type" if "rope_type" in rope else "type", "default")
    if rope.text("type", kind) != kind:
        rope.unused("type", "rope_type counts")
    if kind not in ROPE_TYPES:
        raise rope.error("rope_type", f"must be one of {', '.join(ROPE_TYPES)}", kind)
    for owner in (rope, fields):
        if owner.real("partial_rotary_factor", 1.0) != 1.0:
            raise owner.error("partial_rotary_factor", "must be 1: partly rotated heads are not supported")
    _check_other_rope(fields, rope, other, {"rope_type": kind, "type": kind, "rope_theta": theta})
    if kind == "default":
        return RopeConfig(theta=theta)
    return _scaled_rope(fields, rope, kind, theta)


def _check_other_rope(fields: Fields, rope: Fields, other: str, counts: dict[str, Any]) -> None:
    """Tell of the spelling that does not count. A base that it alone has is refused: either may be meant."""
    values = fields.get(other) or {}
    if not isinstance(values, dict):
        raise fields.error(other, "must be an object")
    theta = values.get("rope_theta")
    if theta not in (None, counts["rope_theta"]) and "rope_theta" not in rope:
        rule = f"is not the base that counts, {counts['rope_theta']:g}: write it as {rope.prefix}rope_theta too"
        raise fields.error(f"{other}.rope_theta", rule, theta)
    if any(value not in (None, {**counts, **rope.values}.get(name)) for name, value in values.items()):
        fields.unused(other, f"{rope.prefix.rstrip('.')} counts")


def _scaled_rope(fields: Fields, rope: Fields, kind: str, theta: float) -> RopeConfig:
    longest = fields.whole("max_position_embeddings")
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, rope.real("factor", above=0.0))
    name = "original_max_position_embeddings"
    original = fields.whole(name, rope.whole(name, longest))
    if rope.whole(name, original) != original:
        rope.unused(name, f"{name} beside {rope.prefix.rstrip('.')} counts")
    factor = rope.real("factor", longest / original if kind == "yarn" else None, above=0.0)
    if kind == "llama3":
        low, high = rope.real("low_freq_factor", above=0.0), rope.real("high_freq_factor", above=0.0)
        if high <= low:
            raise rope.error("high_freq_factor", f"must be above low_freq_factor ({low})")
        return RopeConfig(kind, theta, factor, original, low, high)
    return RopeConfig(
        kind,
        theta,
        factor,
        original,
        attention_factor=rope.real("attention_factor", above=0.0) if "attention_factor" in rope else None,
        beta_fast=rope.real("beta_fast", 32.0, above=0.0),
        beta_slow=rope.real("beta_slow", 1.0, above=0.0),
        mscale=rope.real("mscale", 0.0),
        mscale_all_dim=rope.real("mscale_all_dim", 0.0),
        truncate=rope.flag("truncate", True),
    )
