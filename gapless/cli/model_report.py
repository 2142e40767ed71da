"""The report of `gapless doctor MODEL` before weights are fetched, from config.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gapless.base.progress import in_bytes
from gapless.kernels.kinds import Activation, Reach
from gapless.model.config import ModelConfig
from gapless.model.registry import Impl
from gapless.model.spec import LayerSpec, ModelSpec, NormOrder, QKNorm

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
    yield from _sizes(model, kv_bytes(model.spec) * ITEM_BYTES[model.dtype])
    yield from _kernels(model.spec)
    modules = {module.rpartition(".")[2] for name in ("qkv", "output", "gate_up", "down")
               for module in model.names.modules(name)}  # fmt: skip
    yield "works", f"{WORKS}, {HISTORIES}"
    yield "adapters", f"LoRA on {', '.join(sorted(modules))}"
    heads = "a draft model of the same vocabulary; an EAGLE-3 head for it; MTP layers, if the checkpoint has them"
    yield "drafts", heads
    yield "new weights", "/update_weights_from_disk, from checkpoints of the same config.json"


def layer_kind(layer: LayerSpec) -> str:
    """Return the reach of a layer's attention, with its soft cap and a missing rope."""
    at = layer.attention
    reach = {Reach.CAUSAL: "full", Reach.WINDOW: f"window {at.size:,}", Reach.CHUNK: f"chunk {at.size:,}"}[at.reach]
    special = [f"softcap {at.softcap:g}"] * bool(at.softcap) + ["no rope"] * (at.rope is None)
    return " ".join((reach, f"({', '.join(special)})")) if special else reach


def kv_bytes(spec: ModelSpec) -> int:
    """Return the numbers of keys and values that a token has in all layers."""
    return sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers)


def why_general(spec: ModelSpec) -> list[str]:
    """Return why fast ways do not serve a model; nothing if they do, see `ModelSpec.plain`."""
    found: list[str] = ["LayerNorm"] * spec.norm.centered
    for layer in spec.layers:
        if layer.order is not NormOrder.PRE:
            found.append(f"{layer.order.value} norms")
        if layer.residual != 1:
            found.append("scaled residuals")
        if layer.mlp.activation is not Activation.SILU or not layer.mlp.gated:
            found.append(f"an MLP with {layer.mlp.activation.name}{'' if layer.mlp.gated else ' without a gate'}")
        if layer.attention.qk_norm is QKNorm.ALL:
            found.append("a norm of all queries together")
    if spec.embedding_factor != 1:
        found.append("scaled embeddings")
    if spec.positions:
        found.append("learned positions")
    return list(dict.fromkeys(found))


def _sizes(model: ModelConfig, kv: int) -> Iterator[tuple[str, str]]:
    count = model.sizes.parameters
    yield "parameters", f"{count / 1e6:,.1f} million, {in_bytes(count * ITEM_BYTES[model.dtype])} in {model.dtype}"
    if kv:
        yield "KV", f"{kv:,} bytes a token in {model.dtype}, {in_bytes(kv * model.max_position_embeddings)} for " \
            f"{model.max_position_embeddings:,} tokens"  # fmt: skip


def _kernels(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    from gapless.kernels import native

    product = native.product()
    here = "C++ attention, and C++ products" if native.load() is not None else "plain torch"
    yield "kernels, CPU", f"{here} ({product.path})" if product.path and native.load() is not None else here
    why = [] if spec.plain else why_general(spec)
    way = f"one by one in each layer, since it has {', '.join(why)}" if why else "fused for few rows, else one by one"
    yield "kernels, CUDA", f"Triton attention of every kind; a layer's operations are {way}; steps are graphs"


def _transformers(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Report a model of the Transformers backend, whose class is made without weights."""
    from gapless.model.transformers_config import class_of

    made, _ = class_of(model.files[0])
    yield "class", f"transformers.{made.__name__}, with our attention, products and RMSNorms"
    yield "layers", str(model.sizes.layers)
    yield from _sizes(model, 0)
    yield "works", f"{WORKS}, {HISTORIES}"
    yield "refused", "LoRA, EAGLE-3, MTP, a draft model, /update_weights_from_disk, --batch-invariant"
    yield "check", "each start compares its logits with the class's own eager attention, and refuses a difference"
