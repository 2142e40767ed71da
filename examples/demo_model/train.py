"""Trains the demo model from scratch: `python -m examples.demo_model.train --out DIR [--steps N] [--device cuda]`.

DIR gets `weights/`, `questions.jsonl` and `MODEL_CARD.md`, the files of `gapless/demo/`.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer

from examples.demo_model.batches import IGNORED, Batch, batches
from examples.demo_model.card import Run, card, processor
from examples.demo_model.evaluate import report
from examples.demo_model.network import Network, Shape, export, hugging_face_config
from examples.demo_model.optimizer import Optimizer
from examples.demo_model.problems import held_out, mix_at, training_text
from examples.demo_model.tokenizer import end_ids, save_tokenizer, segments, train_tokenizer

VOCABULARY = 2048
TOKENIZER_DOCUMENTS = 20000
BATCH_TOKENS = 1024
BATCHES_A_STEP = 2
STEPS = 11000
RATE = 2.5e-3
WARM_UP = 0.02
QUESTIONS = 1000


def rate_scale(progress: float) -> float:
    """Learning-rate factor at a share of the steps in [0, 1]: a short rise, then a straight line to zero."""
    return min(1.0, progress / WARM_UP + 0.01, max(0.0, (1 - progress) / (1 - WARM_UP)))


def make_tokenizer(seed: int) -> Tokenizer:
    """The tokenizer of the first documents of the training text."""
    documents = islice(training_text(seed), TOKENIZER_DOCUMENTS)
    return train_tokenizer(("".join(text for text, _ in segments(document)) for document in documents), VOCABULARY)


def loss_sum(network: Network, batch: Batch, device: torch.device) -> torch.Tensor:
    """Sum of the cross entropy over the learned tokens; logits are computed for those alone."""
    hidden = network(batch.ids.to(device), torch.bfloat16)
    targets = batch.targets.to(device)
    learned = targets != IGNORED
    return F.cross_entropy(network.logits(hidden[learned]), targets[learned], reduction="sum")


def train_step(network: Network, optimizer: Optimizer, group: list[Batch], scale: float, device: torch.device) -> float:
    """One update over a group of batches; returns the mean loss per learned token."""
    count = sum(int((batch.targets != IGNORED).sum()) for batch in group)
    total = torch.zeros((), device=device)
    for batch in group:
        loss = loss_sum(network, batch, device) / count
        torch.autograd.backward(loss)
        total += loss.detach()
    optimizer.step(scale)
    return float(total)


def save(network: Network, tokenizer: Tokenizer, directory: Path, dtype: torch.dtype) -> None:
    """Writes a Hugging Face model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    eos = end_ids(tokenizer)
    settings = hugging_face_config(network.shape, eos, eos[1])
    generation = {"eos_token_id": eos, "pad_token_id": eos[1], "do_sample": False}
    for name, record in (("config.json", settings), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, directory, network.shape.context)
    weights = {name: tensor.cpu() for name, tensor in export(network, dtype).items()}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


def write_questions(path: Path) -> None:
    """The held-out arithmetic problems, one JSON object a line, which `gapless eval` asks."""
    rows = [{"question": question, "answer": answer} for question, answer in held_out(QUESTIONS, 0)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(network: Network, tokenizer: Tokenizer, options: argparse.Namespace) -> Run:
    """Trains for `options.steps` steps; the seed and the number of threads decide every one of them."""
    device, begun = torch.device(options.device), time.monotonic()
    tokens = step = 0
    mean = 0.0
    text = training_text(options.seed, lambda: mix_at(step / options.steps))
    stream = batches(tokenizer, text, options.seed, BATCH_TOKENS)
    optimizer = Optimizer(network, RATE)
    for step in range(1, options.steps + 1):
        group = list(islice(stream, BATCHES_A_STEP))
        loss = train_step(network, optimizer, group, rate_scale(step / options.steps), device)
        tokens += sum(batch.ids.numel() for batch in group)
        mean = loss if step == 1 else 0.95 * mean + 0.05 * loss
        if step % 50 == 0:
            speed = tokens / (time.monotonic() - begun)
            print(f"step {step}  {tokens / 1e6:.2f} M tokens  {speed:.0f} a second  loss {mean:.4f}", flush=True)
    seconds = time.monotonic() - begun
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return Run(options.seed, options.steps, tokens, mean, seconds, options.threads, options.device, machine)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the weights, the questions and the card")
    parser.add_argument("--steps", type=int, default=STEPS, help="updates; the learning rate follows them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--n", type=int, default=300, help="held-out problems of each suite of the card")
    return parser.parse_args()


def main() -> None:
    """Trains, writes the directory, and measures it."""
    options = parse()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    network = Network(Shape(VOCABULARY))
    tokenizer = make_tokenizer(0)
    network.to(options.device)
    run = train(network, tokenizer, options)
    save(network, tokenizer, options.out / "weights", torch.float16)
    write_questions(options.out / "questions.jsonl")
    scores = report(options.out / "weights", n=options.n, seed=0, show=0)
    (options.out / "MODEL_CARD.md").write_text(card(run, scores), encoding="utf-8")


if __name__ == "__main__":
    main()
