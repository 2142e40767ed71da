"""Small checkpoints in every format, beside the plain ones of the same numbers.

Each `write` has the rules of a format's own programs, in numpy or by the compressed-tensors package, and none of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from tiny_models import tiny_config
from torch import Tensor

from gapless.base.files import SINGLE
from gapless.kernels.kinds import DENSE, WeightKind
from gapless.model.formats.seam import WeightLayout

Written = tuple[dict[str, Tensor], np.ndarray]
"""The tensors of a module, and its weight [N, K] in float32"""
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 3, "num_key_value_heads": 1}
"""Not whole blocks of 128"""


class FormatCase(NamedTuple):
    """A quantization_config and its writer."""

    name: str
    config: dict[str, Any]
    write: Callable[[np.ndarray], Written]
    layout: WeightLayout
    """That it is read into if there are `SIZES` inputs"""


def _torch(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _to_fp8(values: np.ndarray) -> tuple[Tensor, np.ndarray]:
    rounded = _torch(values.astype(np.float32)).to(torch.float8_e4m3fn)
    return rounded, rounded.float().numpy()


def fp8_blocks(weight: np.ndarray, rows: int, columns: int) -> Written:
    """One scale for each block, all in a loop."""
    n, k = weight.shape
    scales = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
    wide = np.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = np.abs(weight[part]).max() / 448
            wide[part] = weight[part] / scales[i, j]
    stored, values = _to_fp8(wide)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            values[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] *= scales[i, j]
    return {"weight": stored, "weight_scale_inv": _torch(scales)}, values


def fp8_whole(weight: np.ndarray, names: tuple[str, str], shape: tuple[int, ...]) -> Written:
    scale = np.float32(np.abs(weight).max() / 448)
    stored, values = _to_fp8(weight / scale)
    scales = {names[0]: torch.full(shape, float(scale)), names[1]: torch.full(shape, 0.02)}
    return {"weight": stored, **scales}, values * scale


def compressed(weight: np.ndarray, form: str, dtype: torch.dtype, **values: Any) -> Written:
    """What the package itself compresses, and decompresses: exact products of 8 bits in its dtype of scales, rounded
    once; in float32 here, so that each is compared exactly."""
    scheme = QuantizationScheme(targets=["Linear"], weights=values)
    dense, args = _torch(weight).to(dtype), scheme.weights
    assert args is not None
    n, k = dense.shape
    rows, columns = {"tensor": (n, k), "channel": (1, k), "group": (1, args.group_size or k)}.get(
        str(args.strategy), tuple(args.block_structure or (0, 0))
    )
    many = -(-n // rows), -(-k // columns)
    least, most = torch.zeros(many), torch.zeros(many)
    for i in range(many[0]):
        for j in range(many[1]):
            part = dense[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            least[i, j], most[i, j] = part.min(), part.max()
    scale, zero = calculate_qparams(least.to(dtype), most.to(dtype), args)
    if args.strategy == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight": dense, "weight_scale": scale, "weight_zero_point": zero}
    if form.startswith("mxfp4"):
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(scale.float()))).to(dtype)
    found = compressor.compress(state, scheme)
    given = {name: tensor.clone().contiguous() for name, tensor in found.items()}
    wide = dict(found)
    if dtype != torch.float32 and not form.startswith("mxfp4"):  # the exact numbers, not rounded
        wide["weight_scale"] = found["weight_scale"].float()
    return given, compressor.decompress(wide, scheme)["weight"].float().numpy()


def _rounded(weight: np.ndarray, bits: int, size: int, sym: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers [N, K], float16 scales [N, G] and zero points, by the least and the largest of each group."""
    n, k = weight.shape
    top, size = 2**bits - 1, size if size > 0 else k
    groups = -(-k // size)
    numbers, scales, zeros = np.zeros((n, k), np.int64), np.zeros((n, groups), np.float16), np.zeros((n, groups), int)
    for g in range(groups):
        part = weight[:, g * size : (g + 1) * size]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            high = np.maximum(-low, high)
            low = -high
        scales[:, g] = (high - low) / top
        wide = scales[:, g].astype(np.float32)
        zeros[:, g] = (top + 1) // 2 if sym else np.clip(np.round(-low / wide), 0, top)
        numbers[:, g * size : (g + 1) * size] = np.clip(np.round(part / wide[:, None]) + zeros[:, g, None], 0, top)
    return numbers, scales, zeros


def _words(numbers: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """Pack rows [R, C] into int32 [R, C * bits / 32], place i of a word with its number order[i]."""
    each = 32 // bits
    found = np.zeros((numbers.shape[0], numbers.shape[1] // each), np.uint64)
    for column in range(found.shape[1]):
        for place in range(each):
            number = numbers[:, column * each + (order[place] if order else place)]
            found[:, column] |= number.astype(np.uint64) << np.uint64(bits * place)
    return found.astype(np.uint32).view(np.int32)


def gptq(weight: np.ndarray, bits: int, size: int, sym: bool, first: bool, order: bool = False) -> Written:
    """`order`: inputs are rounded in an order by chance, and put back."""
    n, k = weight.shape
    turn = np.random.default_rng(k).permutation(k) if order else np.arange(k)
    numbers, scales, zeros = _rounded(weight[:, turn], bits, size, sym)
    back = np.argsort(turn)
    g_idx = (np.arange(k) // (size if size > 0 else k))[back]
    numbers = numbers[:, back]
    wide = scales.astype(np.float32)[:, g_idx] * (numbers - zeros[:, g_idx]).astype(np.float32)
    if first:
        if not sym:  # a zero point of 0 borrows from its neighbour's word place, as packed subtraction does
            words = _words(zeros.T, bits).view(np.uint32)
            stored = (words - np.uint32(0x11111111 if bits == 4 else 0x01010101)).view(np.int32)
        else:
            stored = _words(zeros.T - 1, bits)
    else:
        stored = _words(zeros.T, bits)
    tensors = {
        "qweight": _torch(_words(numbers, bits).T),
        "qzeros": _torch(stored),
        "scales": _torch(scales.T),
        "g_idx": _torch(g_idx.astype(np.int32)),
        "bias": torch.zeros(n, dtype=torch.float16),
    }
    return tensors, wide


def awq(weight: np.ndarray, size: int) -> Written:
    numbers, scales, zeros = _rounded(weight, 4, size, False)
    groups = np.arange(weight.shape[1]) // (size if size > 0 else weight.shape[1])
    wide = scales.astype(np.float32)[:, groups] * (numbers - zeros[:, groups]).astype(np.float32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": _words(numbers.T, 4, order), "qzeros": _words(zeros.T, 4, order), "scales": scales.T}
    return {name: _torch(tensor) for name, tensor in tensors.items()}, wide


def _layout(kind: str, group: int = 0) -> WeightLayout:
    return WeightLayout(WeightKind(kind), group)


def _compressed(name: str, form: str, layout: WeightLayout, dtype: torch.dtype = torch.bfloat16,
                **values: Any) -> FormatCase:  # fmt: skip
    group = {"targets": ["Linear"], "weights": values, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "version": "0.20",
              "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip
    return FormatCase(name, config, partial(compressed, form=form, dtype=dtype, **values), layout)


def _gptq(name: str, layout: WeightLayout, bits: int, size: int, sym: bool, version: str, order: bool = False
          ) -> FormatCase:  # fmt: skip
    config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": order,
              "checkpoint_format": version, "damp_percent": 0.01, "lm_head": False}  # fmt: skip
    return FormatCase(name, config, partial(gptq, bits=bits, size=size, sym=sym, first=version == "gptq", order=order),
                      layout)  # fmt: skip


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_INT, _FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "num_bits": 8, "symmetric": True}
CASES = [
    FormatCase("fp8_128", _FP8 | {"weight_block_size": [128, 128]}, partial(fp8_blocks, rows=128, columns=128),
               _layout("fp8", 128)),
    FormatCase("fp8_64_32", _FP8 | {"weight_block_size": [64, 32]}, partial(fp8_blocks, rows=64, columns=32),
               _layout("fp8", 32)),
    FormatCase("fp8_static", _FP8 | {"activation_scheme": "static"},
               partial(fp8_whole, names=("weight_scale", "input_scale"), shape=()), _layout("fp8")),
    FormatCase("fp8_whole", _FP8 | {"weight_block_size": None},
               partial(fp8_whole, names=("weight_scale_inv", "activation_scale"), shape=(1,)), _layout("fp8")),
    _compressed("ct_fp8_channel", "float-quantized", _layout("fp8"), strategy="channel", **_FLOAT),
    _compressed("ct_fp8_tensor", "naive-quantized", _layout("fp8"), torch.float32, strategy="tensor", **_FLOAT),
    _compressed("ct_fp8_block", "float-quantized", _layout("fp8", 64), strategy="block", block_structure=[128, 64],
                **_FLOAT),
    _compressed("ct_int8_channel", "int-quantized", _layout("int8"), strategy="channel", num_bits=8, **_INT),
    _compressed("ct_int8_zeros", "int-quantized", DENSE, torch.float32, strategy="channel", num_bits=8, type="int",
                symmetric=False),
    _compressed("ct_int4_group", "pack-quantized", _layout("int4", 64), strategy="group", group_size=64, num_bits=4,
                **_INT),
    _compressed("ct_int4_zeros", "pack-quantized", _layout("int4", 32), strategy="group", group_size=32, num_bits=4,
                type="int", symmetric=False),
    _compressed("ct_int4_channel", "pack-quantized", _layout("int4"), torch.float32, strategy="channel", num_bits=4,
                type="int", symmetric=False),
    _compressed("ct_int8_packed", "pack-quantized", _layout("int8", 64), strategy="group", group_size=64, num_bits=8,
                **_INT),
    _compressed("ct_mxfp4", "mxfp4-pack-quantized", DENSE, strategy="group", group_size=32, num_bits=4, type="float",
                symmetric=True),
    _gptq("gptq_sym", _layout("int4", 64), 4, 64, True, "gptq"),
    _gptq("gptq_asym", _layout("int4", 32), 4, 32, False, "gptq"),
    _gptq("gptq_v2", _layout("int4"), 4, -1, False, "gptq_v2"),
    _gptq("gptq_order", DENSE, 4, 64, False, "gptq_v2", True),
    _gptq("gptq_8", _layout("int8", 64), 8, 64, True, "gptq"),
    _gptq("gptq_8_zeros", DENSE, 8, 64, False, "gptq"),
    FormatCase("awq", {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
                       "modules_to_not_convert": None}, partial(awq, size=64), _layout("int4", 64)),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def write_checkpoints(
    folder: Path, case: FormatCase, seed: int = 0, mtp: bool = False, **changes: Any
) -> tuple[Path, Path]:
    """Write a small decoder in a format, and the plain one of the same numbers, in float32. Returns their folders."""
    config = tiny_config(**(SIZES | {"head_dim": 64} | changes))
    random, packed, plain = np.random.default_rng(seed), dict[str, Tensor](), dict[str, Tensor]()
    heads, head_dim, kv = config["num_attention_heads"], config["head_dim"], config["num_key_value_heads"]
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    shapes = {"self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv * head_dim, hidden),
              "self_attn.v_proj": (kv * head_dim, hidden), "self_attn.o_proj": (hidden, heads * head_dim),
              "mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden),
              "mlp.down_proj": (hidden, middle)}  # fmt: skip
    plain["model.embed_tokens.weight"] = _torch(random.normal(0, 0.5, (config["vocab_size"], hidden)).astype("f4"))
    norms = {"model.norm": hidden}
    layers = [f"model.layers.{layer}" for layer in range(config["num_hidden_layers"])]
    if mtp:
        norms |= dict.fromkeys(("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"), hidden)
        plain["mtp.fc.weight"] = _torch(random.normal(0, 0.08, (hidden, 2 * hidden)).astype("f4"))
        layers.append("mtp.layers.0")
    for prefix in layers:
        norms[f"{prefix}.input_layernorm"] = hidden
        if config["model_type"] != "cohere":
            norms[f"{prefix}.post_attention_layernorm"] = hidden
        if config["model_type"] == "qwen3":
            norms |= {f"{prefix}.self_attn.q_norm": head_dim, f"{prefix}.self_attn.k_norm": head_dim}
        for name, shape in shapes.items():
            weight = (random.normal(0, 0.08, shape) * random.uniform(0.5, 2, (shape[0], 1))).astype("f4")
            tensors, dense = case.write(weight)
            packed |= {f"{prefix}.{name}.{part}": tensor for part, tensor in tensors.items()}
            plain[f"{prefix}.{name}.weight"] = _torch(dense.astype("f4"))
    for name, size in norms.items():
        plain[f"{name}.weight"] = _torch(random.uniform(0.5, 1.5, size).astype("f4"))
    packed |= {name: tensor for name, tensor in plain.items() if not name.endswith("_proj.weight")}
    quantised = config | {"quantization_config": case.config}
    for name, tensors, values in (("packed", packed, quantised), ("plain", plain, config)):
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / SINGLE)
        (folder / name / "config.json").write_text(json.dumps(values))
    return folder / "packed", folder / "plain"
