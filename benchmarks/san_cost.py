"""What `gapless san` costs: 64 tokens of transformers' generate on a tiny random model, off, with syncs, with races.

`python benchmarks/san_cost.py`. Processor time of the thread; all take turns, and the medians are compared. Where there
is no CUDA it is emulated, as `gapless san` does it. Beside these stand modes of torch that do nothing, the floor of any
checker that is made of them: a function mode alone, one that runs each call past the dispatcher's modes, and a function
mode with a dispatch mode.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from gapless.guard.detectors import Detectors

DETECTORS = {"off": [], "syncs": ["sync"], "syncs and races": ["sync", "race"]}


class EmptyFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


class PastDispatch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **kwargs) if kwargs else func(*args)


class EmptyDispatch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs) if kwargs else func(*args)


EMPTY: dict[str, tuple[type[Any], ...]] = {
    "an empty function mode": (EmptyFunctions,),
    "past the dispatch mode": (EmptyDispatch, PastDispatch),
    "both modes, empty": (EmptyDispatch, EmptyFunctions),
}


def generate(device: str, options: argparse.Namespace) -> float:
    """Return the milliseconds that a generate took, after a short one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device).eval()
    prompt = torch.arange(1, 9, device=device)[None]
    for tokens in (4, options.tokens):
        start = time.thread_time_ns()
        model.generate(prompt, max_new_tokens=tokens, do_sample=False)
    return (time.thread_time_ns() - start) / 1e6


def measured(name: str, options: argparse.Namespace) -> float:
    if name in EMPTY:
        with ExitStack() as stack:
            for mode in EMPTY[name]:
                stack.enter_context(mode())
            return generate("cuda" if torch.cuda.is_available() else "cpu", options)
    names = DETECTORS[name]
    if not names:
        return generate("cuda" if torch.cuda.is_available() else "cpu", options)
    with Detectors(names, emulate_cuda=True):
        return generate("cuda", options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in (*DETECTORS, *EMPTY)}
    for _ in range(options.rounds):
        for name in times:
            times[name].append(measured(name, options))
    off = statistics.median(times["off"])
    for name, spent in times.items():
        middle = statistics.median(spent)
        print(f"{name:23} {middle:7.0f} ms, {middle / off:.1f} x off ({min(spent):.0f} to {max(spent):.0f})")


if __name__ == "__main__":
    main()
