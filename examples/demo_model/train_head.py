"""Trains an EAGLE-3 head for the demo model: `python -m examples.demo_model.train_head --out DIR [--steps N]`.

DIR gets config.json, model.safetensors and MODEL_CARD.md, the files of `gapless/demo/eagle3/`. The head learns to draft
what the demo model says next in answers of its own tasks, several tokens ahead, as far as all drafts before were right.
The seed and the number of threads decide every step.
"""

import argparse
import json
import textwrap
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from examples.demo_model.batches import IGNORED, Batch, batches
from examples.demo_model.card import processor
from examples.demo_model.documents import Conversation
from examples.demo_model.evaluate import as_chat
from examples.demo_model.head import LAYERS, Chains, Head, head_config, hidden_of
from examples.demo_model.network import Network, Shape, restore
from examples.demo_model.optimizer import Muon
from examples.demo_model.problems import FAMILIES, LATE_MIX, MIX, held_out_problems, training_text
from examples.demo_model.train import rate_scale
from gapless.demo import weights_dir

STEPS = 1400
BATCH_TOKENS = 2560
DRAFTS = 5
WEIGHT = 0.8
"""What a draft counts for beside the one before it."""
RATE = 4e-3
FORGOTTEN = 0.01
"""Share of positions whose hidden states are left out, as the engine has none before the end of a cached prefix."""
VOCABULARY_DOCUMENTS = 6000
LONGEST_DRAFT = 8
TEMPLATE = Path(__file__).with_name("head_card.md")


def demo_network(directory: Path) -> tuple[Network, Tokenizer]:
    """The demo model, not to be trained."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    network = Network(Shape(tokenizer.get_vocab_size())).requires_grad_(False)
    restore(network, load_file(str(directory / "model.safetensors")))
    return network, tokenizer


def text(seed: int) -> Iterator[Conversation]:
    """Training documents of the two mixes of the demo model's later training, in turn."""
    for pair in zip(training_text(seed, lambda: MIX), training_text(seed + 1, lambda: LATE_MIX), strict=True):
        yield from pair


def answer_tokens(stream: Iterator[Batch], documents: int, vocabulary: int) -> Tensor:
    """The tokens that answers have, ascending."""
    seen, count = torch.zeros(vocabulary, dtype=torch.bool), 0
    while count < documents:
        batch = next(stream)
        seen[batch.targets[batch.targets != IGNORED]] = True
        count += len(batch.ids)
    return seen.nonzero()[:, 0]


def chains_of(batch: Batch) -> Chains:
    """Chains from every position whose next token is the model's to write."""
    learned = batch.targets != IGNORED
    most = int(learned.sum(1).max())
    at = learned.int().argsort(dim=1, descending=True, stable=True)[:, :most]
    return Chains(at, learned.gather(1, at))


def targets_of(head: Head, batch: Batch, best: Tensor, chains: Chains, drafts: int) -> list[Tensor]:
    """What each draft should be, as an index of the draft vocabulary: the model's own choice, where answers go on.

    IGNORED for others, and for tokens that the head cannot draft.
    """
    index = torch.full((head.shape.vocab,), IGNORED)
    index[head.tokens] = torch.arange(len(head.tokens))
    wanted = torch.where(batch.targets != IGNORED, index[best], IGNORED)
    right = F.pad(batch.targets == best, (0, drafts))
    wanted, going, found = F.pad(wanted, (0, drafts), value=IGNORED), chains.there, []
    for draft in range(drafts):
        at = chains.at + draft
        found.append(torch.where(going, wanted.gather(1, at), IGNORED))
        going = going & right.gather(1, at)  # the text goes on as the model would
    return found


def loss_of(head: Head, network: Network, batch: Batch) -> Tensor:
    """Mean cross entropy of a draft, weighted by its place."""
    hidden, chains = hidden_of(network, batch.ids), chains_of(batch)
    kept = torch.rand(*batch.ids.shape, 1) >= FORGOTTEN
    logits = head.unrolled(batch.ids, hidden.states * kept, chains, DRAFTS)
    targets = targets_of(head, batch, hidden.best, chains, DRAFTS)
    losses = [
        WEIGHT**place * F.cross_entropy(some[wanted != IGNORED], wanted[wanted != IGNORED])
        for place, (some, wanted) in enumerate(zip(logits, targets, strict=True))
    ]
    return torch.stack(losses).sum()


