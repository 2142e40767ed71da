"""A pipeline over threads: each stage owns a stream and layers, and passes activations on by a queue, with an event."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

STAGES, LAYERS, WIDTH, MICRO = 3, 2, 12, 6


@dataclass
class Message:
    """Activations and the event after which they are whole."""

    number: int
    hidden: torch.Tensor
    made: torch.cuda.Event


Channel = queue.Queue[Message | None]


def block(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, device="cuda"), nn.GELU())]
    return nn.Sequential(*parts).requires_grad_(False)


class Stage:
    """Messages are kept until this stage's stream has read them; then their memory goes back to where it is from."""

    def __init__(self, number: int, module: nn.Module, source: Channel, target: Channel) -> None:
        self.module = module
        self.source, self.target = source, target
        self.stream = torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())  # the weights
        self.held: list[tuple[Message, torch.cuda.Event]] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._guarded, name=f"stage {number}")

    def _guarded(self) -> None:
        try:
            with torch.cuda.stream(self.stream):
                self._run()
        except BaseException as error:
            self.error = error
        finally:
            self.target.put(None)

    def _run(self) -> None:
        while (message := self.source.get()) is not None:
            self.stream.wait_event(message.made)
            hidden = message.hidden + self.module(message.hidden)
            made = self.stream.record_event()
            self.held.append((message, made))
            self.target.put(Message(message.number, hidden, made))

    def drop(self) -> None:
        """Let go of what was held, once this stage's stream has read it."""
        for _, read in self.held:
            read.synchronize()  # san: ok(the end of the batch)
        self.held.clear()


class Pipeline:
    def __init__(self) -> None:
        self.channels: list[Channel] = [queue.Queue(maxsize=2) for _ in range(STAGES)] + [queue.Queue()]
        self.modules = [block(number) for number in range(STAGES)]
        self.stages = [
            Stage(number, module, self.channels[number], self.channels[number + 1])
            for number, module in enumerate(self.modules)
        ]

    def run(self, inputs: list[torch.Tensor], receive: Callable[[Message], None]) -> None:
        for stage in self.stages:
            stage.thread.start()
        for number, one in enumerate(inputs):
            self.channels[0].put(Message(number, one, torch.cuda.current_stream().record_event()))
        self.channels[0].put(None)
        while (message := self.channels[-1].get()) is not None:
            receive(message)
        for stage in self.stages:
            stage.thread.join()
            if stage.error is not None:
                raise stage.error

    def close(self) -> None:
        for stage in self.stages:
            stage.drop()


def main() -> None:
    pipeline = Pipeline()
    inputs = list(torch.linspace(-2, 2, MICRO * 4 * WIDTH, device="cuda").view(MICRO, 4, WIDTH))
    outputs: dict[int, torch.Tensor] = {}
    kept: list[Message] = []

    def receive(message: Message) -> None:
        torch.cuda.current_stream().wait_event(message.made)
        outputs[message.number] = message.hidden.mean(0)
        kept.append(message)

    pipeline.run(inputs, receive)
    expected = torch.stack(inputs)
    for module in pipeline.modules:
        expected = expected + module(expected)
    found = torch.stack([outputs[number] for number in range(MICRO)])
    worst, total = torch.stack([(found - expected.mean(1)).abs().max(), found.sum()]).tolist()  # san: ok(the result)
    pipeline.close()
    assert worst < 1e-5, worst
    print(f"{len(outputs)} outputs in order {[message.number for message in kept]}, sum {total:.3f}")


main()
