"""The implementation of a checkpoint's model: a native family, the Transformers backend, or a refusal with its reason.

Reads config.json alone, by our own schema. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gapless.base.errors import CheckpointError, ForeignModelError
from gapless.base.spellings import nearest
from gapless.model.families import architectures, family_of
from gapless.model.family import TensorNames
from gapless.model.fields import Fields, says_nothing
from gapless.model.known_fields import MUST_BE_TRUE, OTHER_FORWARD
from gapless.model.spec import CountedSpec, ModelSizes, ModelSpec, NormSpec

EXTRA = "pip install 'gapless[transformers]'"
SERVED = "the manual's page Models says which models are served"
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len", "max_sequence_length")
"""TensorNames of the field that has the longest sequence, in tokens"""
_PARTS = ("text_config", "llm_config", "language_config", "vision_config", "audio_config", "thinker_config")
"""Configs within the config of a model of pictures or sound"""
_ALIBI = frozenset(("bloom", "mpt"))
_STATEFUL = """
    bailing_hybrid bamba deepseek_v4 falcon_h1 falcon_mamba jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax
    nemotron_h olmo_hybrid plamo2 qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma
    rwkv xlstm zamba zamba2 zaya
"""
_STATEFUL_LAYERS = "conv hybrid linear_attention mamba mamba2 recurrent rwkv ssm"
"""Kinds of layers that keep a state beside keys and values"""


class Impl(StrEnum):
    """An implementation of models."""

    AUTO = "auto"
    """The first of the others that serves"""
    NATIVE = "native"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Route:
    """The implementation of a model."""

    impl: Impl
    architecture: str
    reason: str
    spec: ModelSpec
    names: TensorNames


def route(fields: Fields, asked: str = Impl.AUTO, known: Collection[str] = ()) -> Route:
    """Return the implementation of a config.json's model. asked: one of `Impl`; known: the only
    architectures that may be, of native families.

    Raises CheckpointError naming the file, the field, its value, and what helps.
    """
    architecture, failed = _architecture(fields, known), None
    native = architecture in (known or architectures())
    if native and asked != Impl.TRANSFORMERS:
        try:
            return _native(fields, architecture)
        except ForeignModelError as error:
            failed = error
    _refuse(fields)
    if asked == Impl.NATIVE or known:
        raise failed or _unknown(fields, architecture, known)
    if not has_transformers():
        raise _without_transformers(fields, architecture, failed)
    why = f"not native: {failed}" if failed else "model_impl asks for it" if native else "no native family reads it"
    return Route(Impl.TRANSFORMERS, architecture, why, _foreign(fields, architecture), TensorNames())


def longest_of(fields: Fields, found: Route) -> int:
    """Read the longest sequence that a model is made for, in tokens."""
    names = LENGTHS if found.impl == Impl.TRANSFORMERS else LENGTHS[:1]
    return found.spec.positions or fields.whole(next((name for name in names if name in fields), LENGTHS[0]))


def has_transformers() -> bool:
    """Return whether transformers is installed."""
    return find_spec("transformers") is not None


@cache
def classes_of_transformers() -> Mapping[str, frozenset[str]]:
    """Return the model_types by each causal LM of the installed transformers, read from the text of its table.

    Empty if there is no such table.
    """
    spec = find_spec("transformers")
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0], "models", "auto", "modeling_auto.py") if folders else Path()
    text = path.read_text() if path.is_file() else ""
    table = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = .*?^\)", text, re.S | re.M)
    found: dict[str, frozenset[str]] = {}
    for kind, names in re.findall(r'\(\s*"([\w-]+)",\s*(\([^()]*\)|"\w+")', table[0] if table else ""):
        for name in re.findall(r'"(\w+)"', names):
            found[name] = found.get(name, frozenset()) | {kind}
    return found


def _architecture(fields: Fields, known: Collection[str]) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        known_names = ", ".join(known or architectures())
        raise fields.error("architectures", f"must name a model's class, such as {known_names} ({SERVED})", names)
    if names[1:]:
        fields.unused("architectures", "the first one counts")
    return names[0]


def _unknown(fields: Fields, architecture: str, known: Collection[str]) -> CheckpointError:
    ours = list(known or architectures())
    near = nearest(architecture, ours)
    rule = f"must be one of {', '.join(ours)}" + (f"; did you mean {near}?" if near else "")
    return fields.error("architectures", f"{rule} ({SERVED})", [architecture])


def _without_transformers(fields: Fields, architecture: str, failed: ForeignModelError | None) -> CheckpointError:
    rest = f"{EXTRA} brings the Transformers backend, which may compute it"
    if failed:
        return ForeignModelError(f"{failed}; {rest}")
    return fields.error("architectures", f"has no native family; {rest} ({SERVED})", [architecture])


def _refuse(fields: Fields) -> None:
    """Raise CheckpointError for a model that no implementation computes."""
    kind = fields.get("model_type")
    if fields.get("is_encoder_decoder"):
        raise fields.error("is_encoder_decoder", "must be false: only decoders are served")
    for name in _PARTS:
        if isinstance(part := fields.values.get(name), dict):
            of = f" (model_type {text!r})" if isinstance(text := part.get("model_type"), str) else ""
            raise CheckpointError(
                f"{fields.path}: {name}: {kind!r} is a model of pictures or sound beside text; its text model alone"
                f"{of if 'vision' not in name and 'audio' not in name else ''}, saved as a checkpoint of its own, is "
                "served"
            )
    if kind in _STATEFUL.split():
        raise fields.error("model_type", "keeps a state beside keys and values, which is not served yet: choose a "
                           "model of attention alone")  # fmt: skip
    for name in ("layer_types", "layers_block_type", "block_types"):
        kinds = fields.values.get(name)
        for layer in kinds if isinstance(kinds, list) else ():
            if layer in _STATEFUL_LAYERS.split():
                raise fields.error(name, "has layers with a state beside keys and values, which is not served yet: "
                                   "choose a model of attention alone", layer)  # fmt: skip
    inner = fields.values.get("attn_config")
    for name in ("alibi", "use_alibi"):
        if fields.values.get(name) or (isinstance(inner, dict) and inner.get(name)):
            raise fields.error(name, "adds a bias by distance to attention, which no kernel computes: choose a model "
                               "with rotary or learned positions", True)  # fmt: skip
    if kind in _ALIBI:
        raise fields.error("model_type", "adds a bias by distance to attention (alibi), which no kernel computes: "
                           "choose a model with rotary or learned positions")  # fmt: skip


def _native(fields: Fields, architecture: str) -> Route:
    family = family_of(architecture)
    kinds, kind = family.model_types, fields.get("model_type")
    if kinds and kind not in (None, *kinds):
        raise fields.error(
            "model_type", f"must be {' or '.join(map(repr, kinds))}, as architectures says {architecture}"
        )
    if fields.get("auto_map") and not family.code:
        raise _code(fields, "remove the field, in a copy of the checkpoint, if the architecture is a plain one")
    for name, neutral in OTHER_FORWARD.items():
        if name not in family.reads and not says_nothing(value := fields.get(name)) and value not in neutral:
            raise fields.foreign(
                name, f"changes what the model computes, as {architecture} here does not: leave it out"
            )
    for name in MUST_BE_TRUE:
        if name not in family.reads and not fields.flag(name, True):
            raise fields.error(name, "must be true: only decoders are supported")
    return Route(Impl.NATIVE, architecture, "it has a native family", family.read(fields), family.names)


def _code(fields: Fields, mend: str) -> CheckpointError:
    return CheckpointError(
        f"{fields.path}: auto_map asks for code from the model directory, which is never run; {mend}"
    )


def _foreign(fields: Fields, architecture: str) -> CountedSpec:
    """Return the front's part of a model that transformers computes."""
    table, kind = classes_of_transformers(), fields.get("model_type")
    kinds = table.get(architecture, frozenset())
    if fields.get("auto_map"):
        mend = "remove the field, in a copy of the checkpoint, if that class of transformers computes the same"
        raise _code(fields, mend if kinds else f"there is no {architecture} here: choose a model that needs no code")
    if table and not kinds:
        near = nearest(architecture, [*architectures(), *table])
        hint = f"; did you mean {near}?" if near else f"; {SERVED}"
        rule = f"must be a native family's, or a decoder of transformers {version('transformers')}{hint}"
        raise fields.error("architectures", rule, [architecture])
    if kinds and kind not in kinds:
        rule = f"must be {' or '.join(map(repr, sorted(kinds)))}, as architectures says {architecture}"
        raise fields.error("model_type", rule)
    for name in fields.values:
        fields.get(name)
    return CountedSpec(
        fields.whole("vocab_size"), 0, (), NormSpec(0.0), (),
        digest=_digest(fields.values), count=partial(_count, fields),
    )  # fmt: skip


def _count(fields: Fields) -> ModelSizes:
    from gapless.model.transformers_config import count_sizes  # imports transformers

    return count_sizes(fields)


def _digest(values: Mapping[str, Any]) -> str:
    """Return a digest of a config, and of the version of transformers, whose defaults fill it up."""
    text = json.dumps([version("transformers"), values], sort_keys=True)
    return sha256(text.encode()).hexdigest()
