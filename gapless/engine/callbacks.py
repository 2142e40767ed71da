"""Masks from a Python function of the caller."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch

from gapless.base.errors import RequestError
from gapless.base.params import PREFIX_FUNCTION
from gapless.base.records import Int32s, Request, TokenTexts


class AllowedTokens:
    """A Matcher over `SamplingParams.prefix_allowed_tokens_fn`. One thread at a time calls it."""

    texts: TokenTexts | None = None

    def __init__(self, request: Request, vocab: int) -> None:
        assert request.params.prefix_allowed_tokens_fn is not None
        self._function = request.params.prefix_allowed_tokens_fn
        self._ids: list[int] = request.tokens.tolist()
        self._vocab = vocab

    def advance(self, tokens: Sequence[int]) -> None:
        self._ids += tokens

    def rollback(self, count: int) -> None:
        del self._ids[len(self._ids) - count :]

    def copy(self) -> AllowedTokens:
        other = copy(self)
        other._ids = [*self._ids]
        return other

    def write_mask(self, words: Int32s) -> None:
        """Write the tokens returned by the function. Raises RequestError if it raises, or returns none."""
        try:
            ids = np.array([int(token) for token in self._function(0, torch.tensor(self._ids))], np.int64)
        except Exception as error:  # whatever the caller's function raises
            raise RequestError(f"{PREFIX_FUNCTION} raised {type(error).__name__}: {error}", PREFIX_FUNCTION) from error
        if not len(ids) or ids.min() < 0 or ids.max() >= self._vocab:
            raise RequestError(
                f"{PREFIX_FUNCTION} must return one token id or more, each from 0 to {self._vocab - 1}", PREFIX_FUNCTION
            )
        allowed = np.zeros(32 * len(words), np.bool_)
        allowed[ids] = True
        words[:] = np.packbits(allowed, bitorder="little").view(np.int32)
