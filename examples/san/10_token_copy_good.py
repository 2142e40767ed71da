"""10_token_copy_bad, mended: two token buffers in turn, and a step waits for the copy that read its buffer last."""

from __future__ import annotations

import torch

from gapless.testing.sim import SimDevice

STEPS = 4


def main() -> list[float]:
    device = SimDevice(seed=1, mood="lazy")
    tokens, home = torch.zeros(2, 1), torch.zeros(STEPS, 1)
    copied = []

    def step(number: int) -> None:
        tokens[number % 2].fill_(number)

    def bring_home(number: int) -> None:
        device.download(home[number], tokens[number % 2])

    for number in range(STEPS):
        if number >= 2:
            device.compute.after(copied[number - 2])
        device.compute.launch(step, number)
        device.token_out.after(device.compute.record())
        device.token_out.launch(bring_home, number)
        copied.append(device.token_out.record())
    device.compute.record().wait()
    device.token_out.record().wait()
    read = home.flatten().tolist()
    device.close()
    return read


if __name__ == "__main__":
    print("tokens", main(), "expected", [float(number) for number in range(STEPS)])
