"""The configuration of a Hugging Face model directory, read by our own schema. Imports no torch.

`config.json` gives the architecture, `generation_config.json` (optional) the end tokens and default sampling.
Everything wrong in them is one CheckpointError that names the file and the field.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gapless.base.config import DEMO_MODEL, EngineConfig
from gapless.base.errors import ConfigError
from gapless.model.family import TensorNames
from gapless.model.fields import Fields, Heard
from gapless.model.formats import read_quantization
from gapless.model.generation import generation_fields, read_end_tokens, read_sampling, sampling_of
from gapless.model.gguf_files import unpacked_folder
from gapless.model.known_fields import CONFIG_FIELDS
from gapless.model.quantization import Quantization, asked_quantization
from gapless.model.registry import Impl, longest_of, route
from gapless.model.spec import ModelSizes, ModelSpec

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """A checkpoint's model."""

    architecture: str
    spec: ModelSpec
    names: TensorNames
    max_position_embeddings: int
    dtype: str
    """The checkpoint's own dtype; float32 if the file has none."""
    quantization: Quantization | None = None
    """None for plain weights"""
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that generation_config.json sets; temperature 0 where it is greedy."""
    impl: Impl = Impl.NATIVE
    impl_reason: str = field(default="", repr=False, compare=False)
    files: tuple[Fields, ...] = field(default=(), repr=False, compare=False)
    """The file that this was read from"""

    @property
    def sizes(self) -> ModelSizes:
        return self.spec.sizes

    @property
    def heard(self) -> list[Heard]:
        """Every field of its files, and what became of it."""
        return [one for file in self.files for one in file.heard()]

    @property
    def length_limit(self) -> int:
        """Longest sequence that the position encoding is made for, in tokens."""
        longest = self.max_position_embeddings
        for rope in self.spec.ropes if len(self.spec.ropes) == 1 else ():
            stretched = {"yarn": rope.original_max, "linear": longest, "dynamic": longest}
            return max(longest, int(stretched.get(rope.type, 0) * rope.factor))
        return longest


def resolve_model_dir(name: str) -> Path:
    """The directory of a model: the embedded demo model's for 'demo', one made of a GGUF file, else `name` itself."""
    if name == DEMO_MODEL:
        from gapless.demo import weights_dir  # the demo is a leaf beside the house and costs nothing if not asked for

        return Path(weights_dir())
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return unpacked_folder(path)
    if path.exists():
        raise ConfigError(f"model: {name!r} is a file; give the directory that holds config.json and the weights")
    raise ConfigError(
        f"model: no directory {name!r}; give that of a checkpoint, a GGUF file, a name on the hub (org/name), or "
        f"'{DEMO_MODEL}'"
    )


def load_config(engine: EngineConfig) -> ModelConfig:
    """Return the model's config without its weights: vocabulary, end tokens and limits."""
    model = read_asked_config(engine)
    asked = (engine.generation_config, engine.override_generation_config)
    return replace(model, default_sampling=sampling_of(*asked, model.default_sampling, model.max_position_embeddings))


def read_asked_config(engine: EngineConfig) -> ModelConfig:
    """Read the config of an engine's model, with the quantisation asked for. Raises ConfigError, CheckpointError."""
    model = read_model_config(resolve_model_dir(engine.model), impl=engine.model_impl)
    return replace(model, quantization=asked_quantization(engine.quantization, model.quantization))


def model_length(engine: EngineConfig, model: ModelConfig) -> int:
    """Longest sequence to serve, in tokens: the requested one, or the model's max_position_embeddings."""
    if engine.max_model_len is None:
        return model.max_position_embeddings
    if engine.max_model_len > model.length_limit:
        longest, scaled = model.max_position_embeddings, model.length_limit
        other = "" if model.spec.positions else ", or write rope_scaling into config.json, in a copy of the checkpoint"
        raise ConfigError(
            f"max_model_len ({engine.max_model_len}) must not exceed what the model is made for: "
            + (f"it has {longest} positions" if model.spec.positions else f"max_position_embeddings is {longest}")
            + (f", with its rope scaling {scaled}: " if scaled > longest else ": ")
            + f"ask for {scaled} or less{other}"
        )
    return engine.max_model_len


def read_model_config(directory: Path, known: Collection[str] = (), impl: str = Impl.NATIVE) -> ModelConfig:
    """Parse `directory`/config.json and generation_config.json of a model of one of these architectures, by default
    of any. impl: as `EngineConfig.model_impl`. Raises CheckpointError naming the file and the field."""
    fields = Fields.of_file(directory / "config.json", CONFIG_FIELDS)
    found = route(fields, impl, known)
    generation, spec = generation_fields(directory, fields), found.spec
    longest = longest_of(fields, found)
    return ModelConfig(
        architecture=found.architecture,
        spec=spec,
        names=found.names,
        impl=found.impl,
        impl_reason=found.reason,
        max_position_embeddings=longest,
        dtype=_dtype(fields),
        quantization=read_quantization(fields),
        eos_token_ids=read_end_tokens(generation, fields, spec.vocab_size),
        default_sampling=read_sampling(generation, longest),
        files=(fields,) if generation is fields else (fields, generation),
    )


def read_draft_config(name: str, model: ModelConfig) -> ModelConfig:
    """Read the config of a draft model. Raises ConfigError where there is no such directory, or the vocabularies differ
    in size; CheckpointError naming the file and the field."""
    draft = read_model_config(_drafter_dir(name), impl=Impl.NATIVE)
    if draft.spec.vocab_size != model.spec.vocab_size:
        raise ConfigError(
            f"speculative_config.model: {name!r} has a vocabulary of {draft.spec.vocab_size} tokens and the model "
            f"one of {model.spec.vocab_size}, but a draft must be a token of the model: choose a smaller model of its "
            "family"
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


def _dtype(fields: Fields) -> str:
    name = "dtype" if "dtype" in fields else "torch_dtype"
    value = fields.text(name, "float32").removeprefix("torch.")
    if value not in DTYPES:
        raise fields.error(name, f"must be one of {', '.join(DTYPES)}")
    if fields.text("torch_dtype", value).removeprefix("torch.") != value:
        fields.unused("torch_dtype", "dtype counts")
    return value
