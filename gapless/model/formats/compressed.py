"""compressed-tensors: what llm-compressor writes. FP8 and whole numbers, by tensor, output, group or block.

Activations are not rounded here, whatever `input_activations` asks: the results are nearer to the weights'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gapless.base.errors import CheckpointError
from gapless.kernels.kinds import DENSE, WeightKind, WeightLayout
from gapless.model.fields import says_nothing
from gapless.model.formats.fp8 import check_scale, is_block
from gapless.model.formats.gptq import compiled
from gapless.model.formats.seam import Stored, StoredWeight, int4_layout, int8_layout
from gapless.model.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

_COMPRESSED_READS_TEXT = """
    config_groups format ignore kv_cache_scheme moe_sparsity_config sparsity_config transform_config version
"""
COMPRESSED_READS = frozenset(_COMPRESSED_READS_TEXT.split())
_GROUP = frozenset(["format", "input_activations", "output_activations", "targets", "weights"])
_WEIGHTS_TEXT = """
    actorder block_structure dynamic group_size num_bits observer observer_kwargs scale_dtype strategy
    symmetric type zp_dtype
"""
_WEIGHTS = frozenset(_WEIGHTS_TEXT.split())
PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
PACKED, FLOATS4 = "pack-quantized", "mxfp4-pack-quantized"
CLASSES = {"Linear": True, "Embedding": False}
"""Classes that targets may name, and whether a module that is asked for may be one"""
_ORDERED = ("group", "dynamic", True)
"""Values of actorder that store the groups of inputs"""


class Scheme(NamedTuple):
    """How a group of modules is stored."""

    format: str
    bits: int
    is_float: bool
    symmetric: bool
    rows: int
    """Outputs that share a scale; 0 for all of them"""
    group: int
    """Inputs that share a scale; 0 for all of them"""
    ordered: bool
    """Whether g_idx has the groups of inputs"""

    def scales(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the scales."""
        return -(-outputs // (self.rows or outputs)), -(-inputs // (self.group or inputs))


class CompressedFormat:
    """Implements `WeightFormat`."""

    def __init__(self, asked: Quantization) -> None:
        fields, self.asked = asked.fields(COMPRESSED_READS), asked
        sparse = fields.sub("sparsity_config").values
        if not says_nothing(sparse) and sparse.get("format") != "dense":
            raise asked.error("sparsity_config", "must be dense: sparse weights are not read", sparse.get("format"))
        for name, values in (("transform_config", fields.sub("transform_config").values.get("config_groups")),
                             ("moe_sparsity_config", fields.get("moe_sparsity_config"))):  # fmt: skip
            if not says_nothing(values):
                raise asked.error(name, "must be empty: it changes what the model computes")
        cache = fields.sub("kv_cache_scheme").values
        for name, usual in (("num_bits", 8), ("type", "float"), ("strategy", "tensor")):
            if cache and cache.get(name, usual) != usual:
                raise asked.error(f"kv_cache_scheme.{name}", f"must be {usual}", cache[name])
        self.ignore = self._patterns("ignore", asked.names("ignore"))
        self.schemes: dict[str, Scheme | None] = {}
        groups = fields.sub("config_groups").values
        if not groups:
            raise asked.error("config_groups", "must have a group of modules")
        for name, group in groups.items():
            self._add(f"config_groups.{name}", group, fields.text("format", ""))
        self.patterns = self._patterns("config_groups", tuple(self.schemes))

    def _add(self, name: str, group: Any, usual: str) -> None:
        """Add the targets of a group. Raises CheckpointError."""
        error = partial(self.asked.error, value=group)
        if not isinstance(group, dict) or not isinstance(targets := group.get("targets"), list) or not targets:
            raise error(name, "must be an object with targets")
        for field, value in group.items():
            if field not in _GROUP and not says_nothing(value):
                raise self.asked.error(f"{name}.{field}", "is no known field", value)
        if not says_nothing(group.get("output_activations")):
            raise self.asked.error(f"{name}.output_activations", "must be null: results are not rounded",
                                   group["output_activations"])  # fmt: skip
        found = group.get("weights")
        if found is not None and not isinstance(found, dict):
            raise error(f"{name}.weights", "must be an object")
        scheme = None if found is None else self._scheme(f"{name}.weights", found, group.get("format") or usual)
        for target in targets:
            if not isinstance(target, str) or (target[:1].isupper() and target not in CLASSES):
                known = ", ".join(CLASSES)
                raise self.asked.error(f"{name}.targets", f"must be names, patterns or classes of {known}", target)
            self.schemes[target] = scheme

    def _scheme(self, name: str, values: Mapping[str, Any], form: str) -> Scheme:
        """Read the scheme of weights. Raises CheckpointError."""

        def refuse(field: str, rule: str) -> CheckpointError:
            return self.asked.error(f"{name}.{field}", rule, values.get(field))

        for field, value in values.items():
            if field not in _WEIGHTS and not says_nothing(value):
                raise refuse(field, "is no known field")
        if form not in (*PLAIN, PACKED, FLOATS4):
            known = ", ".join((*PLAIN, PACKED, FLOATS4))
            raise self.asked.error("format", f"must be one of {known}: save the checkpoint as one of these", form)
        is_float, bits, strategy = values.get("type", "int") == "float", values.get("num_bits", 8), _strategy(values)
        if values.get("type", "int") not in ("int", "float"):
            raise refuse("type", "must be int or float")
        known_bits = {PACKED: (4, 8), FLOATS4: (4,)}.get(form, (8,) if is_float else range(2, 9))
        if bits not in known_bits or is_float != (form == FLOATS4 or (form in PLAIN and is_float)):
            raise refuse("num_bits", f"must be {' or '.join(map(str, known_bits))} of {form}")
        symmetric, size, block = values.get("symmetric", True), values.get("group_size"), values.get("block_structure")
        if not isinstance(symmetric, bool) or (is_float and not symmetric):
            raise refuse("symmetric", "must be true or false, and true of floats")
        if strategy not in ("tensor", "channel", "group", "block") or (form == FLOATS4 and strategy != "group"):
            raise refuse("strategy", "must be tensor, channel, group or block")
        if strategy == "group" and (type(size) is not int or size < 1 or (form == FLOATS4 and size != 32)):
            raise refuse("group_size", "must be a whole number above 0, and 32 of mxfp4")
        if strategy == "block" and (not is_block(block) or form == PACKED):
            raise refuse("block_structure", "must be two whole numbers above 0, of weights that are not packed")
        if (order := values.get("actorder")) not in (None, False, "weight", "static", *_ORDERED):
            raise refuse("actorder", "must be group, weight or null")
        shared = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size), "block": tuple(block or ())}
        rows, group = shared[strategy]
        return Scheme(form, bits, is_float, symmetric, rows, group, strategy == "group" and order in _ORDERED)

    def _patterns(self, field: str, names: tuple[str, ...]) -> dict[str, re.Pattern[str]]:
        return {name: compiled(self.asked, field, name[3:]) for name in names if name.startswith("re:")} | {
            name: compiled(self.asked, field, re.escape(name) + r"\Z") for name in names if not name.startswith("re:")
        }

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module, None if it is plain: by its name, else a pattern, else its class."""
        if any(CLASSES.get(name) or pattern.match(module) for name, pattern in self.ignore.items()):
            return None
        names = sorted(self.patterns, key=lambda name: ("re:" in name, name))
        matching = [name for name in names if self.patterns[name].match(module)]
        found = matching + [name for name in names if CLASSES.get(name)]
        return self.schemes[found[0]] if found else None

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        if (scheme := self.scheme_of(module)) is None:
            return None
        shape = scheme.scales(outputs, inputs)
        others = ((), (1,)) if shape == (1, 1) else ((outputs,),) if shape == (outputs, 1) else ()
        tensors = {"weight_scale": Stored(shape, others=others)}
        tensors |= {"input_scale": Stored((), optional=True, others=((1,),))}
        tensors |= {"input_zero_point": Stored((), ("I8", "F8_E4M3"), optional=True, others=((1,),))}
        zero = ("I8", "F8_E4M3") if scheme.symmetric else ("I8",)
        tensors["weight_zero_point"] = Stored(shape, zero, scheme.symmetric, others)
        read = partial(self._read, module, scheme, outputs, inputs)
        if scheme.format == FLOATS4:
            tensors |= {
                "weight_packed": Stored((outputs, inputs // 2), ("U8",)),
                "weight_scale": Stored(shape, ("U8",)),
            }
            return StoredWeight(DENSE, tensors, partial(read, DENSE), "no kernel has 4-bit floats")
        if scheme.format == PACKED:
            words = 32 // scheme.bits
            tensors["weight_packed"] = Stored((outputs, -(-inputs // words)), ("I32",))
            tensors["weight_shape"] = Stored((2,), ("I64", "I32"), optional=True)
            tensors["weight_g_idx"] = Stored((inputs,), ("I32", "I64"), not scheme.ordered)
            if not scheme.symmetric and scheme.rows:
                tensors["weight_zero_point"] = Stored((-(-outputs // words), shape[1]), ("I32",))
        else:
            tensors["weight"] = Stored((outputs, inputs), ("F8_E4M3" if scheme.is_float else "I8",))
        layout, why = _layout(scheme, inputs)
        return StoredWeight(layout, tensors, partial(read, layout), why)

    def _read(
        self, module: str, scheme: Scheme, outputs: int, inputs: int, layout: WeightLayout, found: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        import torch

        from gapless.model.formats.numbers import fp4_values, unpacked, weight_of

        where = f"{self.asked.where}: {module}"
        check_scale(f"{where}.input_scale", found.get("input_scale"))
        if scheme.format == FLOATS4:
            return (fp4_values(found["weight_packed"], found["weight_scale"]),)
        scale, zero = self._by_row(scheme, outputs, inputs, found["weight_scale"]), found.get("weight_zero_point")
        if scheme.symmetric and zero is not None and bool(zero.float().any()):
            raise CheckpointError(f"{where}.weight_zero_point is not zero, and symmetric of config.json is true")
        if scheme.is_float:
            return found["weight"], scale
        if (shape := found.get("weight_shape")) is not None and shape.tolist() != [outputs, inputs]:
            raise CheckpointError(f"{where}.weight_shape is {shape.tolist()}, and by config.json {[outputs, inputs]}")
        middle = 1 << (scheme.bits - 1)
        if scheme.format == PACKED:
            numbers = unpacked(found["weight_packed"], scheme.bits)[:, :inputs].contiguous()
        else:
            numbers = (found["weight"].short() + 128).to(torch.uint8)
            middle = 128
        if scheme.symmetric or zero is None:
            zeros = torch.full(scale.shape, middle)
        elif zero.dtype == torch.int32:
            zeros = unpacked(zero.mT, scheme.bits).mT[:outputs].contiguous()
        else:
            zeros = self._by_row(scheme, outputs, inputs, zero).short() + middle
        in_order = torch.arange(inputs) // (scheme.group or inputs)
        groups = found.get("weight_g_idx", in_order).long()
        if not 0 <= int(groups.min()) <= int(groups.max()) < scale.shape[1]:
            raise CheckpointError(f"{where}.weight_g_idx must be below {scale.shape[1]}, got {int(groups.max())}")
        if layout != DENSE and not groups.equal(in_order):
            raise CheckpointError(f"{where}.weight_g_idx has another order, and actorder of config.json is not group")
        return weight_of(layout, numbers, scale, zeros, groups)

    def _by_row(self, scheme: Scheme, outputs: int, inputs: int, blocks: Tensor) -> Tensor:
        """Return numbers by blocks as float32 [N, G]."""
        from gapless.model.formats.numbers import rows_of

        return rows_of(blocks.reshape(scheme.scales(outputs, inputs)), outputs, scheme.rows)


def _strategy(values: Mapping[str, Any]) -> str:
    """Return the strategy of weights, which follows from group_size if it is not given."""
    size = values.get("group_size")
    found = values.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    return str(found).lower()


def _layout(scheme: Scheme, inputs: int) -> tuple[WeightLayout, str]:
    """Return the layout of a weight, and why it is dense if it is."""
    if scheme.is_float:
        return WeightLayout(WeightKind.FP8, scheme.group), ""
    if scheme.ordered:
        return DENSE, "actorder spreads its groups over the inputs"
    if scheme.format == PACKED and scheme.bits == 4:
        return int4_layout(scheme.group, inputs)
    return int8_layout(scheme.group, scheme.symmetric)
