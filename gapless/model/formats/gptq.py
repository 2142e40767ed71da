"""GPTQ: whole numbers of 4 or 8 bits, packed by inputs, with a scale and a zero point for each group of inputs.

Version 1 stores zero points less 1, in packed words as a whole. `desc_act` puts inputs of all places into a group, so
that its weights are multiplied out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gapless.base.errors import CheckpointError
from gapless.kernels.kinds import DENSE, WeightKind, WeightLayout
from gapless.model.formats.seam import FLOATS, Stored, StoredWeight, int4_layout, int8_layout
from gapless.model.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

_GPTQ_READS_TEXT = """
    bits checkpoint_format desc_act dynamic format group_size is_marlin_format lm_head method
    modules_in_block_to_quantize pack_dtype sym version
"""
GPTQ_READS = frozenset(_GPTQ_READS_TEXT.split())
ONE = {4: 0x11111111, 8: 0x01010101}
"""1 in each number of a word"""
_LONGEST = 300
"""Characters of a pattern"""
_parser = re._parser  # type: ignore[attr-defined]
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)
_FEW = 9
"""Repeats that may be repeated"""


class GptqRule(NamedTuple):
    """How the weight of a module is rounded."""

    bits: int
    group_size: int
    """-1: a group for all inputs"""
    sym: bool
    desc_act: bool


class GptqFormat:
    """Implements `WeightFormat`."""

    def __init__(self, asked: Quantization) -> None:
        fields, self.asked = asked.fields(GPTQ_READS), asked
        version = fields.text("checkpoint_format", fields.text("format", "gptq"))
        if version not in ("gptq", "gptq_v2"):
            raise asked.error("checkpoint_format", "must be gptq or gptq_v2: save it as one of these", version)
        if fields.flag("is_marlin_format", False):
            raise asked.error("is_marlin_format", "must be false: save it as gptq")
        if fields.text("pack_dtype", "int32") != "int32":
            raise asked.error("pack_dtype", "must be int32")
        self.first = version == "gptq"
        bits, size = fields.whole("bits"), fields.whole("group_size", low=-1)
        self.rule = self._rule(GptqRule(bits, size, True, False), asked.values, "")
        parts = fields.get("modules_in_block_to_quantize") or []
        rows = [part if isinstance(part, list) else [part] for part in parts] if isinstance(parts, list) else [[None]]
        self.only = tuple(name for row in rows for name in row)
        if any(not isinstance(name, str) for name in self.only):
            raise asked.error("modules_in_block_to_quantize", "must be a list of names of modules, or of such lists")
        self.dynamic = fields.sub("dynamic").values
        for pattern, changes in self.dynamic.items():
            if not pattern.startswith("-:"):
                if not isinstance(changes, dict):
                    raise asked.error(f"dynamic.{pattern}", "must be an object", changes)
                self._rule(self.rule, changes, f"dynamic.{pattern}.")
                if more := {*changes} - {*GptqRule._fields}:
                    raise asked.error("dynamic", f"may change {', '.join(GptqRule._fields)}, not {min(more)!r}")
            compiled(asked, "dynamic", pattern[2:] if pattern[:2] in ("-:", "+:") else pattern)

    def _rule(self, rule: GptqRule, values: Mapping[str, Any], prefix: str) -> GptqRule:
        """Return a rule with the values that are given. Raises CheckpointError."""
        found = rule._replace(**{name: values[name] for name in GptqRule._fields if values.get(name) is not None})
        for name, good, rule_text in (
            ("bits", type(found.bits) is int and found.bits in ONE, "must be 4 or 8"),
            ("group_size", type(found.group_size) is int and (found.group_size > 0 or found.group_size == -1),
             "must be a whole number above 0, or -1"),
            ("sym", isinstance(found.sym, bool), "must be true or false"),
            ("desc_act", isinstance(found.desc_act, bool), "must be true or false"),
        ):  # fmt: skip
            if not good:
                raise self.asked.error(prefix + name, rule_text, getattr(found, name))
        return found

    def rule_of(self, module: str) -> GptqRule | None:
        """Return the rule of a module, None if it is plain: the first pattern of `dynamic` that matches its name
        counts."""
        for pattern, changes in self.dynamic.items():
            if re.match(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern, module):
                return None if pattern.startswith("-:") else self._rule(self.rule, changes, f"dynamic.{pattern}.")
        inner = ".layers." in module and self.only
        return None if inner and not module.endswith(tuple(f".{name}" for name in self.only)) else self.rule

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        if (rule := self.rule_of(module)) is None:
            return None
        group = 0 if rule.group_size == -1 else rule.group_size
        many, words = WeightLayout(WeightKind.INT8, group).groups(inputs), 32 // rule.bits
        tensors = {
            "qweight": Stored((-(-inputs // words), outputs), ("I32",)),
            "qzeros": Stored((many, -(-outputs // words)), ("I32",)),
            "scales": Stored((many, outputs)),
            "g_idx": Stored((inputs,), ("I32", "I64"), optional=True),
            "bias": Stored((outputs,), FLOATS, optional=True),
        }
        layout, why = int4_layout(group, inputs) if rule.bits == 4 else int8_layout(group, rule.sym)
        if rule.desc_act and group:
            layout, why = DENSE, "desc_act spreads its groups over the inputs"
        return StoredWeight(layout, tensors, partial(self._read, module, rule, layout, inputs), why)

    def _read(
        self, module: str, rule: GptqRule, layout: WeightLayout, inputs: int, found: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        import torch

        from gapless.model.formats.numbers import unpacked, weight_of

        where = f"{self.asked.where}: {module}"
        numbers = unpacked(found["qweight"].mT, rule.bits)[:, :inputs].contiguous()
        zeros = found["qzeros"] + ONE[rule.bits] if self.first else found["qzeros"]
        scale = found["scales"].mT.contiguous()
        zero = unpacked(zeros, rule.bits)[:, : len(scale)].mT.contiguous()
        in_order = torch.arange(inputs) // (inputs if rule.group_size == -1 else rule.group_size)
        groups = found.get("g_idx", in_order).long()
        if not 0 <= int(groups.min()) <= int(groups.max()) < scale.shape[1]:
            raise CheckpointError(f"{where}.g_idx must have groups below {scale.shape[1]}, got {int(groups.max())}")
        if layout != DENSE and not groups.equal(in_order):
            raise CheckpointError(f"{where}.g_idx has inputs in another order: set desc_act of config.json to true")
        if layout.kind is WeightKind.INT8 and not bool((zero == 128).all()):
            raise CheckpointError(f"{where}.qzeros has zero points other than 128: set sym of config.json to false")
        refuse_bias(where, found.get("bias"))
        return weight_of(layout, numbers, scale, zero, groups)


def refuse_bias(where: str, bias: Tensor | None) -> None:
    """Raise CheckpointError for a bias of a module that has none; some programs write zeros."""
    if bias is not None and bool(bias.any()):
        raise CheckpointError(f"{where}.bias is not zero, and by config.json the module has none")


def compiled(asked: Quantization, name: str, pattern: str) -> re.Pattern[str]:
    """Return the pattern of a field. Raises CheckpointError for a wrong one, and one that may never end."""
    if len(pattern) > _LONGEST:
        raise asked.error(name, f"must be patterns of at most {_LONGEST} characters", pattern)
    try:
        if _may_never_end(_parser.parse(pattern)):
            raise asked.error(name, "must not repeat what repeats: it may never end", pattern)
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise asked.error(name, f"must be regular expressions ({error})", pattern) from error


def _may_never_end(part: object, within: bool = False) -> bool:
    """Return whether a part of a parsed pattern, or of what repeats if `within`, has many repeats of a repeat."""
    if not isinstance(part, (tuple, list, _parser.SubPattern)):
        return False
    if len(part) == 2 and part[0] in _REPEATS and isinstance(part[1], tuple):
        most = part[1][1]
        if within and most > _FEW:
            return True
        within = within or most > 1
    return any(_may_never_end(one, within) for one in part)
