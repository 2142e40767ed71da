"""The training of the demo model, and what the packaged weights answer."""

import argparse
import json
import re
import sys
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from sharpest import sharpest

from examples.demo_model import evaluate, train
from examples.demo_model.batches import IGNORED, Batch, batches
from examples.demo_model.decode import Decoder, prompt_text
from examples.demo_model.documents import Conversation
from examples.demo_model.evaluate import as_chat, as_plain, replies
from examples.demo_model.judge import is_right
from examples.demo_model.network import Network, Shape, export, hugging_face_config, restore
from examples.demo_model.optimizer import Optimizer, orthogonal
from examples.demo_model.problems import held_out_problems, training_text
from examples.demo_model.tokenizer import segments
from examples.demo_model.train import rate_scale, train_step, write_questions
from gapless.demo import weights_dir

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
TINY = Shape(vocab=64, width=32, layers=2, heads=4, kv_heads=2, head=16, inner=48)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(weights_dir())


def test_transformers_gives_the_same_logits(decoder):
    model = transformers.Qwen3ForCausalLM.from_pretrained(weights_dir(), dtype=torch.float32)
    ids = torch.tensor([decoder.tokenizer.encode("Mia has 24 apples. 你好 <|im_end|> What is a fence? " * 4).ids])
    with torch.no_grad():
        theirs = model(ids).logits
        ours = decoder.network.logits(decoder.network(ids, torch.float32))
    assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-4


@pytest.mark.seeds
def test_the_decoder_writes_what_transformers_writes(decoder):
    model = transformers.Qwen3ForCausalLM.from_pretrained(weights_dir(), dtype=torch.float32)
    questions = ["What is 48 + 37?", "Hello", "What is a fence?"]
    prompts = [prompt_text(Conversation((("user", question),))) for question in questions]
    for prompt, reply in zip(prompts, decoder.greedy(prompts, 60), strict=True):
        ids = torch.tensor([decoder.tokenizer.encode(prompt).ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60)
        assert decoder.text_of(out[0, ids.shape[1] :].tolist()) == reply


# A model at the promised 90 % would fail one of these once in ninety tries; the packaged one is better than that.
@pytest.mark.parametrize(
    ("family", "form"),
    sharpest([("extraction", as_chat), ("arithmetic", as_chat), ("arithmetic", as_plain), ("tool_call", as_chat)]),
)
def test_held_out_problems_are_solved(decoder, family, form):
    problems = held_out_problems(family, 20, seed=1)
    right = [is_right(p, reply) for p, reply in zip(problems, replies(decoder, problems, form), strict=True)]
    assert sum(right) >= 15


def test_the_trained_model_says_what_gapless_is(decoder):
    prompt = prompt_text(Conversation((("user", "What is gapless?"),)))
    assert "inference and serving engine" in decoder.greedy([prompt])[0]


@pytest.mark.seeds
def test_padding_does_not_change_a_reply(decoder):
    prompts = [prompt_text(Conversation((("user", q),))) for q in ("Hi", "What is 7 * 8?", "Leo has 12 cups. " * 8)]
    assert decoder.greedy(prompts, 40) == [decoder.greedy([prompt], 40)[0] for prompt in prompts]


def test_export_and_restore_are_inverse():
    first, second = Network(TINY), Network(TINY)
    restore(second, export(first, torch.float32))
    for left, right in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right)
    with pytest.raises(KeyError):
        restore(second, {"model.embed_tokens.weight": first.embedding})


def test_the_config_and_the_weights_agree():
    config = json.loads((weights_dir() / "config.json").read_text())
    shape = Shape(config["vocab_size"])
    assert config == hugging_face_config(shape, config["eos_token_id"], config["pad_token_id"])
    stored = load_file(weights_dir() / "model.safetensors")
    fresh = export(Network(shape), torch.float32)
    assert {name: t.shape for name, t in stored.items()} == {name: t.shape for name, t in fresh.items()}
    assert all(torch.isfinite(tensor).all() for tensor in stored.values())


