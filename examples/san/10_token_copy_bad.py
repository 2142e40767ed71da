"""The tokens of a step go to the host on a stream of their own, while the next step writes the same buffer.

The copy waits for its step, but the next step does not wait for the copy.
"""

from __future__ import annotations

import torch

from gapless.testing.sim import SimDevice

STEPS = 4


def main() -> list[float]:
    device = SimDevice(seed=1, mood="lazy")
    tokens, home = torch.zeros(1), torch.zeros(STEPS, 1)

    def step(number: int) -> None:
        tokens.fill_(number)

    def bring_home(number: int) -> None:
        device.download(home[number], tokens)

    for number in range(STEPS):
        # The fault: the copy of the step before may not have read `tokens` yet.
        device.compute.launch(step, number)
        device.token_out.after(device.compute.record())
        device.token_out.launch(bring_home, number)
    device.compute.record().wait()
    device.token_out.record().wait()
    read = home.flatten().tolist()
    device.close()
    return read


if __name__ == "__main__":
    print("tokens", main(), "expected", [float(number) for number in range(STEPS)])
