"""Logits processors for tests, each in torch and by its definition; and some that no engine may take."""

from __future__ import annotations

import numpy as np
import torch

from gapless.step.processors import Processor


def favours(logits, tables):
    """The token with the number of the next position gets the first argument more."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    next_one = tables.lengths[:, None] % logits.shape[1]
    return torch.where(ids == next_one, logits + tables.arguments[:, :1], logits)


def direct_favours(logits, prompt, tokens, arguments):
    logits[len(tokens) % len(logits)] += np.float32(arguments[0])
    return logits


def counts_both(logits, tables):
    """Tokens lose the first argument for each time that the output has them, and the second if the prompt has them."""
    first, second = tables.arguments[:, :1], tables.arguments[:, 1:2]
    return logits - first * tables.counts - second * tables.in_prompt


def direct_counts_both(logits, prompt, tokens, arguments):
    first, second = (np.float32(number) for number in (*arguments, 0.0)[:2])
    for token in range(len(logits)):
        logits[token] -= first * np.float32(tokens[prompt:].count(token))
        logits[token] -= second * np.float32(token in tokens[:prompt])
    return logits


def spoils_its_input(logits, tables):
    """The token that follows the last one gets 9 more, and so does the number of prompt tokens; written in place."""
    size = logits.shape[1]
    last = tables.history.gather(1, tables.lengths[:, None] - 1)
    logits.mul_(2)
    nine = torch.full_like(last, 9, dtype=torch.float32)
    logits.scatter_add_(1, (last + 1) % size, nine)
    return logits.scatter_add_(1, tables.prompt_lengths[:, None] % size, nine)


def direct_spoils_its_input(logits, prompt, tokens, arguments):
    logits *= 2
    logits[(tokens[-1] + 1) % len(logits)] += 9
    logits[prompt % len(logits)] += 9
    return logits


PROCESSORS = tuple(Processor(one.__name__, one) for one in (favours, counts_both, spoils_its_input))
DIRECT = (direct_favours, direct_counts_both, direct_spoils_its_input)


class WithConstants:
    """A processor that keeps a tensor on the device."""

    def __init__(self, device):
        self.more = torch.tensor([1.0], device=device)

    def __call__(self, logits, tables):
        return logits + self.more


# No engine may take these.


def syncs(logits, tables):
    if logits.max() > 0:
        return logits
    return logits + 1


def uploads(logits, tables):
    return logits + torch.tensor([1.0], device=logits.device)


def returns_a_row(logits, tables):
    return logits[0]


def returns_halves(logits, tables):
    return logits.half()


def returns_nothing(logits, tables):
    logits.mul_(2)


def mixes_rows(logits, tables):
    return logits - logits.mean()


def counts_rows(logits, tables):
    return logits / logits.shape[0]


def rounds_by_rows(logits, tables):
    return logits + 1e-5 * logits.shape[0]


def draws(logits, tables):
    return logits + torch.rand_like(logits)


def raises(logits, tables):
    return logits + tables.arguments


not_a_function = 7