@pytest.mark.seeds
def test_a_tiny_network_learns():
    torch.manual_seed(0)
    network = Network(TINY)
    optimizer = Optimizer(network, 1e-2)
    ids = torch.randint(0, 64, (4, 16))
    batch = Batch(ids[:, :-1], ids[:, 1:])
    losses = [train_step(network, optimizer, [batch], 1.0, torch.device("cpu")) for _ in range(30)]
    assert losses[-1] < losses[0] / 2


def test_only_what_the_model_writes_is_learned(decoder):
    batch = next(batches(decoder.tokenizer, training_text(0), 0, 1024))
    assert batch.ids.numel() <= 1024
    learned = batch.targets != IGNORED
    assert torch.equal(batch.targets[:, :-1][learned[:, :-1]], batch.ids[:, 1:][learned[:, :-1]])
    # Every document asks something first, and nothing that was asked is learned.
    assert not learned[:, 0].any()
    assert learned.any(1).all()


def test_the_rate_rises_then_falls_to_zero():
    scales = [rate_scale(i / 1000) for i in range(1001)]
    peak = scales.index(max(scales))
    assert scales[0] < 0.05
    assert peak <= 30
    assert scales[peak] > 0.95
    assert all(a >= b for a, b in zip(scales[peak:], scales[peak + 1 :], strict=False))
    assert scales[-1] == 0.0


def test_the_matrix_update_is_nearly_orthogonal():
    torch.manual_seed(0)
    for rows, columns in ((16, 48), (48, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(3, rows, columns)))
        assert values.min() > 0.4
        assert values.max() < 1.4


def test_the_template_writes_what_the_model_was_trained_on(decoder):
    template = transformers.AutoTokenizer.from_pretrained(weights_dir())
    checked = 0
    for document in islice(training_text(9), 300):
        if document.plain:
            continue
        messages = [{"role": role, "content": content} for role, content in document.messages]
        rendered = template.apply_chat_template(messages, tools=list(document.tools) or None, tokenize=False)
        pieces = [text for text, _ in segments(document)]
        assert rendered == "".join(pieces)
        whole = decoder.tokenizer.encode(rendered).ids
        assert whole == [i for piece in pieces for i in decoder.tokenizer.encode(piece).ids]
        checked += 1
    assert checked > 200


@pytest.mark.seeds
def test_the_packaged_questions_are_those_that_the_generator_holds_out(tmp_path):
    write_questions(tmp_path / "questions.jsonl")
    assert (tmp_path / "questions.jsonl").read_text() == (weights_dir().parent / "questions.jsonl").read_text()


@pytest.mark.process
def test_one_command_writes_weights_questions_and_a_card_with_its_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "SUITES", {"repeat": evaluate.SUITES["repeat, held out"]})
    monkeypatch.setattr(train, "TOKENIZER_DOCUMENTS", 3000)
    monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path), "--steps", "2", "--seed", "3", "--n", "1"])
    train.main()
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {path.name for path in weights_dir().iterdir()}
    assert Decoder(tmp_path / "weights").network.shape == Shape(train.VOCABULARY)
    assert (tmp_path / "questions.jsonl").stat().st_size > 0
    text = (tmp_path / "MODEL_CARD.md").read_text()
    assert "--steps 2 --seed 3 --threads 1 --device cpu" in text and "| repeat | 0.0% (0 of 1) |" in text
    assert re.search(r"0\.00 million tokens.* in \d+ s on .*; loss \d\.\d{3} nats", text, re.DOTALL)


@pytest.mark.seeds
def test_the_same_seed_trains_the_same_network(decoder):
    options = argparse.Namespace(seed=5, steps=3, device="cpu", threads=1)
    networks = []
    for _ in range(2):
        torch.manual_seed(5)
        networks.append(Network(Shape(train.VOCABULARY, width=32, layers=1, heads=2, kv_heads=1, head=16, inner=32)))
        assert train.train(networks[-1], decoder.tokenizer, options).steps == 3
    first, second = (dict(network.named_parameters()) for network in networks)
    assert all(torch.equal(first[name], second[name]) for name in first)
