"""Trains the demo model: `python -m gapless.demo.train --out DIR [--minutes 60] [--device cpu|cuda]`."""

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gapless.demo.batches import IGNORED, Batch, batches
from gapless.demo.evaluate import report
from gapless.demo.network import Network, Shape, export, hugging_face_config, restore
from gapless.demo.optimizer import Optimizer
from gapless.demo.problems import mix_at, training_text
from gapless.demo.tokenizer import end_ids, save_tokenizer, segments, train_tokenizer

VOCABULARY = 2048
TOKENIZER_DOCUMENTS = 20000
BATCH_TOKENS = 2048
BATCHES_A_STEP = 2
RATE = 2.5e-3
WARM_UP = 0.02
SAVE_SECONDS = 120.0


def rate_scale(progress: float) -> float:
    """Learning-rate factor at a share of the time in [0, 1]: a short rise, then a straight line to zero."""
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


class Clock:
    """How far a run of `seconds` has come. Time leads, not a number of steps, because the machine may be shared."""

    def __init__(self, seconds: float) -> None:
        self.begun, self.seconds = time.monotonic(), seconds

    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begun

    def progress(self) -> float:
        """The share of the time that has gone, from 0."""
        return self.spent() / self.seconds


def _report(step: int, tokens: int, loss: float, clock: Clock) -> None:
    speed = tokens / clock.spent()
    print(
        f"{clock.progress():.1%}  step {step}  {tokens / 1e6:.2f} M tokens  {speed:.0f} a second  loss {loss:.4f}",
        flush=True,
    )


def train(network: Network, tokenizer: Tokenizer, options: argparse.Namespace) -> int:
    """Trains until the time is up; returns the number of tokens seen, padding included."""
    device, clock = torch.device(options.device), Clock(60 * options.minutes)
    text = training_text(options.seed, lambda: mix_at(clock.progress()))
    stream = batches(tokenizer, text, options.seed, BATCH_TOKENS)
    optimizer = Optimizer(network, options.rate)
    saved = time.monotonic()
    tokens = step = 0
    mean = 0.0
    while (progress := clock.progress()) < 1:
        group = list(islice(stream, BATCHES_A_STEP))
        loss = train_step(network, optimizer, group, rate_scale(progress), device)
        tokens, step = tokens + sum(batch.ids.numel() for batch in group), step + 1
        mean = loss if step == 1 else 0.95 * mean + 0.05 * loss
        if step % 100 == 0:
            _report(step, tokens, mean, clock)
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            save(network, tokenizer, options.out / "checkpoint", torch.float32)
    return tokens


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the trained model")
    parser.add_argument("--minutes", type=float, default=60.0, help="training time; the learning rate follows it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--start", type=Path, help="directory of a checkpoint to go on from")
    return parser.parse_args()


def main() -> None:
    """Trains, writes the directory, and measures it."""
    options = parse()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    network = Network(Shape(VOCABULARY))
    tokenizer = make_tokenizer(0)
    if options.start:
        tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
        restore(network, load_file(str(options.start / "model.safetensors")))
    network.to(options.device)
    tokens = train(network, tokenizer, options)
    save(network, tokenizer, options.out, torch.float16)
    print(f"{tokens / 1e6:.1f} M tokens; written to {options.out}", flush=True)
    report(options.out, n=100, seed=0, show=0)


if __name__ == "__main__":
    main()
