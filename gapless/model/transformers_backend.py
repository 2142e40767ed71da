"""The Transformers backend: a decoder of transformers behind the `Model` protocol.

transformers computes a layer; attention and the KV cache are ours. Linear layers and RMSNorms become our kernels. Only
the classes of the installed package run, never code of a checkpoint or of the hub. Importing this module imports
transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from copy import copy, deepcopy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from gapless.kernels.kinds import Reach
from gapless.kernels.kv import KVFormat, KVLayout
from gapless.kernels.layers import SeparateOps
from gapless.kernels.matrix import Linear, Matrix, dense
from gapless.kernels.seam import Kernels
from gapless.kernels.views import Attend, Rotation
from gapless.memory.groups import PageGroup
from gapless.model.adapters import AdapterTables
from gapless.model.attention import AttentionPlan, PagedAttention, plan_attention
from gapless.model.config import ModelConfig
from gapless.model.kv_memory import PagedModel
from gapless.model.seam import BatchShape, KVCache, StepInputs
from gapless.model.self_check import tokens
from gapless.model.transformers_config import base_of, refusal

OURS = "gapless"
"""Name of our attention in transformers' table"""
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "dropout": (0, 0.0), "is_causal": (None, True), "output_attentions": (None, False), "use_cache": (None, False),
}  # fmt: skip
"""Keywords of attention with the values that ask for nothing; None asks for nothing in any"""
_HONOURED = ("scaling", "sliding_window", "softcap", "s_aux", "position_ids")
"""Keywords of attention that count. Positions are the step's."""


class LayerSizes(NamedTuple):
    """Heads of a layer, as attention meets them."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


class AttendedLayer(NamedTuple):
    """A layer's attention."""

    place: int
    """Number of layers that attend before it"""
    attend: Attend
    sizes: LayerSizes

    def on(self, device: torch.device) -> Self:
        """Return it with its tensor on this device."""
        sinks = self.attend.sinks
        return self if sinks is None else self._replace(attend=self.attend._replace(sinks=sinks.to(device)))


_running: ContextVar[Callable[..., Tensor]] = ContextVar("attention of the running forward")


def our_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, **given: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: q [1, Q, T, D], k [1, K, T, D], v [1, K, T, V] -> [1, T, Q, V]."""
    return _running.get()(module, q, k, v, attention_mask, given), None


AttentionInterface.register(OURS, our_attention)


class Survey:
    """Stands in for attention in one forward, and notes what each layer asks of it."""

    def __init__(self, where: str, config: Any) -> None:
        self.where, self.config = where, config
        self.layers: dict[nn.Module, AttendedLayer] = {}

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]) -> Tensor:
        if module in self.layers:
            raise refusal(self.where, "a layer attends twice in a forward")
        if mask is not None:
            raise refusal(self.where, "it makes a mask of its own")
        for name, value in given.items():
            if name not in _HONOURED and value is not None and value not in _SAYS_NOTHING.get(name, ()):
                raise refusal(self.where, f"its attention has the argument {name}, which is not computed here")
        if not getattr(module, "is_causal", True):
            raise refusal(self.where, "it attends to later tokens")
        sizes = LayerSizes(q.shape[1], k.shape[1], k.shape[3], v.shape[3])
        index = len(self.layers)
        self.layers[module] = AttendedLayer(index, self.read(index, sizes.key_dim, given), sizes)
        return v.new_zeros(1, q.shape[2], sizes.heads, sizes.value_dim)

    def read(self, index: int, key_dim: int, given: dict[str, Any]) -> Attend:
        kinds, window = getattr(self.config, "layer_types", None), given.get("sliding_window")
        kind = kinds[index] if kinds else "full_attention"
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise refusal(self.where, f"layer_types has {kind!r}")
        if kind == "sliding_attention" and window is None:
            window = self.config.sliding_window
        reach, size = (Reach.CAUSAL, 0) if window is None else (Reach.WINDOW, int(window))
        if kind == "chunked_attention":
            reach, size = Reach.CHUNK, int(self.config.attention_chunk_size)
        scale, sinks = given.get("scaling"), given.get("s_aux")
        if not isinstance(sinks, nn.Parameter | None):
            raise refusal(self.where, "the sinks of its attention (s_aux) are no parameter")
        return Attend(
            float(key_dim**-0.5 if scale is None else scale), reach, size, float(given.get("softcap") or 0.0),
            None if sinks is None else sinks.detach().float().reshape(-1),
        )  # fmt: skip


class OurProduct(nn.Module):
    """An nn.Linear as our product."""

    def __init__(self, linear: nn.Linear, kernels: Kernels, kept: Matrix | None = None) -> None:
        """`kept` is the weight as it is stored, if it is quantised."""
        super().__init__()
        bias = None if linear.bias is None else linear.bias.data
        self.product: Linear = kernels.linear(kept._replace(bias=bias) if kept else dense(linear.weight.data, bias))
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Buffer(linear.weight.new_empty(0))  # some classes ask for its dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class OurNorm(nn.Module):
    """An RMSNorm as our kernel."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.weight, self.eps, self.norm = nn.Buffer(weight), eps, kernels.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


