"""The checks of `gapless doctor`, one small function each."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gapless.base import host
from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError
from gapless.base.install import INSTALL
from gapless.base.progress import in_bytes

if TYPE_CHECKING:
    from gapless.device.build import Outcome
    from gapless.engine.frontdoor import Located
    from gapless.kernels.native import Product
    from gapless.model.config import ModelConfig
    from gapless.model.fields import Fields
    from gapless.text.tokenizer import Tokenizer

TORCH_LOW, TORCH_HIGH = (2, 11), (2, 16)
NEEDED_BY = {
    "numpy": "everything",
    "safetensors": "loading weights",
    "tokenizers": "text",
    "huggingface_hub": "models by name",
    "jinja2": "chat",
    "msgspec": "serve",
    "prometheus_client": "serve and top",
    "starlette": "serve",
    "uvicorn": "serve",
    "httptools": "serve",
    "rich": "progress bars",
}
ANYWHERE = ("python", "machine", "memory", "port", "demo model")
"""Checks that need no package"""
LOW_MEMORY = 1 << 30


class Check(NamedTuple):
    """`status` is ok, warn or fail."""

    name: str
    status: str
    detail: str


def run_checks(port: int, config: EngineConfig | None = None) -> list[Check]:
    """All checks, also of the model where `config` names one. A check that breaks is reported as failed."""
    every: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("python", python),
        ("torch", torch_version),
        ("libraries", libraries),
        ("machine", machine),
        ("memory", memory),
        ("accelerators", accelerators),
        ("native", native),
        ("port", lambda: free_port(port)),
        ("demo model", demo_model),
        ("devices", lambda: devices(config)),
        ("hub", hub),
    ]
    if config is not None:
        every.append(("model", lambda: model(config)))
    bare = any(find_spec(name) is None for name in ("torch", "numpy"))
    steps = [*(step for step in every if step[0] in ANYWHERE), ("engine", engine)] if bare else every
    found: list[Check] = []
    for name, step in steps:
        try:
            found += step()
        except Exception as error:
            found.append(Check(name, "fail", f"{type(error).__name__}: {error}"))
    return found


def engine() -> Iterator[Check]:
    """Say once that the engine's packages are not there."""
    missing = ", ".join(name for name in ("torch", *NEEDED_BY) if find_spec(name) is None)
    yield Check("engine", "fail", f"cannot run models without {missing}: {INSTALL}")


def python() -> Iterator[Check]:
    text = f"{platform.python_version()} ({platform.python_implementation()}) at {sys.executable}"
    good = sys.version_info >= (3, 11)
    if good and not host.is_python_optimized():
        why = "built without --enable-optimizations, so the host takes longer: make setup PYTHON=... names another"
        yield Check("python", "warn", f"{text}: {why}")
    else:
        yield Check("python", "ok" if good else "fail", text if good else f"{text}: 3.11 or later is needed")


def torch_version() -> Iterator[Check]:
    version = importlib.metadata.version("torch")
    known = TORCH_LOW <= tuple(int(n) for n in version.split(".")[:2]) < TORCH_HIGH
    span = f"{'.'.join(map(str, TORCH_LOW))} up to, not with, {'.'.join(map(str, TORCH_HIGH))}"
    yield Check("torch", "ok" if known else "warn", version if known else f"{version}: gapless is made for {span}")


def libraries() -> Iterator[Check]:
    found, missing = [], []
    for name, use in NEEDED_BY.items():
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{name} (for {use})")
    yield Check("libraries", "ok", ", ".join(found) or "none")
    if missing:
        yield Check("missing", "warn", ", ".join(missing))


def machine() -> Iterator[Check]:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    yield Check("machine", "ok", f"{platform.system()} {platform.machine()}, {host.usable_cores()} usable cores{load}")
    yield Check("uv", "ok", shutil.which("uv") or "not found; pip does the same, slower")


def memory() -> Iterator[Check]:
    free, total = host.memory()
    status = "ok" if free >= LOW_MEMORY else "warn"
    yield Check("memory", status, f"{free / 2**30:.1f} GiB available of {total / 2**30:.1f} GiB")


