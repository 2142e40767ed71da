"""The part of a start that all ranks of an engine do alike: device, kernels, facts."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch

from gapless.base import host
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError
from gapless.base.progress import warn
from gapless.base.share import WHOLE_SHARE, Share
from gapless.comm.seam import Group
from gapless.device import Device, build, gpus, open_device
from gapless.engine.on_device import on_device
from gapless.engine.rank_messages import Facts
from gapless.kernels import native
from gapless.kernels.choose import choose
from gapless.kernels.seam import Kernels
from gapless.model.config import ModelConfig, resolve_model_dir
from gapless.model.drafting.seam import Head
from gapless.model.fingerprint import weights_digest
from gapless.model.loader import dtype_of, load_drafter
from gapless.model.seam import LoadedModel

SMALL_MODEL = 50_000_000
"""[parameters] Parameters below which one CPU thread computes a step: more threads would take the loop's core."""
SMALL_THREADS, SMALL_TIMES = 2, 128
"""[threads, times] Threads that share long prompts of a small model, and the multiple of the usual least shared work:
on two cores of an Intel Xeon the demo reads 4,000 tokens in 0.49 of the time, while one row, decoded by two threads,
got 0.86 of the tokens/s of one (`benchmarks/peers.py`)."""
CHECKED = 1_000
"""Numbers that the ranks add at the start, as a check"""


def head_of(config: EngineConfig, device: Device, model: LoadedModel) -> Head | None:
    """Load a rank's share of the head or model that drafts in the pages, if there is one. Raises as `load_drafter`."""
    asked = config.speculation
    if asked is None or not asked.in_pages:
        return None
    return load_drafter(config, model, config.max_num_seqs or device.caps.rows)


def open_rank_device(config: EngineConfig, model_config: ModelConfig, share: Share = WHOLE_SHARE) -> Device:
    """Open the device of a rank. Raises ConfigError."""
    return open_device(config.device, _threads(config, model_config), config.devices[share.rank])


def check_devices(config: EngineConfig, device: Device) -> None:
    """Warn of ranks that share a GPU or a core. Raises ConfigError if a GPU's memory is not shared out among them."""
    cores = host.usable_cores()
    if not device.caps.own_memory and cores < config.tensor_parallel_size:
        text = f"with fewer cores ({cores}) than ranks, each waits until the others have had their turn"
        warn(f"tensor_parallel_size: {text}")
    if not device.caps.own_memory or len(set(config.devices)) == config.tensor_parallel_size:
        return
    if not (config.kv_cache_memory_bytes or config.num_gpu_blocks_override):
        raise ConfigError(
            "device_ids: ranks that share a GPU cannot see how much of its memory is theirs: give "
            "--kv-cache-memory-bytes, the bytes of one rank's pages, or --num-gpu-blocks-override"
        )
    warn(
        "device_ids: ranks that share a GPU take turns of about 2 ms in each sum unless NVIDIA's MPS runs: start it "
        "with nvidia-cuda-mps-control -d"
    )


def _threads(config: EngineConfig, model_config: ModelConfig) -> int:
    """Return the number of computing threads of a rank on a CPU; 0 for most of its cores."""
    small, ranks = model_config.sizes.parameters < SMALL_MODEL, config.tensor_parallel_size * config.data_parallel_size
    if config.threads or (ranks == 1 and not small):
        return config.threads
    cores = max(1, host.usable_cores() // ranks)
    if not small:
        return cores
    return min(SMALL_THREADS, cores) if build.may_have(native.NAME) else 1


def choose_kernels(device: Device, config: EngineConfig, model_config: ModelConfig) -> Kernels:
    """Return the kernels of a rank, and set how its device's threads share work."""
    kernels = choose(device.caps.kernels, dtype_of(config, model_config), config.batch_invariant)
    if not config.threads and model_config.sizes.parameters < SMALL_MODEL:
        on_device(device, lambda: native.share_from(SMALL_TIMES))
    return kernels


def facts_of(config: EngineConfig, device: Device, kernels: Kernels, model: LoadedModel, share: Share) -> Facts:
    """Return the facts of a rank."""
    name = gpus()[config.devices[share.rank]][0] if device.caps.own_memory else host.processor_says("model name")
    made = build.outcomes.get(native.NAME)
    return Facts(
        _digest_of_package(),
        str(torch.__version__),
        f"{device.kind} {name}",
        f"{kernels.name} {made.flags if made else ''}".strip(),
        str(model.dtype).removeprefix("torch."),
        weights_digest(resolve_model_dir(config.model), config.base_seed if config.load_format == "dummy" else None)[
            :16
        ],
        model.page_bytes(config.block_size),
    )


def _digest_of_package() -> str:
    root, digest = Path(host.__file__).parents[1], sha256()
    for path in sorted(path for kind in ("py", "cpp", "cu", "h") for path in root.rglob(f"*.{kind}")):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_sum(device: Device, group: Group) -> None:
    """Add known numbers over all ranks. Raises EngineDeadError for another sum: the ranks' memory is no common one."""
    share = group.share

    def program() -> None:
        numbers = torch.arange(CHECKED, dtype=torch.float32, device=device.torch_device)
        found = group.add(numbers * (share.rank + 1))
        wanted = numbers * (share.world * (share.world + 1) // 2)
        if not torch.equal(found, wanted):
            raise EngineDeadError(f"rank {share.rank} got another sum of known numbers: ranks have no memory in common")

    device.run(program)
