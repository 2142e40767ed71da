"""The training of the demo model's head, and how often the packaged one is right."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file

from examples.demo_model import train_head
from examples.demo_model.batches import Batch, batches
from examples.demo_model.head import Head, hidden_of, restore_head
from examples.demo_model.network import Network, Shape
from gapless.demo import head_dir, weights_dir

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = Shape(vocab=64, width=32, layers=6, heads=4, kv_heads=2, head=8, inner=48)


def repeats() -> Batch:
    """Rows that say three tokens over and over; the model's own choices play no part in what a head can learn here."""
    ids = torch.tensor([([a, a + 1, a + 2] * 8)[:20] for a in range(5, 13)])
    return Batch(ids[:, :-1], ids[:, 1:])


def test_the_loss_falls_with_a_few_steps_of_training(monkeypatch):
    torch.manual_seed(3)
    network = Network(TINY).requires_grad_(False)
    monkeypatch.setattr(train_head, "hidden_of", lambda net, ids: hidden_of(net, ids)._replace(best=repeats().targets))
    head, batch = Head(network, torch.arange(5, 20)), repeats()
    with torch.no_grad():
        before = train_head.loss_of(head, network, batch)
    train_head.train(head, network, itertools.repeat(batch), 8)
    with torch.no_grad():
        assert train_head.loss_of(head, network, batch) < before
    shares = train_head.acceptance(head, network, itertools.repeat(batch), 1)
    assert sorted(shares, reverse=True) == shares


def test_a_head_is_saved_under_the_names_of_the_field(tmp_path):
    head = Head(Network(TINY), torch.tensor([1, 2, 3, 10, 63]))
    train_head.save(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert sorted(tensors) == sorted(load_file(head_dir() / "model.safetensors"))
    assert tensors["d2t"].tolist() == [1, 1, 1, 7, 59]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [1, 2, 3, 10, 63]


@pytest.mark.seeds
def test_the_packaged_head_is_mostly_right_on_held_out_problems():
    network, tokenizer = train_head.demo_network(weights_dir())
    tensors = load_file(head_dir() / "model.safetensors")
    head = restore_head(network, tensors)
    stream = batches(tokenizer, train_head.held_out_text("arithmetic", 20), 0, 1024)
    shares = train_head.acceptance(head, network, stream, 1)
    assert shares[0] > 0.8 and shares[3] > 0.5