def accelerators() -> Iterator[Check]:
    """Report the accelerators that torch sees, by name and memory."""
    from gapless.device import facts, gpus, seen_class

    found, built = seen_class(), facts.built_for()
    if found is not None:
        for index, (name, size) in enumerate(gpus()):
            parts = (name, f"{size / 2**30:.1f} GiB" * bool(size), built)
            yield Check(f"{found.kind} {index}", "ok", ", ".join(filter(None, parts)))
    elif built:
        yield Check("accelerators", "warn", f"torch is built for {built} but sees no device; steps run on the CPU")
    else:
        yield Check("accelerators", "ok", "none: torch sees none, steps run on the CPU")


def native() -> Iterator[Check]:
    """Builds missing parts, so that the first engine need not."""
    from gapless.cli.native import build_all
    from gapless.device import compiling, prebuilt
    from gapless.kernels import native

    tool, brought = compiling.compiler(), prebuilt.find(native.NAME) is not None
    with_flags = f"{tool}, for {compiling.aim()}"
    lacking = "no g++ or clang++: " + ("not needed" if brought else "the CPU computes in Python, slower")
    yield Check("compiler", "ok" if tool or brought else "warn", with_flags if tool else lacking)
    without = {
        "cpu streams": "a Python thread runs the steps, without graphs",
        "cpu kernels": "plain torch computes",
        "mask threads": "Python makes the masks of forms of output, slower",
        "ranks": "one engine is one process: no --tensor-parallel-size",
    }
    for name, built in zip(without, build_all(), strict=True):
        yield cpu_library(name, built, without[name])
    yield cpu_products(native.product(), native.chosen())
    if native.load() is None:
        yield without_cpp()
    else:
        yield from cpu_speeds()


def cpu_library(name: str, built: Outcome, without: str) -> Check:
    """Report the build of a C++ library. One that is compiled for less than this processor has is a warning."""
    if built.library is None:
        return Check(name, "warn", f"not built, {without}: {built.reason}")
    how = f"built now, in {built.seconds:.0f} s, " if built.seconds else "" if built.brought else "built, "
    text = f"native: {how}{built.flags}"
    if built.fallback:
        return Check(name, "warn", f"{text}; {built.fallback}; remove {built.library} to try another compiler")
    return Check(name, "ok", f"{text}, in {built.library.parent}")


def cpu_products(product: Product, chosen: Sequence[str]) -> Check:
    """The product of bfloat16 matrices. A faster one of this processor that is not used is a warning."""
    if product.missing:
        return Check("cpu products", "warn", f"bfloat16: {product.path}; {product.missing}")
    text = f"bfloat16: {product.path}"
    if product.path == "amx":
        measured = "; ".join(chosen) or "the first load of a model measures it against bf16_dot for each shape"
        text += f" (GAPLESS_AMX=0 turns it off); {measured}"
    return Check("cpu products", "ok", text)


def cpu_speeds() -> Iterator[Check]:
    """Report what share of the processor's peak prompts get, by dtype."""
    from gapless.kernels.native.speeds import speeds

    for speed in speeds():
        name = str(speed.dtype).removeprefix("torch.")
        yield Check(
            f"cpu {name}",
            "ok",
            f"products of prompts: {speed.product}, {speed.product_share:.2f} of the vector unit's peak in float32; "
            f"attention: {speed.attention}, {speed.attention_share:.2f}",
        )


def without_cpp() -> Check:
    """Report which dtype torch multiplies faster, if our own products are missing."""
    import torch

    from gapless.kernels.dtypes import CLEAR_GAIN, float32_gains

    gain = float32_gains(torch.bfloat16)
    text = f"torch multiplies float32 {gain:.1f} x as fast as bfloat16"
    return Check("cpu dtype", "warn", f"{text}: --dtype auto takes float32" if gain >= CLEAR_GAIN else text)


def free_port(port: int) -> Iterator[Check]:
    with socket.socket() as probe:
        # As a server does it: a port that only waits out old connections counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            yield Check("port", "warn", f"{port} cannot be taken ({error}): serve with --port")
            return
    yield Check("port", "ok", f"{port} is free")


def demo_model() -> Iterator[Check]:
    from gapless.demo import weights_dir

    files = sorted(p for p in weights_dir().glob("*") if p.is_file())
    if any(p.suffix == ".safetensors" for p in files):
        yield Check("demo model", "ok", f"{sum(p.stat().st_size for p in files) / 2**20:.1f} MiB in {len(files)} files")
    else:
        yield Check("demo model", "fail", f"no weights in {weights_dir()}: the package is incomplete")


