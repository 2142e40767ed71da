"""Beam search whose stop is looked at one step late, through pinned memory, so that no step waits for the device."""

from dataclasses import dataclass

import torch

BEAMS, VOCAB, WIDTH, MOST, END = 3, 20, 10, 12, 0


@dataclass
class Beams:
    """The state of a search. All of it stays on the device."""

    tokens: torch.Tensor
    scores: torch.Tensor
    states: torch.Tensor
    ended: torch.Tensor


class Network:
    def __init__(self) -> None:
        torch.manual_seed(8)
        self.embed = torch.randn(VOCAB, WIDTH, device="cuda")
        self.cell = torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5
        self.head = torch.randn(WIDTH, VOCAB, device="cuda")
        self.patience = torch.linspace(-1.0, 14.0, MOST, device="cuda")

    def step(self, states: torch.Tensor, tokens: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        states = torch.tanh(states @ self.cell + self.embed[tokens])
        logits = states @ self.head
        logits[:, END] += self.patience[number]  # the end becomes likelier
        return states, torch.log_softmax(logits, -1)


class LateFlag:
    """A condition of the device that the host learns of a step later, without a wait for what is newer."""

    def __init__(self) -> None:
        self.values = torch.zeros(2, dtype=torch.bool, pin_memory=True)
        self.events = [torch.cuda.Event(blocking=True), torch.cuda.Event(blocking=True)]
        self.count = 0

    def begin(self) -> None:
        self.count = 0

    def put(self, flag: torch.Tensor) -> None:
        slot = self.count % 2
        self.values[slot].copy_(flag, non_blocking=True)
        self.events[slot].record()
        self.count += 1

    def before_last(self) -> bool:
        if self.count < 2:
            return False
        slot = self.count % 2
        self.events[slot].synchronize()  # san: ok(a step that ended while the next was launched)
        return bool(self.values[slot])


def begin(first: int) -> Beams:
    tokens = torch.zeros(BEAMS, MOST + 1, dtype=torch.int64, device="cuda")
    tokens[:, 0] = first
    scores = torch.arange(BEAMS, device="cuda").clamp(max=1) * -1e9  # all but the first are copies of it
    states = torch.zeros(BEAMS, WIDTH, device="cuda")
    return Beams(tokens, scores, states, torch.zeros(BEAMS, dtype=torch.bool, device="cuda"))


def advance(network: Network, beams: Beams, step: int, only_end: torch.Tensor) -> Beams:
    """Take the best continuations of all beams; a beam that has ended continues by its end alone, at no cost."""
    states, scores = network.step(beams.states, beams.tokens[:, step], step)
    scores = torch.where(beams.ended[:, None], only_end, scores) + beams.scores[:, None]
    best, places = scores.flatten().topk(BEAMS)
    parents, chosen = places.div(VOCAB, rounding_mode="floor"), places.remainder(VOCAB)
    tokens = beams.tokens.index_select(0, parents)
    tokens[:, step + 1] = chosen
    ended = beams.ended.index_select(0, parents) | (chosen == END)
    return Beams(tokens, best, states.index_select(0, parents), ended)


@torch.inference_mode()
def search(network: Network, flag: LateFlag, first: int) -> tuple[list[int], int]:
    beams = begin(first)
    flag.begin()
    only_end = torch.full((VOCAB,), -torch.inf, device="cuda").index_fill(
        0, torch.zeros(1, dtype=int, device="cuda"), 0.0
    )
    steps = 0
    for step in range(MOST):
        beams = advance(network, beams, step, only_end)
        flag.put(beams.ended.all())
        steps += 1
        if flag.before_last():
            break
    best = beams.tokens[0].tolist()  # san: ok(the result of a search)
    return best[: best.index(END, 1) + 1] if END in best[1:] else best, steps


if __name__ == "__main__":
    network, flag = Network(), LateFlag()
    for first in (3, 7, 11):
        print(first, *search(network, flag, first))