def train(head: Head, network: Network, stream: Iterator[Batch], steps: int) -> float:
    """Train for a number of steps; return a running mean of the loss."""
    muon = Muon(list(head.mats.values()), RATE, decay=0.0)
    others = [head.norm, head.lm_head, *head.scales.values()]
    adam = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
    mean, begun = 0.0, time.monotonic()
    for step, batch in enumerate(islice(stream, steps), 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(head, network, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        scale = rate_scale(step / steps)
        muon.step(scale)
        adam.param_groups[0]["lr"] = RATE / 2 * scale
        adam.step()
        head.zero_grad(set_to_none=True)
        mean = float(loss.detach()) if step == 1 else 0.95 * mean + 0.05 * float(loss.detach())
        if step % 10 == 0:
            print(f"step {step}  {time.monotonic() - begun:.0f} s  loss {mean:.3f}", flush=True)
    return mean


@torch.no_grad()
def acceptance(head: Head, network: Network, stream: Iterator[Batch], count: int) -> list[float]:
    """How often each draft is right, and all before it too, over the places of `count` batches."""
    right, places = torch.zeros(LONGEST_DRAFT), torch.zeros(LONGEST_DRAFT)
    for batch in islice(stream, count):
        hidden, chains = hidden_of(network, batch.ids), chains_of(batch)
        logits = head.unrolled(batch.ids, hidden.states, chains, LONGEST_DRAFT)
        learned = F.pad(batch.targets != IGNORED, (0, LONGEST_DRAFT))
        wanted = F.pad(batch.targets, (0, LONGEST_DRAFT), value=IGNORED)
        good = chains.there
        counted = chains.there
        for place, some in enumerate(logits):
            counted = counted & learned.gather(1, chains.at + place)
            good = good & (head.tokens[some.argmax(-1)] == wanted.gather(1, chains.at + place))
            right[place] += int((good & counted).sum())
            places[place] += int(counted.sum())
    return (right / places.clamp(min=1)).tolist()


def held_out_text(family: str, count: int) -> Iterator[Conversation]:
    """Problems that are never trained on, with their answers."""
    while True:
        for problem in held_out_problems(family, count, 0):
            asked = as_chat(problem)
            yield Conversation((*asked.messages, ("assistant", problem.answer)), asked.tools)


def report(head: Head, network: Network, tokenizer: Tokenizer, batches_of_each: int) -> dict[str, list[float]]:
    """The acceptance by position, for each family of held-out problems; printed too."""
    found = {}
    for family in FAMILIES:
        stream = batches(tokenizer, held_out_text(family, 100), 0, BATCH_TOKENS)
        found[family] = acceptance(head, network, stream, batches_of_each)
        print(f"{family:12}", " ".join(f"{share:.2f}" for share in found[family]), flush=True)
    return found


def card(head: Head, options: argparse.Namespace, run: tuple[float, float], shares: dict[str, list[float]]) -> str:
    """The text of MODEL_CARD.md; `run` is the loss at the end, and the seconds."""
    command = f"python -m examples.demo_model.train_head --out DIR --steps {options.steps} --seed {options.seed}"
    about = (
        f"`{command} --threads {options.threads}`: batches of at most {BATCH_TOKENS:,} tokens, in {run[1]:.0f} s on "
        f"{processor()}; loss {run[0]:.2f} at the end, cross entropies of the drafts weighted by {WEIGHT} a place."
    )
    return TEMPLATE.read_text(encoding="utf-8").format(
        parameters=sum(weight.numel() for weight in head.parameters()) / 1e6,
        layers="{}, {} and {}".format(*LAYERS),
        tokens=len(head.tokens),
        drafts=DRAFTS,
        run=textwrap.fill(about, 120),
        shares="\n".join(
            f"| {name} | " + " | ".join(f"{x:.2f}" for x in found) + " |" for name, found in shares.items()
        ),
    )


def save(head: Head, directory: Path) -> None:
    """Write a checkpoint directory."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = head_config(head.shape, len(head.tokens))
    (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(head.export(torch.float16), str(directory / "model.safetensors"), metadata={"format": "pt"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the head")
    parser.add_argument("--model", type=Path, default=weights_dir())
    parser.add_argument("--steps", type=int, default=STEPS, help="updates; the learning rate follows them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    network, tokenizer = demo_network(options.model)
    tokens = answer_tokens(batches(tokenizer, text(0), 0, BATCH_TOKENS), VOCABULARY_DOCUMENTS, network.shape.vocab)
    head = Head(network, tokens)
    print(f"{len(tokens)} tokens to draft, {sum(weight.numel() for weight in head.parameters()):,} parameters")
    begun = time.monotonic()
    loss = train(head, network, batches(tokenizer, text(options.seed), options.seed, BATCH_TOKENS), options.steps)
    seconds = time.monotonic() - begun
    save(head, options.out)
    print(f"loss {loss:.3f}; drafts that are right together with all before them, by place, on held-out problems:")
    shares = report(head, network, tokenizer, 4)
    (options.out / "MODEL_CARD.md").write_text(card(head, options, (loss, seconds), shares), encoding="utf-8")


if __name__ == "__main__":
    main()