def _our_norm(module: nn.Module, kernels: Kernels) -> OurNorm | None:
    """Return a module as our norm, if it computes that: with its weight or 1 + it, which is tried."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, _ in module.named_parameters()]
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or names != ["weight"]:
        return None
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.ndim != 1:
        return None
    tried = deepcopy(module).cpu().float()
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, len(weight), generator=random), torch.rand(len(weight), generator=random) + 0.5
    tried.weight.data = w
    for plus in (0.0, 1.0):
        with torch.no_grad():
            want = torch.rms_norm(x, (len(w),), w + plus, eps)
            if torch.allclose(tried(x.clone()), want, rtol=1e-5, atol=1e-6):
                return OurNorm(weight.detach().float() + plus, eps, kernels)
    return None


def swap(net: nn.Module, kernels: Kernels, products: bool, kept: Mapping[nn.Module, Matrix] | None = None) -> None:
    """Replace RMSNorms, and linear layers if `products`, by our kernels, in place. `kept` are the weights of quantised
    ones."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            found: nn.Module | None = _our_norm(child, kernels)
            if products and type(child) is nn.Linear:
                matrix = (kept or {}).get(child)
                if matrix is not None:
                    matrix = matrix._replace(tensors=tuple(x.to(child.weight.device) for x in matrix.tensors))
                found = OurProduct(child, kernels, matrix)
            if found is not None:
                setattr(parent, name, found)


