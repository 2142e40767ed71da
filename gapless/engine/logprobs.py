"""Turns a line of scores into what the caller sees of one token."""

from __future__ import annotations

from gapless.base.records import StepLogprobs
from gapless.engine.outputs import Logprob, TokenLogprobs
from gapless.text.tokenizer import Tokenizer


def entry(scored: StepLogprobs, line: int, token: int, top: int, tokenizer: Tokenizer) -> TokenLogprobs:
    """Return the token at the line's position, then the `top` most likely ones."""
    texts = tokenizer.text_of
    own = Logprob(float(scored.logprobs[line]), int(scored.ranks[line]), texts[token])
    found = {token: own}
    tops = zip(scored.top_ids[line, :top].tolist(), scored.top_logprobs[line, :top].tolist(), strict=True)
    for rank, (other, logprob) in enumerate(tops, 1):
        if other >= 0 and other != token:
            found[other] = Logprob(logprob, rank, texts[other])
    return found
