"""How the weights of a checkpoint are quantised, as its config.json has it or `--quantization` asks. Imports no
torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gapless.base.errors import CheckpointError, ConfigError
from gapless.model.fields import Fields, says_nothing

FORMAT_PLUG_INS = "gapless.formats"
"""Entry points of this group are further formats: a `quant_method`, and what makes its `formats.seam.WeightFormat` of a
`Quantization`."""
ROUNDED = {"fp8": 0, "int8": 0, "int4": 128}
"""Kinds that `--quantization` rounds a dense checkpoint to, with the most inputs of a group; 0: a whole row"""
AS_IT_IS = ("auto", "none")
_CALIBRATION = """
    act_group_aware damp_auto_increment damp_percent dataset device failsafe gptaq gptaq_alpha max_input_length
    mock_quantization mse observer offload_to_disk offload_to_disk_path quantizer seed static_groups tokenizer
    true_sequential uri vram_strategy
"""
_PROGRAMS = """
    backend batch_size block_name_to_quantize cache_block_outputs cache_examples_on_gpu dequantize disable_exllama
    do_fuse exllama_config fuse_max_seq_len model_file_base_name model_name_or_path model_seqlen
    module_name_preceding_first_block modules_to_fuse pad_token_id run_compressed use_cpu_for_hessian use_cuda_fp16
    use_exllama
"""
_LABELS = "global_compression_ratio meta quant_method quantization_status"
CHANGES_NOTHING: dict[str, str] = {
    **dict.fromkeys(_CALIBRATION.split(), "it was of use when the weights were rounded"),
    **dict.fromkeys(_PROGRAMS.split(), "it chooses among kernels or memory of other programs"),
    **dict.fromkeys(_LABELS.split(), "it is a label"),
}
"""Fields of quantization_config that no number depends on, and why"""


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a model."""

    method: str
    """The checkpoint's quant_method, or a kind of ROUNDED"""
    values: Mapping[str, Any]
    """The checkpoint's quantization_config"""
    path: str = field(default="", repr=False, compare=False)
    """The file that has it, for errors"""
    at_load: bool = False
    """Whether a dense checkpoint is rounded at load"""

    def __str__(self) -> str:
        return self.method

    @property
    def where(self) -> str:
        """The file and the field"""
        return f"{self.path}: quantization_config"

    def error(self, name: str, rule: str, value: object = None) -> CheckpointError:
        """Return the error of a field of quantization_config."""
        found = self.values.get(name) if value is None else value
        return CheckpointError(f"{self.where}.{name} {rule}, got {found!r}")

    def fields(self, reads: Collection[str]) -> Fields:
        """Return the fields of quantization_config. Raises CheckpointError for one that is neither in `reads` nor known
        to change nothing."""
        for name, value in self.values.items():
            if name not in reads and name not in CHANGES_NOTHING and not says_nothing(value):
                raise self.error(name, f"is no known field of {self.method}: leave it out if no number depends on it")
        return Fields(Path(self.path), dict(self.values), "quantization_config.")

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of names of modules."""
        found = self.values.get(name) or []
        if not isinstance(found, list) or any(not isinstance(one, str) for one in found):
            raise self.error(name, "must be a list of names of modules")
        return tuple(found)


def asked_quantization(asked: str, found: Quantization | None) -> Quantization | None:
    """Return the quantisation by `--quantization` of a checkpoint with this one. Raises ConfigError."""
    if asked == "auto" or (found is None and asked == "none") or (found is not None and asked == found.method):
        return found
    if found is not None:
        raise ConfigError(f"quantization is {asked!r}, and the checkpoint's weights are {found.method}: leave it out")
    if asked not in ROUNDED:
        raise ConfigError(
            f"quantization must be one of {', '.join((*AS_IT_IS, *ROUNDED))} for a checkpoint that is not quantised, "
            f"got {asked!r}"
        )
    return Quantization(asked, {}, at_load=True)
