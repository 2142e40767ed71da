"""What requests must get, by a direct computation in Python: its own Philox, its own filters, no batch at all."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from automaton import allowed_after
from harness import VOCAB, check_at_rest, check_tokens, run, script
from torch_processors import DIRECT

from gapless.base.params import SamplingParams
from gapless.kernels.layout import BANNED
from gapless.testing.checksum import PRIME, ChecksumModel

SETTINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.75},
    {"temperature": 2.0, "top_k": 30, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.9},
]
ASKS = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.75, "frequency_penalty": -0.5},
    {"frequency_penalty": 1.25, "presence_penalty": 0.5},
    {"presence_penalty": 2.0},
    {"logit_bias": {3: 100.0, 50: 99.5, 9: -100.0}},
    {"logit_bias": {3: 4.0}, "allowed_token_ids": [3, 5, 7, 60, 61, 90], "repetition_penalty": 1.25},
    {"bad_words": ["x"]},
    {"bad_words": ["x"], "allowed_token_ids": [5, 7], "presence_penalty": 1.0},
]
"""What is asked of adjusted logits; the words' tokens are drawn."""
WORD = 0xFFFFFFFF


class Varied(ChecksumModel):
    """Logits that leave a choice, still a hash of every entry that may be read."""

    def scores(self, hidden):
        return (hidden * torch.arange(1, self.vocab_size + 1, device=hidden.device) % 101).float() / 16


def direct_logits(tokens):
    fold = 0
    for position, token in enumerate(tokens):
        value = (token * 7_368_787 + position * 104_729 + 15_485_863) % PRIME
        fold = (fold + value * ((position * 48_271 + 1_299_709) % PRIME)) % PRIME
    return np.array([fold * (token + 1) % 101 / 16 for token in range(VOCAB)])


def direct_noise(token, position, seed):
    a, b, c, d = token // 4, position, 0, 0
    low, high = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ low, q & WORD, (p >> 32) ^ d ^ high, p & WORD
        low, high = (low + 0x9E3779B9) & WORD, (high + 0xBB67AE85) & WORD
    return -math.log(-math.log1p(-((a, b, c, d)[token % 4] + 0.5) / 2**32))


def direct_adjusted(logits, tokens, request):
    """By the definitions of the parameters, token by token."""
    params, prompt, output = request.params, request.tokens.tolist(), tokens[len(request.tokens) :]
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *output}:
        r, x = np.float32(params.repetition_penalty), logits[token]
        logits[token] = x / r if x > 0 else x * r
    for token in set(output):
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        logits[token] -= np.float32(params.presence_penalty)
    if params.allowed_token_ids:
        logits[list(set(range(VOCAB)) - set(params.allowed_token_ids))] = -np.inf
    for *before, last in request.bad_words:
        if not before or output[-len(before) :] == before:
            logits[last] = min(logits[last], np.float32(BANNED))
    for number, arguments in sorted(request.processors):
        logits = DIRECT[number](logits, len(prompt), tokens, arguments)
    if request.matcher is not None:
        logits[list(set(range(VOCAB)) - set(allowed_after(request.matcher.seed, output, VOCAB)))] = -np.inf
    return logits


def direct_token(tokens, request):
    """The next token of a request whose known tokens are these."""
    params = request.params
    logits = direct_adjusted(direct_logits(tokens).astype(np.float32), tokens, request).astype(np.float64)
    if len(tokens) + 1 <= request.min_len:
        logits[list(request.stop_ids)] = -np.inf
    order = sorted(range(VOCAB), key=lambda token: (-logits[token], token))
    if params.temperature == 0.0:
        return order[0]
    order = order[: params.top_k or VOCAB]
    weight = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    before = (weight.cumsum() - weight) / weight.sum()
    kept = [t for t, w, b in zip(order, weight, before, strict=True) if w >= params.min_p and b < params.top_p]
    best = logits[order[0]]
    return max(kept, key=lambda t: (logits[t] - best) / params.temperature + direct_noise(t, len(tokens), request.seed))


def direct_run(request):
    """The tokens after a request's prompt; those of a request that is like an earlier one are known."""
    key = repr(request._replace(key=0, tokens=request.tokens.tolist(), matcher=getattr(request.matcher, "seed", None)))
    if key not in _ANSWERS:
        _ANSWERS[key] = directly(request)
    return [*_ANSWERS[key]]


_ANSWERS: dict[str, list[int]] = {}


def directly(request):
    tokens, new = request.tokens.tolist(), []
    while len(tokens) < request.max_len and not (new and new[-1] in request.stop_ids):
        new.append(direct_token(tokens, request))
        tokens.append(new[-1])
    return new


def answers_to(jobs):
    """The prompt of each job and all tokens after it, by direct computation."""
    return [[*job.request.tokens.tolist(), *direct_run(job.request)] for job in jobs]


def run_directly(loop, jobs, direct=direct_run):
    """Run the jobs to their ends: their tokens are those of a direct computation, or their first ones if aborted."""
    run(loop, jobs)
    check_tokens(jobs, direct)
    if loop.parts.adapters is not None:
        loop.device.drain()
        loop.parts.adapters.before_plan()  # a load whose request was aborted
    check_at_rest(loop)
    if loop.parts.transfers is not None:
        loop.parts.transfers.host.check()
    return loop


def bad_words(rng, params):
    """Words that the output may well come to: of few tokens, some alone."""
    tokens = params.allowed_token_ids or range(VOCAB)
    alone = [(token,) for token in rng.sample(tokens, min(len(tokens) // 2, 30))]
    return (*alone, *((rng.choice(tokens), rng.choice(tokens)) for _ in range(200 - 2 * len(alone))), (5, 7, 5, 7))


def sampling_jobs(seed):
    """The script of a seed, with sampling settings drawn for every request."""
    rng, jobs = random.Random(seed), script(seed, 48)
    for job in jobs:
        room = job.request.max_len - len(job.request.tokens)
        least = rng.choice((0, 0, min(3, room)))
        asks = rng.choice((*[{}] * len(ASKS), *ASKS))
        params = SamplingParams(**rng.choice(SETTINGS), **asks, max_tokens=None, min_tokens=least)
        length, words = len(job.request.tokens), bad_words(rng, params) if params.bad_words else ()
        job.request = job.request._replace(
            params=params, min_len=length + least if least else 0, bad_words=words
        )  # fmt: skip
    return jobs
