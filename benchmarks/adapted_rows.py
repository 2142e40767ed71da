"""What rows with adapters cost a batch: decode steps of one engine in which none, one, some or all rows have one.

`PYTHONPATH=.:benchmarks python benchmarks/adapted_rows.py [--model DIR] [--device cuda] [--rounds 15]` prints a table.
The adapters have rank 16, all seven modules and random numbers. Arms take turns in every round, after one round that is
not counted; "without adapters" is another engine, which has none.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from gapless import LLM, SamplingParams
from gapless.model.adapters import ADAPTER_CONFIG, WEIGHTS, module_sizes
from gapless.model.config import ModelConfig, read_model_config, resolve_model_dir

PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
BARE = "without adapters"
RANK, LONGEST = 16, 256


def write_adapter(directory: Path, config: ModelConfig, seed: int) -> Path:
    """Write an adapter as peft does."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for number, layer in enumerate(config.spec.layers):
        for product, (inputs, outputs) in module_sizes(config, layer).items():
            for module, columns in zip(config.names.modules(product), outputs, strict=True):
                name = f"base_model.model.{config.names.layer.format(number)}.{module}.lora_"
                weights[name + "A.weight"] = torch.randn(RANK, inputs, generator=generator) * 0.01
                weights[name + "B.weight"] = torch.randn(columns, RANK, generator=generator) * 0.01
    directory.mkdir()
    save_file(weights, directory / WEIGHTS)
    (directory / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return directory


def arms(rows: int, adapters: int) -> dict[str, list[str]]:
    """The adapter of each row, by the name of the arm; the first is what the others are measured against."""
    some = [f"a{row % adapters}" for row in range(rows)]
    return {
        "none": [""] * rows,
        "1 row": ["a0"] + [""] * (rows - 1),
        "a quarter": some[: rows // 4] + [""] * (rows - rows // 4),
        "all, 1 adapter": ["a0"] * rows,
        f"all, {adapters} adapters": some,
    }


def step_us(llm: LLM, names: list[str]) -> float:
    """The median time of a decode step on the device."""
    prompts = [f"Question {row}: how many pens does Mia have?" for row in range(len(names))]
    llm.generate(prompts, PARAMS, use_tqdm=False, adapter=names)
    steps = llm.recording().steps.rows[-PARAMS.max_tokens + 4 :]  # type: ignore[operator]
    return float(np.median(steps["device_end"] - steps["device_start"])) / 1e3


def measure(options: argparse.Namespace, modules: tuple[str, ...]) -> dict[str, list[float]]:
    """Step times in us by arm, one a round."""
    common = {
        "device": options.device, "load_format": options.load_format, "max_num_seqs": options.rows,
        "max_model_len": LONGEST, "num_gpu_blocks_override": options.rows * LONGEST // 16 + 1,
        "enable_prefix_caching": False,
    }  # fmt: skip
    found: dict[str, list[float]] = {BARE: []} | {name: [] for name in arms(options.rows, options.adapters)}
    with (
        LLM(options.model, **common) as bare,
        LLM(options.model, **common, lora_modules=modules, max_loras=len(modules)) as llm,
    ):
        for _ in range(options.rounds + 1):
            found[BARE].append(step_us(bare, [""] * options.rows))
            for name, names in arms(options.rows, options.adapters).items():
                found[name].append(step_us(llm, names))
    return {name: times[1:] for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    config = read_model_config(resolve_model_dir(options.model))
    with tempfile.TemporaryDirectory() as folder:
        modules = tuple(
            f"a{number}={write_adapter(Path(folder) / str(number), config, number)}"
            for number in range(options.adapters)
        )
        found = measure(options, modules)
    print(f"| of {options.rows} rows with an adapter | step, us | least | none / this |\n|---|---:|---:|---:|")
    for name, times in found.items():
        ratio = np.median(np.array(found["none"]) / np.array(times))
        print(f"| {name} | {np.median(times):.0f} | {min(times):.0f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
