"""Prompts are tokenized on threads and prefilled together; a condition says to the engine that some are ready."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

VOCAB, WIDTH, ROOM, PAD = 64, 16, 48, 0


@dataclass(frozen=True)
class Prompt:
    order: int
    ids: torch.Tensor


class Ready:
    """Prompts that wait for prefill."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.prompts: list[Prompt] = []
        self.left = 0

    def expect(self, count: int) -> None:
        with self.changed:
            self.left += count

    def add(self, prompt: Prompt) -> None:
        with self.changed:
            self.prompts.append(prompt)
            self.left -= 1
            self.changed.notify()

    def take(self) -> list[Prompt]:
        with self.changed:
            self.changed.wait_for(lambda: self.prompts or not self.left)
            found, self.prompts = self.prompts, []
            return found


class Tokenizer:
    def __init__(self) -> None:
        self.table = {chr(97 + n): n + 1 for n in range(26)}
        self.lock = threading.Lock()
        self.seen = 0

    def __call__(self, text: str) -> torch.Tensor:
        ids = torch.tensor([self.table.get(letter, VOCAB - 1) for letter in text])
        with self.lock:
            self.seen += len(ids)
        return ids


class Prefill:
    """Packs prompts into one row of tokens; `packed` is written again once its copy has ended."""

    def __init__(self) -> None:
        torch.manual_seed(17)
        self.embed = torch.randn(VOCAB, WIDTH, device="cuda")
        self.head = torch.randn(WIDTH, VOCAB, device="cuda")
        self.packed = torch.zeros(2, ROOM, dtype=torch.int64, pin_memory=True)
        self.copied = torch.cuda.Event(blocking=True)

    @torch.inference_mode()
    def __call__(self, prompts: list[Prompt]) -> torch.Tensor:
        self.copied.synchronize()  # san: ok(the prefill before this one)
        tokens, owners = self.packed
        tokens.fill_(PAD)
        owners.fill_(len(prompts))  # padding belongs to a row that is dropped
        at = 0
        for row, prompt in enumerate(prompts):
            tokens[at : at + len(prompt.ids)] = prompt.ids
            owners[at : at + len(prompt.ids)] = row
            at += len(prompt.ids)
        ids, rows = self.packed.to("cuda", non_blocking=True)
        self.copied.record()
        sums = torch.zeros(len(prompts) + 1, WIDTH, device="cuda").index_add_(0, rows, self.embed[ids])
        return (torch.tanh(sums[:-1]) @ self.head).argmax(-1)


def main() -> None:
    texts = ["hello there", "a", "to be or not", "continuous", "batching pays", "ok", "threads", "pinned memory"]
    ready, tokenizer, prefill = Ready(), Tokenizer(), Prefill()
    ready.expect(len(texts))
    orders: list[int] = []
    firsts: list[torch.Tensor] = []
    with ThreadPoolExecutor(3, thread_name_prefix="tokenizer") as pool:
        for order, text in enumerate(texts):
            pool.submit(lambda order=order, text=text: ready.add(Prompt(order, tokenizer(text))))
        while prompts := ready.take():
            while prompts:
                part, size = [], 0
                while prompts and size + len(prompts[0].ids) <= ROOM:
                    size += len(prompts[0].ids)
                    part.append(prompts.pop(0))
                orders += [prompt.order for prompt in part]
                firsts.append(prefill(part))
    tokens = torch.cat(firsts).tolist()  # san: ok(the result)
    answers = [token for _, token in sorted(zip(orders, tokens, strict=True))]
    print(tokenizer.seen, answers)


if __name__ == "__main__":
    main()
