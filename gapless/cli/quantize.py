"""`gapless quantize`: writes a checkpoint with weights of 8 or 4 bits, and measures what that costs in accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from gapless.base.config import EngineConfig
from gapless.base.progress import in_bytes, starting
from gapless.cli import eval as evaluation
from gapless.cli.flags import Command
from gapless.model.quantization import ROUNDED

QUANTIZE_EPILOG = """examples:
  gapless quantize demo --format int4 --output demo-int4 --data demo
  gapless quantize Qwen/Qwen3-0.6B --format int8 --output qwen3-0.6b-int8
  gapless serve qwen3-0.6b-int8

The result is a compressed-tensors checkpoint, which vLLM and SGLang read too. Weights are rounded to nearest: methods
that look at data (GPTQ, AWQ) lose less at 4 bits, and their checkpoints are read as they are."""


def main(argv: Sequence[str]) -> int:
    read = {"model", "revision", "download_dir"}
    others = {name for name in EngineConfig.__dataclass_fields__ if name not in read}
    about = "Round the weights of MODEL's layers to nearest, and write a checkpoint."
    command = Command("quantize", about, (EngineConfig,), model_word=True, without=others, epilog=QUANTIZE_EPILOG)
    command.add_argument("--format", choices=tuple(ROUNDED), required=True, help="numbers of the weights")
    command.add_argument(
        "--output", "-o", type=Path, required=True, metavar="DIR", help="folder to write, new or empty"
    )
    command.add_argument(
        "--data", metavar="FILE", help="measure both by these questions, as `gapless eval --data` does"
    )
    settings = command.read(argv)
    options, config = settings.options, settings.build(EngineConfig)
    from gapless.engine.frontdoor import locate
    from gapless.kernels.kinds import WeightKind
    from gapless.model.config import resolve_model_dir
    from gapless.model.quantize import quantize_checkpoint

    with starting():
        directory = resolve_model_dir(locate(config).config.model)
        layout = quantize_checkpoint(directory, options.output, WeightKind(options.format))
    before, after = map(_weight_bytes, (directory, options.output))
    print(f"wrote {options.output}: weights in {layout}, {in_bytes(before)} -> {in_bytes(after)}")
    return _compare(str(directory), str(options.output), options.data) if options.data else 0


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _compare(before: str, after: str, data: str) -> int:
    """Print how many questions both answer right."""
    with TemporaryDirectory() as folder:
        results = [f"{folder}/before.json", f"{folder}/after.json"]
        for model, result in zip((before, after), results, strict=True):
            if code := evaluation.main(["--model", model, "--data", data, "--out", result]):
                return code
        return evaluation.main(["--compare", *results])
