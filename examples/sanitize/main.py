"""A decoding loop over made-up drafts: `gapless-san -- python main.py`."""

import torch
from draft import accept, advance

ROWS, STEPS, DRAFTED = 4, 3, 6


def main() -> None:
    """Runs the steps without waiting, then reads the lengths once."""
    torch.manual_seed(0)
    lengths = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    for _ in range(STEPS):
        drafted = torch.randint(0, 100, (ROWS, DRAFTED), device="cuda")
        wanted = torch.where(torch.rand(ROWS, DRAFTED, device="cuda") < 0.7, drafted, 0)
        _, counts = accept(drafted, wanted)
        lengths = advance(lengths, counts)
    print(lengths.tolist())  # san: ok(the last step has been launched)


if __name__ == "__main__":
    main()
