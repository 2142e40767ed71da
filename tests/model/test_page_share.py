"""Where the layers of a draft model are in the pages of its model, whatever the shapes of both."""

from __future__ import annotations

import math

import pytest
import torch
from specs import resized

from gapless.demo import weights_dir
from gapless.kernels.kv import KVFormat, KVLayout
from gapless.model.config import read_model_config
from gapless.model.drafting.draft_model import PageShare
from gapless.model.seam import KVCache

DEMO = read_model_config(weights_dir())
SHAPES = [(4, 2, 16), (3, 1, 32), (5, 3, 16), (1, 8, 64), (2, 4, 8), (7, 5, 24)]
"""(layers, heads of keys, their size)"""


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("draft", SHAPES)
@pytest.mark.parametrize("kind", KVFormat)
def test_layers_of_two_models_share_pages_without_a_byte_in_common(model, draft, kind):
    large, small = (
        resized(DEMO, layers, heads=heads, kv_heads=heads, head_dim=size) for layers, heads, size in (model, draft)
    )
    share, drafted, own_layers = (
        PageShare.of(large.spec, small.spec, kind),
        small.spec.layer.attention,
        len(small.spec.layers),
    )
    layers, heads, size = model
    layout = KVLayout(kind, heads, size, torch.float32)
    cache = KVCache.of(layout.shape(3, layers + share.spare, 4), layout.stored, torch.device("cpu"))
    own_layout = KVLayout(kind, drafted.kv_heads, drafted.head_dim, torch.float32)
    whole, view = cache.data.view(torch.uint8), share.view(cache, torch.ones(9, 2))
    assert view.data.shape[2:] == own_layout.shape(1, 1, 4)[2:] and view.data.data_ptr() == whole.data_ptr()
    assert view.scales is not None
    own = view.data.view(torch.uint8)[:, share.first : share.first + own_layers]
    assert own.shape[1] == own_layers
    own.fill_(1)
    assert not whole[:, :layers].any() and whole.sum() == own.numel()
    wide, narrow = layout.layer_bytes(4), own_layout.layer_bytes(4)
    assert whole[0].numel() - layers * wide - own_layers * narrow < math.lcm(wide, narrow) + narrow
