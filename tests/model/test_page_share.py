"""Where the layers of a draft model are in the pages of its model, whatever the shapes of both."""

from __future__ import annotations

import math

import pytest
import torch
from specs import resized

from gapless.demo import weights_dir
from gapless.model.config import read_model_config
from gapless.model.drafting.draft_model import PageShare
from gapless.model.seam import KVCache

DEMO = read_model_config(weights_dir())
SHAPES = [(4, 2, 16), (3, 1, 32), (5, 3, 16), (1, 8, 64), (2, 4, 8), (7, 5, 24)]
"""(layers, heads of keys, their size)"""


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("draft", SHAPES)
def test_layers_of_two_models_share_pages_without_a_byte_in_common(model, draft):
    large, small = (
        resized(DEMO, layers, heads=heads, kv_heads=heads, head_dim=size) for layers, heads, size in (model, draft)
    )
    share, drafted, own_layers = PageShare.of(large, small), small.spec.layer.attention, len(small.spec.layers)
    layers, heads, size = model
    cache = KVCache.zeros(3, layers + share.spare, 4, heads, size, dtype=torch.float32, device=torch.device("cpu"))
    view = share.view(cache).data
    assert view.shape[3:] == (4, drafted.kv_heads, drafted.head_dim) and view.data_ptr() == cache.data.data_ptr()
    own = view[:, share.first : share.first + own_layers]
    assert own.shape[1] == own_layers
    own.fill_(1)
    assert not cache.data[:, :layers].any() and cache.data.sum() == own.numel()
    page = cache.data[0].numel()
    used = 2 * 4 * (layers * heads * size + own_layers * drafted.kv_heads * drafted.head_dim)
    wide, narrow = heads * size, drafted.kv_heads * drafted.head_dim
    assert page - used < 2 * 4 * (math.lcm(wide, narrow) + narrow)
