"""A decode loop as small engines have it: block tables, slot mapping, a sampler, one step after another.

Comments say what `gapless san` finds in each line. What it finds is what such engines really do at every step.
"""

import torch

device = "cuda"
VOCAB, PAGE, WIDTH = 64, 4, 16


class Sequence:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.pages = tokens, []


class Runner:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.embed = torch.randn(VOCAB, WIDTH, device=device)
        self.head = torch.randn(WIDTH, VOCAB, device=device)
        self.cache = torch.zeros(32 * PAGE, WIDTH, device=device)

    def prepare(self, running: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = [one.tokens[-1] for one in running]
        slots = [one.pages[(len(one.tokens) - 1) // PAGE] * PAGE + (len(one.tokens) - 1) % PAGE for one in running]
        pinned = torch.tensor(tokens, pin_memory=True)  # loop: pinned-alloc
        ids = pinned.cuda(non_blocking=True)
        mapping = torch.tensor(slots, device=device)  # loop: list-to-device
        temperatures = torch.tensor([1.0] * len(running)).cuda(non_blocking=True)  # loop: pageable-async
        return ids, mapping, temperatures

    def run(self, running: list[Sequence]) -> list[int]:
        ids, mapping, temperatures = self.prepare(running)
        hidden = self.embed[ids]
        self.cache.index_copy_(0, mapping, hidden)
        logits = (hidden + self.cache.mean(0)) @ self.head / temperatures[:, None]
        noise = torch.empty_like(logits).exponential_(1)
        return (logits.softmax(-1) / noise).argmax(-1).tolist()  # loop: host-read


def generate(prompts: list[list[int]], steps: int) -> list[list[int]]:
    runner, free = Runner(), list(range(32))
    running = [Sequence(prompt) for prompt in prompts]
    for _ in range(steps):
        for one in running:
            while len(one.pages) * PAGE < len(one.tokens):
                one.pages.append(free.pop())
        for one, token in zip(running, runner.run(running), strict=True):
            one.tokens.append(token)
    return [one.tokens for one in running]


print(len(generate([[1, 2, 3], [4, 5]], 5)), "done")
