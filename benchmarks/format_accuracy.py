"""Accuracy of each format of weights and KV pages on the demo model's questions, beside plain ones.

`python benchmarks/format_accuracy.py [--questions 1000] [--device cuda] [--out FILE]` prints a Markdown table. Plain is
bfloat16; the same questions are asked of all, and p is McNemar's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from gapless.lab import environment
from gapless.lab.eval_report import Comparison, read_result

ARMS = {
    "plain": [],
    "weights fp8": ["--quantization", "fp8"],
    "weights int8": ["--quantization", "int8"],
    "weights int4, groups of 64": ["--quantization", "int4"],
    "KV fp8": ["--kv-cache-dtype", "fp8"],
    "KV k8v4": ["--kv-cache-dtype", "k8v4"],
    "weights int8, KV fp8": ["--quantization", "int8", "--kv-cache-dtype", "fp8"],
}


def asked(flags: list[str], options: argparse.Namespace, result: Path) -> None:
    """Ask the questions, and write the answers."""
    command = [sys.executable, "-m", "gapless", "eval", "--model", "demo", "--dtype", "bfloat16", "--data", "demo"]
    command += ["--num-questions", str(options.questions), "--device", options.device, "--disable-tqdm"]
    subprocess.run([*command, *flags, "--out", str(result)], check=True, stdout=subprocess.DEVNULL)


def table(results: dict[str, Path]) -> list[str]:
    lines = ["| format | right, % | beside plain, points | p | same texts, % |", "|---|---:|---:|---:|---:|"]
    plain = read_result(results["plain"])
    for name, path in results.items():
        found = Comparison(plain, read_result(path))
        delta, error = found.difference
        right = 100 * (found.both_right + found.gained) / found.n
        numbers = (
            f"{100 * delta:+.2f} ± {100 * error:.2f}",
            f"{found.p_value:.2g}",
            f"{100 * found.same_text / found.n:.0f}",
        )
        lines.append(f"| {name} | {right:.2f} | " + (" | ".join(numbers) if name != "plain" else "| |") + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=tuple(ARMS)[1:], default=tuple(ARMS)[1:], help="beside plain")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    where = environment.describe_host().get("cpu", "")
    with tempfile.TemporaryDirectory() as folder:
        results = {name: Path(folder, f"{i}.json") for i, name in enumerate(("plain", *options.only))}
        for name, path in results.items():
            asked(ARMS[name], options, path)
        lines = [*table(results), "", f"{options.questions} questions, greedy, on {options.device}: {where}"]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
