"""The torch backend on CUDA against the same weights on the CPU, and the whole forward in one CUDA graph."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

from paging_driver import CPU, VOCAB, Driver, Sequence, load, prompt, relative_error

SIZES = tiny_config(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=8,
    head_dim=64,
    max_position_embeddings=4096,
)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return tmp_path


def run(model, device, page_size):
    """Chunks, continued chunks over several query tiles, decode and inert rows; all logits in order."""
    driver = Driver(model, pages=400, page_size=page_size, device=device)
    first, second, third = Sequence(), Sequence(), Sequence()
    found = driver.step(chunks=[(first, prompt(50)), (second, prompt(17))])
    found += driver.step(decode=[(second, 3)], chunks=[(first, prompt(1100)), (third, prompt(1))], inert=2, slack=5)
    found += driver.step(decode=[(first, 1), (second, 2), (third, 3)], inert=1, slack=9)
    return torch.cat(found)


@pytest.mark.parametrize("page_size", (5, 16))
@pytest.mark.parametrize(("dtype", "limit"), (("float32", 1e-4), ("bfloat16", 0.05), ("float16", 0.01)))
def test_cuda_equals_the_cpu(directory, dtype, limit, page_size):
    cuda = torch.device("cuda")
    want = run(load(directory, load_format="dummy", dtype="float32"), CPU, page_size)
    got = run(load(directory, cuda, load_format="dummy", dtype=dtype), cuda, page_size)
    assert relative_error(got, want) < limit


def test_a_decode_step_is_one_graph(directory):
    """Replayed after its tables changed in place, a captured forward gives what an eager one gives."""
    cuda = torch.device("cuda")
    model = load(directory, cuda, load_format="dummy", dtype="bfloat16")
    driver, rows = Driver(model, device=cuda), [Sequence() for _ in range(3)]
    driver.step(chunks=[(row, prompt(length)) for row, length in zip(rows, (5, 40, 31), strict=True)])
    shape, inputs = driver.batch([(row, 7) for row in rows], slack=20)
    plan = model.plan(shape)
    model.logits(model.forward(inputs, plan, driver.cache))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model.logits(model.forward(inputs, plan, driver.cache))
    for _ in range(3):
        _, after = driver.batch([(row, 9) for row in rows], slack=20)
        width = min(inputs.columns, after.columns)
        inputs.page_table.zero_()
        inputs.page_table[:, :width] = after.page_table[:, :width]
        for name in ("ids", "positions", "slots", "kv_lens", "rows"):
            getattr(inputs, name).copy_(getattr(after, name))
        graph.replay()
        want = model.logits(model.forward(inputs, plan, driver.cache))
        assert relative_error(captured, want) < 1e-2
