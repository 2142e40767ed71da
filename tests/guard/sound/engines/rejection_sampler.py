"""Sampling as a serving engine does it: penalties, top-k, top-p and rejection of drafts for all rows at once.

Parameters are packed into one pinned row for each request when it begins; no step reads anything back.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

ROWS, VOCAB, DRAFTS, STEPS = 4, 32, 3, 6


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = VOCAB
    top_p: float = 1.0
    repetition: float = 1.0


class Table:
    """The parameters of the running rows, on the device."""

    def __init__(self, rows: list[Params]) -> None:
        staged = torch.empty(len(rows), 4, pin_memory=True)
        for row, params in zip(staged.numpy(), rows, strict=True):
            row[:] = astuple(params)
        self.values = staged.to("cuda", non_blocking=True)
        self.staged = staged  # until the copy has ended, which the first result proves

    def column(self, name: str) -> torch.Tensor:
        return self.values[:, list(Params.__dataclass_fields__).index(name), None]


def penalise(logits: torch.Tensor, seen: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    lowered = torch.where(logits > 0, logits / factor, logits * factor)
    return torch.where(seen, lowered, logits)


def restrict(logits: torch.Tensor, table: Table) -> torch.Tensor:
    """Return probabilities of the tokens that top-k and top-p leave."""
    ordered, order = logits.sort(-1, descending=True)
    ranks = torch.arange(VOCAB, device="cuda")
    chances = ordered.softmax(-1)
    before = chances.cumsum(-1) - chances
    kept = (ranks < table.column("top_k")) & (before < table.column("top_p"))
    chances = chances.masked_fill(~kept, 0.0)
    chances = chances / chances.sum(-1, keepdim=True)
    return torch.zeros_like(chances).scatter_(-1, order, chances)


def draw(chances: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Sample by exponential races: `multinomial` would check its input on the host."""
    noise = torch.empty_like(chances).exponential_(1, generator=generator)
    return (chances / noise).argmax(-1)


def reject(
    target: torch.Tensor, draft: torch.Tensor, proposed: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [rows, drafts + 1] and how many of them count; `target` has one distribution more than `draft`."""
    p = target[:, :-1].gather(-1, proposed[..., None]).squeeze(-1)
    q = draft.gather(-1, proposed[..., None]).squeeze(-1)
    uniform = torch.rand(p.shape, device="cuda", generator=generator)
    accepted = (uniform * q < p).cumprod(-1)
    count = accepted.sum(-1)
    rest = (target[:, :-1] - draft).clamp_(min=0)
    rest = torch.cat([rest, target[:, -1:]], 1)
    rest = rest.gather(1, count[:, None, None].expand(-1, 1, VOCAB)).squeeze(1)
    bonus = draw(rest + 1e-10, generator)
    padded = torch.cat([proposed, torch.zeros_like(proposed[:, :1])], 1)
    return padded.scatter(1, count[:, None], bonus[:, None]), count + 1


class Rows:
    def __init__(self, table: Table) -> None:
        self.table = table
        self.generator = torch.Generator(device="cuda").manual_seed(71)
        weights = torch.Generator(device="cuda").manual_seed(70)
        self.target = torch.randn(VOCAB, VOCAB, device="cuda", generator=weights) * 2
        self.draft = self.target + torch.randn(VOCAB, VOCAB, device="cuda", generator=weights) * 0.5
        self.last = torch.arange(ROWS, device="cuda")
        self.seen = torch.zeros(ROWS, VOCAB, dtype=torch.bool, device="cuda")

    def chances(self, model: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = penalise(model[tokens], self.seen, self.table.column("repetition"))
        return restrict(logits / self.table.column("temperature"), self.table)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, drafts = [self.last], []
        for _ in range(DRAFTS):
            drafts.append(self.chances(self.draft, tokens[-1]))
            tokens.append(draw(drafts[-1], self.generator))
        target = torch.stack([self.chances(self.target, one) for one in tokens], 1)
        out, count = reject(target, torch.stack(drafts, 1), torch.stack(tokens[1:], 1), self.generator)
        self.last = out.gather(1, count[:, None] - 1).squeeze(1)
        counts = torch.arange(DRAFTS + 1, device="cuda") < count[:, None]
        self.seen = self.seen | (torch.nn.functional.one_hot(out, VOCAB).bool() & counts[..., None]).any(1)
        return out, count


@torch.inference_mode()
def main() -> None:
    rows = Rows(Table([Params(), Params(0.7, 5), Params(1.3, VOCAB, 0.8), Params(0.5, 8, 0.9, 1.2)]))
    steps = [torch.cat([out, count[:, None]], 1) for out, count in (rows.step() for _ in range(STEPS))]
    history = torch.stack(steps, 1).tolist()  # san: ok(the result of all steps)
    for row in history:
        tokens = [token for step in row for token in step[: step[-1]]]
        assert all(0 <= token < VOCAB for token in tokens)
        print(len(tokens), tokens[:8])


if __name__ == "__main__":
    main()