class _Output:
    """The result of a decoder: hidden states [1, T, hidden], and None for any other field."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, at: int) -> Tensor:
        assert at == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _Before(nn.Module):
    """Stands in for the decoder before a head: returns the hidden states given to it."""

    @property
    def decoder(self) -> Self:  # called by heads of models that were made as halves of others
        return self

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        assert self.hidden is not None
        return _Output(self.hidden)


class TransformersModel(PagedModel):
    """A decoder of transformers, on one device. Implements the `Model` protocol."""

    config: ModelConfig

    def __init__(
        self, net: Any, layers: dict[nn.Module, AttendedLayer], kernels: Kernels, max_model_len: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`net` is a causal LM whose attention is ours; `layers` has an entry for each of its attention modules."""
        self.kernels, self.max_model_len, self.device = kernels, max_model_len, net.device
        self.layers = {module: layer.on(net.device) for module, layer in layers.items()}
        self.base, self.head, self.before = base_of(net), copy(net), _Before()
        parts = net._modules.items()
        self.head._modules = {name: self.before if part is self.base else part for name, part in parts}
        self.vocab_size, self.dtype = net.config.vocab_size, dtype
        self.bounded, self.spare_layers = kernels.bounded, 0
        self.adapters: AdapterTables | None = None
        sizes = [layer.sizes for layer in layers.values()]
        self.heads, self.kv_heads = sizes[0].heads, sizes[0].kv_heads
        dim = max(max(one.key_dim, one.value_dim) for one in sizes)
        self.head_dim = dim + dim % 2
        self.cache_layers = len(layers)
        self.kv = KVLayout(KVFormat.AUTO, self.kv_heads, self.head_dim, dtype)
        self.identity = torch.cat((torch.ones(1, self.head_dim // 2), torch.zeros(1, self.head_dim // 2)), 1).to(
            net.device
        )

    def groups(self) -> tuple[PageGroup, ...]:
        """One page group: windows are masked."""
        return (PageGroup(),)

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Host decisions for this batch, from bounds alone."""
        return plan_attention(shape)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> Tensor:
        """Hidden states [T, hidden]; writes the KV of all T tokens."""
        attention = PagedAttention(self.kernels, inputs, plan, cache)
        ops = SeparateOps(self.identity, inputs.layer_rows(cache), 0.0, self.kernels, attention.forward)
        rotation = Rotation(None, 0.0, self.identity.expand(len(inputs.ids), -1))

        def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]) -> Tensor:
            place, how, sizes = self.layers[module]
            whole = torch.cat([self._widened(part) for part in (q, k, v)], dim=1)
            out = ops.attend(whole, rotation, place, how).view(1, -1, self.heads, self.head_dim)
            return out if sizes.value_dim == self.head_dim else out[..., : sizes.value_dim]

        # An inert row's position may be past the end.
        positions = inputs.positions.clamp(max=self.max_model_len - 1)
        return run(self.base, attend, inputs.ids, positions)

    def _widened(self, x: Tensor) -> Tensor:
        """[1, heads, T, D] -> [T, heads, head_dim], zeros right."""
        x = x[0].transpose(0, 1)
        missing = self.head_dim - x.shape[2]
        return pad(x, (0, missing)) if missing else x

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab], in the model's dtype, by the class's own code after its decoder."""
        self.before.hidden = hidden[None]
        found: Tensor = self.head(inputs_embeds=self.before.hidden, use_cache=False).logits[0]
        self.before.hidden = None
        return found.to(self.dtype)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `logits(hidden)` to `out`."""
        out.copy_(self.logits(hidden))

    def first_layers(self) -> Self:
        """The model cut after its first layers of every kind. The weights are the same."""
        model = copy(self)
        model.base = cut(self.base, len(self.layers), first_of_every_kind(self.base, self.layers))
        return model


def run(base: nn.Module, attend: Callable[..., Tensor], ids: Tensor, positions: Tensor) -> Tensor:
    """Run a decoder with such attention for tokens [T] at positions [T]: hidden states [T, hidden]."""
    token = _running.set(attend)
    try:
        found: Tensor = base(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0][0]
    finally:
        _running.reset(token)
    return found


def _layer_lists(base: nn.Module, count: int) -> list[nn.ModuleList]:
    return [part for part in base.modules() if isinstance(part, nn.ModuleList) and len(part) == count]


def first_of_every_kind(base: nn.Module, layers: dict[nn.Module, AttendedLayer]) -> int:
    """Return how many first layers have every kind of them."""
    blocks, kinds = _layer_lists(base, len(layers)), []
    for index, (module, layer) in enumerate(layers.items()):
        parts = [part for blocks_of in blocks[:1] for part in blocks_of[index].modules()]
        shapes = [(type(part).__name__, [tuple(p.shape) for p in part.parameters(recurse=False)]) for part in parts]
        flags = [(k, v) for k, v in vars(module).items() if isinstance(v, int) and k not in ("layer_idx", "training")]
        kinds.append(repr((shapes, flags, layer.sizes, layer.attend[:4], layer.attend.sinks is None)))
    return max(kinds.index(kind) for kind in kinds) + 1


def cut(module: nn.Module, layers: int, count: int) -> nn.Module:
    """Return a decoder of as many `layers` cut to its first `count`, over the same weights."""
    if isinstance(module, nn.ModuleList) and len(module) == layers:
        return nn.ModuleList(list(module)[:count])
    children = {name: child and cut(child, layers, count) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    found = copy(module)
    found._modules = children
    return found


def survey(net: Any, where: str) -> dict[nn.Module, AttendedLayer]:
    """Return the layers of attention modules in the order of a forward. Raises CheckpointError for a request that
    is not computed here."""
    asked = Survey(where, net.config)
    base = base_of(net)
    names = inspect.signature(base.forward).parameters
    if base is net or "position_ids" not in names:
        raise refusal(where, "its decoder takes no position_ids")
    ids = tokens(net.config.vocab_size, net.device)[:2]
    run(base, asked, ids, torch.arange(2, device=net.device))
    layers = asked.layers
    if len(layers) != net.config.num_hidden_layers or not _layer_lists(base, len(layers)):
        raise refusal(where, f"{len(layers)} of its {net.config.num_hidden_layers} layers have attention")
    if len({layer.sizes[:2] for layer in layers.values()}) != 1:
        raise refusal(where, "its layers differ in their numbers of heads")
    return layers
