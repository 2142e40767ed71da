"""The report of `gapless doctor MODEL` before weights are fetched, from config.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from gapless.base.progress import in_bytes
from gapless.kernels.kinds import Reach
from gapless.kernels.kv import KVFormat, KVLayout
from gapless.model.config import ModelConfig
from gapless.model.formats.of_model import layouts_of
from gapless.model.registry import Impl
from gapless.model.spec import LayerSpec, ModelSpec

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
WORKS = "chunked prompts, prefix cache, KV tiers, preemption, log-probabilities, structured output, penalties"
HISTORIES = "speculation by ngram, suffix and grammar"


def rows(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield names and texts about a model."""
    yield "architecture", model.architecture
    yield "computed by", f"{model.impl}: {model.impl_reason}"
    if model.impl == Impl.TRANSFORMERS:
        yield from _transformers(model)
        return
    kinds = Counter(map(layer_kind, model.spec.layers))
    yield "layers", f"{len(model.spec.layers)}: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    yield from _sizes(model, kv_bytes(model.spec))
    if model.quantization:
        counts = [f"{count} products {layout}" + f" ({why})" * bool(why)
                  for (layout, why), count in layouts_of(model).items()]  # fmt: skip
        yield "weights", f"{model.quantization}: {', '.join(counts)}; embedding and head in {model.dtype}"
    yield from _kernels(model.spec)
    modules = {module.rpartition(".")[2] for name in ("qkv", "output", "gate_up", "down")
               for module in model.names.modules(name)}  # fmt: skip
    yield "works", f"{WORKS}, {HISTORIES}"
    yield "adapters", f"LoRA on {', '.join(sorted(modules))}"
    mtp = "; MTP layers, if the checkpoint has them" if model.spec.plain and model.spec.ropes else ""
    yield "drafts", f"a draft model of the same vocabulary; an EAGLE-3 head of the same heads of keys{mtp}"
    yield "new weights", "/update_weights_from_disk, from checkpoints of the same config.json"


def layer_kind(layer: LayerSpec) -> str:
    """Return the reach of a layer's attention, with its soft cap and a missing rope."""
    at = layer.attention
    reach = {Reach.CAUSAL: "full", Reach.WINDOW: f"window {at.size:,}", Reach.CHUNK: f"chunk {at.size:,}"}[at.reach]
    special = [f"softcap {at.softcap:g}"] * bool(at.softcap) + ["no rope"] * (at.rope is None)
    return " ".join((reach, f"({', '.join(special)})")) if special else reach


def kv_bytes(spec: ModelSpec) -> dict[KVFormat, int]:
    """Return the bytes of keys and values that a token has in all layers, by format; auto's for a dtype of one byte."""
    sizes = [(layer.attention.kv_heads, layer.attention.head_dim) for layer in spec.layers]
    return {kind: sum(KVLayout(kind, *size, torch.uint8).entry_bytes for size in sizes) for kind in KVFormat}


def _sizes(model: ModelConfig, kv: Mapping[KVFormat, int]) -> Iterator[tuple[str, str]]:
    count = model.sizes.parameters
    yield "parameters", f"{count / 1e6:,.1f} million, {in_bytes(count * ITEM_BYTES[model.dtype])} in {model.dtype}"
    if kv:
        auto, fp8, k8v4 = kv[KVFormat.AUTO] * ITEM_BYTES[model.dtype], kv[KVFormat.FP8], kv[KVFormat.K8V4]
        longest = model.max_position_embeddings
        whole = f"{auto:,} bytes a token in {model.dtype}, {in_bytes(auto * longest)} for {longest:,} tokens"
        yield "KV", f"{whole}; {fp8:,} bytes with --kv-cache-dtype fp8, {k8v4:,} with k8v4"


def _kernels(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    from gapless.kernels import native

    product = native.product()
    here = "C++ attention, and C++ products" if native.load() is not None else "plain torch"
    yield "kernels, CPU", f"{here} ({product.path})" if product.path and native.load() is not None else here
    special = ", ".join(spec.special)
    way = f"one by one in each layer, since it has {special}" if special else "fused for few rows, else one by one"
    yield "kernels, CUDA", f"Triton attention of every kind; a layer's operations are {way}; steps are graphs"


def _transformers(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Report a model of the Transformers backend, whose class is made without weights."""
    from gapless.model.transformers_config import class_of

    made, _ = class_of(model.files[0])
    yield "class", f"transformers.{made.__name__}, with our attention, products and RMSNorms"
    yield "layers", str(model.sizes.layers)
    yield from _sizes(model, {})
    if model.quantization:
        kept = "linear layers as they are stored, all else multiplied out"
        yield "weights", f"{model.quantization}: {kept} to {model.dtype}"
    yield "works", f"{WORKS}, {HISTORIES}"
    yield "refused", "LoRA, EAGLE-3, MTP, a draft model, /update_weights_from_disk, --batch-invariant"
    yield "check", "each start compares its logits with the class's own eager attention, and refuses a difference"
