"""Refuses settings that a device cannot honour, by the name of the capability that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.comm.join import check_sums
from gapless.device import Caps


class Setting(NamedTuple):
    """A setting that needs a capability of the device."""

    field: str
    asks: Callable[[EngineConfig], object]
    met: Callable[[Caps], bool]
    capability: str
    lacks: str
    """A noun for the device's lacking part"""


SETTINGS = (
    Setting(
        "role", lambda config: config.peer_plan.listen, lambda caps: caps.registers, "registers",
        "copies from memory that other processes have, too",
    ),
    Setting(
        "batch_invariant", lambda config: config.batch_invariant,
        lambda caps: caps.kernels != "torch" or not caps.own_memory, "kernels",
        "kernels whose rows do not depend on their batch",
    ),
    Setting("kv_cache_dtype", lambda config: config.kv_cache_dtype != "auto", lambda caps: caps.fp8, "fp8", "FP8"),
    Setting("quantization", lambda config: config.quantization == "fp8", lambda caps: caps.fp8, "fp8", "FP8"),
)  # fmt: skip


def refuse_lacking(config: EngineConfig, kind: str, caps: Caps) -> None:
    """Raise ConfigError for a setting that a device of this kind cannot honour."""
    if config.tensor_parallel_size > 1:
        check_sums(kind, caps)
    chosen = config.device_ids is not None and config.data_parallel_size == 1  # engines of a fleet have them from it
    if chosen and not caps.own_memory:
        text = f"{kind} has no devices to choose from (capability own_memory)"
        raise ConfigError(f"device_ids: {text}: leave device_ids out, or use --device cuda")
    for setting in SETTINGS:
        if setting.asks(config) and not setting.met(caps):
            lacks = f"{kind} has no {setting.lacks} (capability {setting.capability})"
            raise ConfigError(f"{setting.field}: {lacks}: leave {setting.field} out, or use --device cpu")
