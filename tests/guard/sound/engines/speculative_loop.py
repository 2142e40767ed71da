"""Speculative decoding: a draft proposes four tokens, the target verifies them at once; counts stay on the device."""

import torch

ROWS, DRAFTS, VOCAB, WIDTH, ROUNDS = 3, 4, 24, 16, 8
ROOM = ROUNDS * (DRAFTS + 1) + 1


class Bigram:
    """A model whose logits depend on the last token alone."""

    def __init__(self, seed: int, like: "Bigram | None" = None) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.table = torch.randn(VOCAB, VOCAB, device="cuda", generator=generator)
        if like is not None:
            self.table = like.table + 0.3 * self.table

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


def propose(draft: Bigram, last: torch.Tensor) -> torch.Tensor:
    tokens = [last]
    for _ in range(DRAFTS):
        tokens.append(draft(tokens[-1]).argmax(-1))
    return torch.stack(tokens[1:], 1)


def verify(target: Bigram, last: torch.Tensor, proposed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a round and their number: the accepted ones, and one of the target's own."""
    given = torch.cat([last[:, None], proposed], 1)
    chosen = target(given).argmax(-1)
    agrees = (chosen[:, :-1] == proposed).cumprod(1)
    return chosen, agrees.sum(1) + 1


class Output:
    """The tokens of each row, appended at a length that the host does not know."""

    def __init__(self, first: torch.Tensor) -> None:
        self.tokens = torch.zeros(ROWS, ROOM + DRAFTS + 1, dtype=torch.int64, device="cuda")
        self.tokens[:, 0] = first
        self.lengths = torch.ones(ROWS, dtype=torch.int64, device="cuda")
        self.steps = torch.arange(DRAFTS + 1, device="cuda")

    def append(self, chosen: torch.Tensor, count: torch.Tensor) -> None:
        # What is past the count is overwritten by the next round.
        self.tokens.scatter_(1, self.lengths[:, None] + self.steps, chosen)
        self.lengths += count

    def last(self) -> torch.Tensor:
        return self.tokens.gather(1, self.lengths[:, None] - 1).squeeze(1)


@torch.inference_mode()
def generate() -> tuple[list[list[int]], float]:
    target = Bigram(1)
    draft = Bigram(2, like=target)
    output = Output(torch.arange(ROWS, device="cuda"))
    accepted = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    for _ in range(ROUNDS):
        last = output.last()
        chosen, count = verify(target, last, propose(draft, last))
        accepted += count - 1
        output.append(chosen, count)
    rows = torch.cat([output.lengths[:, None], accepted[:, None], output.tokens], 1)
    results = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    results.copy_(rows, non_blocking=True)
    done = torch.cuda.Event(blocking=True)
    done.record()
    done.synchronize()  # san: ok(the result)
    found = [row[2 : 2 + int(row[0])].tolist() for row in results.numpy()]
    return found, float(results[:, 1].float().mean()) / ROUNDS


def greedy(first: int, length: int) -> list[int]:
    """Return the target's own continuation, which speculation must not change."""
    target = Bigram(1)
    tokens = [torch.full((1,), first, device="cuda")]
    with torch.inference_mode():
        for _ in range(length - 1):
            tokens.append(target(tokens[-1]).argmax(-1))
        return torch.cat(tokens).tolist()  # san: ok(a check)


if __name__ == "__main__":
    texts, mean = generate()
    for first, text in enumerate(texts):
        assert text == greedy(first, len(text)), text
    print(f"{[len(text) for text in texts]} tokens, {mean:.2f} of {DRAFTS} drafts accepted")
