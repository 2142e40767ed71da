"""What the project's own tests look like: they read results, which is their job and does not count."""

import torch
from draft import accept, advance


def test_tokens_are_accepted_up_to_the_first_that_differs() -> None:
    drafted = torch.tensor([[5, 6, 7], [5, 6, 7]], device="cuda")
    wanted = torch.tensor([[5, 9, 7], [5, 6, 7]], device="cuda")
    tokens, counts = accept(drafted, wanted)
    assert tokens.tolist() == [[5, 0, 0], [5, 6, 7]]
    assert counts.tolist() == [1, 3]


def test_lengths_grow_by_the_accepted_tokens_and_one() -> None:
    lengths = advance(torch.tensor([10, 20], device="cuda"), torch.tensor([1, 3], device="cuda"))
    assert lengths.tolist() == [12, 24]