def hub() -> Iterator[Check]:
    from gapless.hub.repo import surroundings

    try:
        yield Check("hub", "ok", surroundings())
    except OSError as error:
        yield Check("hub", "fail", f"{error.filename}: {error.strerror}: set HF_HOME to a folder that can be read")


def model(config: EngineConfig) -> Iterator[Check]:
    """Reads all but the weights, and fetches the small files of a model on the hub for that."""
    from gapless.engine.frontdoor import survey

    try:
        located, to_fetch = survey(config)
        yield from read_model(config.model, located, to_fetch)
    except CheckpointError as error:
        yield Check("model", "fail", f"refused: {error}")


def read_model(name: str, located: Located, to_fetch: int) -> Iterator[Check]:
    """Report a model that was found. Raises CheckpointError for one that is refused."""
    from gapless.cli.model_report import rows
    from gapless.cli.rank_report import engine_rows, rank_rows
    from gapless.engine.frontdoor import open_assets
    from gapless.model.config import load_config, resolve_model_dir

    found = load_config(located.config)
    about = [Check(part, "ok", text) for part, text in rows(found)]
    try:
        assets = open_assets(located.config)
    except CheckpointError:
        yield from about
        raise
    commit = f", commit {located.commit}" if located.commit else ""
    rest = f"; {in_bytes(to_fetch)} of weights are still to be fetched" if to_fetch else ""
    template = "a chat template" if assets.tokenizer.template else "no chat template"
    sizes = f"{found.dtype}, {found.max_position_embeddings:,} tokens, {template}"
    yield Check("model", "ok", f"{name}: {found.architecture}, {sizes}{commit}{rest}")
    yield from about
    if located.config.tensor_parallel_size > 1:
        yield from (Check(*line) for line in rank_rows(located.config, found))
    if located.config.data_parallel_size > 1:
        yield from (Check(*line) for line in engine_rows(located.config))
    for file in found.files:
        yield from fields_of(file)
    yield from tokenizer(located.config, assets.tokenizer)
    if not to_fetch:
        yield weights(resolve_model_dir(located.config.model), found)
        if located.config.check and found.impl == "native":
            yield compared(resolve_model_dir(located.config.model))


def compared(directory: Path) -> Check:
    """Compare a few tokens' logits with transformers'. Raises CheckpointError if they differ."""
    from gapless.model.native_check import check_native

    check_native(directory)
    return Check("check", "ok", "the logits equal transformers' own, from an eager run of the class")


def tokenizer(config: EngineConfig, found: Tokenizer) -> Iterator[Check]:
    """Tell of the files that the tokenizer was read from."""
    from gapless.model.config import resolve_model_dir
    from gapless.text.tokenizer_files import files_read

    root = Path(config.tokenizer) if config.tokenizer else resolve_model_dir(config.model)
    templates = found.template.names if found.template and not config.chat_template else ()
    yield from (Check(file, "ok", said) for file, said in files_read(root, found.special, templates))


def fields_of(file: Fields) -> Iterator[Check]:
    """Yield a row of the fields that are read, one of the fields that change nothing, and one for each unused field."""
    from gapless.model.fields import SILENT, UNUSED, WAS_READ

    heard = list(file.heard())
    for use in (WAS_READ, SILENT):
        fields = ", ".join(f"{one.name} = {one.value!r}" for one in heard if one.use == use)
        if fields:
            yield Check(file.path.name, "ok", f"{use}: {fields}")
    yield from (Check(file.path.name, "warn", str(one)) for one in heard if one.use == UNUSED)


def weights(directory: Path, model: ModelConfig) -> Check:
    """Look at the headers of the weights, and at both matrices where a head may be the embedding."""
    import torch

    from gapless.model.drafting.mtp import of_mtp_layers
    from gapless.model.registry import Impl
    from gapless.model.weights import own_head, tensor_names, unread_tensors

    if model.impl == Impl.TRANSFORMERS:
        return Check("weights", "ok", f"{len(tensor_names(directory))} tensors, read by the class of transformers")
    model = own_head(directory, model, getattr(torch, model.dtype))
    count, rest = unread_tensors(directory, model, of_mtp_layers(tensor_names(directory)))
    return Check("weights", "ok", f"{count} tensors are read" + (f"; not read: {', '.join(rest)}" if rest else ""))


def devices(config: EngineConfig | None) -> Iterator[Check]:
    """Report each device that is here, and the one that `config` names."""
    from gapless.cli.device_report import device_rows

    yield from (Check(*line) for line in device_rows(config.device if config else "auto"))
