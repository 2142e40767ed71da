"""Training batches: documents of like length side by side, so padding is rare, and no document sees another."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples.demo_model.documents import Conversation
from examples.demo_model.tokenizer import mark_id, segments

POOL = 1000
LONGEST = 640
IGNORED = -100

Document = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Batch:
    """ids int64 [rows, length]; targets int64 [rows, length], IGNORED where nothing is learned."""

    ids: Tensor
    targets: Tensor


def encode(tokenizer: Tokenizer, conversations: list[Conversation]) -> list[Document]:
    """Token ids and targets of each document; a target is the next token, where the model has to write it."""
    pieces = [list(segments(conversation)) for conversation in conversations]
    encoded = iter(
        tokenizer.encode_batch_fast([text for piece in pieces for text, _ in piece], add_special_tokens=False)
    )
    documents = []
    for piece in pieces:
        ids: list[int] = []
        learned: list[int] = []
        for _, written in piece:
            part = next(encoded).ids
            ids += part
            learned += part if written else [IGNORED] * len(part)
        documents.append((ids[:-1], learned[1:]))
    return [document for document in documents if len(document[0]) <= LONGEST]


def _collate(documents: list[Document], pad: int) -> Batch:
    length = max(len(ids) for ids, _ in documents)
    ids = [row + [pad] * (length - len(row)) for row, _ in documents]
    targets = [row + [IGNORED] * (length - len(row)) for _, row in documents]
    return Batch(torch.tensor(ids), torch.tensor(targets))


def _cut(documents: list[Document], tokens: int, pad: int) -> Iterator[Batch]:
    group: list[Document] = []
    for document in sorted(documents, key=lambda d: len(d[0])):
        if group and (len(group) + 1) * len(document[0]) > tokens:
            yield _collate(group, pad)
            group = []
        group.append(document)
    yield _collate(group, pad)


def batches(tokenizer: Tokenizer, text: Iterator[Conversation], seed: int, tokens: int) -> Iterator[Batch]:
    """An endless stream of batches of at most `tokens` (640 or more) tokens, padding included; `seed` orders them."""
    rng, pad = random.Random(seed), mark_id(tokenizer, "<|endoftext|>")
    while True:
        pool = list(_cut(encode(tokenizer, list(islice(text, POOL))), tokens, pad))
        rng.shuffle(pool)
        yield from pool
