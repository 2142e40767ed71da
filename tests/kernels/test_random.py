"""Random numbers: the published cipher, and noise that is finite and the same however it is asked for."""

from __future__ import annotations

import math

import pytest
import torch
from kernels.sampling_oracle import WORD, philox

from gapless.kernels import random as rng

# Known answers of the Random123 distribution for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values):
    return tuple(torch.tensor([[value]]) for value in values)


def seed_words(seed):
    return torch.tensor([seed]).view(torch.int32).view(1, 2)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert tuple(int(word) for word in rng.philox(words(counter), words(key))) == answer
    assert philox(counter, key) == answer


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, -(2**63), 2**63 - 1, 0x1234_5678_9ABC_DEF0])
@pytest.mark.parametrize("position", [0, 1, 131_071])
def test_noise_is_the_cipher_of_token_position_and_seed(seed, position):
    vocab = 11
    noise = rng.gumbel(None, vocab, torch.tensor([[position]]), seed_words(seed))[0]
    unsigned = seed % 2**64
    for token in range(vocab):
        output = philox((token // 4, position, 0, 0), (unsigned & WORD, unsigned >> 32))
        uniform = (output[token % 4] + 0.5) / 2**32
        assert noise[token].item() == pytest.approx(-math.log(-math.log1p(-uniform)), rel=1e-5, abs=1e-5)


def test_noise_of_chosen_ids_is_that_of_the_whole_vocabulary_bit_for_bit():
    vocab = 1003
    position, seed = torch.tensor([[5], [6]]), torch.tensor([[1, 2], [-3, 4]], dtype=torch.int32)
    whole = rng.gumbel(None, vocab, position, seed)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 7, 8, 16, 33, vocab):
        ids = torch.stack([torch.randperm(vocab, generator=generator)[:count] for _ in range(2)])
        assert torch.equal(rng.gumbel(ids, vocab, position, seed), whole.gather(1, ids))


def test_noise_is_finite_for_every_bit_pattern_and_falls_as_the_bits_grow(monkeypatch):
    bits = torch.tensor([[0, 1, 2, 1000, 2**20, 2**31, 2**32 - 2**9, 2**32 - 2**8 - 1, WORD - 1, WORD]])
    monkeypatch.setattr(rng, "philox", lambda counter, key: (bits,) * 4)
    noise = rng.gumbel(torch.zeros(1, 10, dtype=torch.int64), 4, torch.zeros(1, 1, dtype=torch.int64), seed_words(0))
    assert noise.isfinite().all() and (noise.diff()[:, :6] < 0).all() and (noise.diff() <= 0).all()
