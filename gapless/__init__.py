"""gapless: an LLM inference and serving engine whose host and device never wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CaptureError",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "GaplessError",
    "ProcessorTables",
    "QueueFullError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ServerError",
    "StalledError",
    "StructuredOutputs",
    "UserError",
    "__version__",
]

if TYPE_CHECKING:
    from gapless.base.config import EngineConfig
    from gapless.base.errors import (
        CaptureError,
        CheckpointError,
        ConfigError,
        DeviceError,
        EngineDeadError,
        EngineError,
        GaplessError,
        QueueFullError,
        RequestError,
        ServerError,
        StalledError,
        UserError,
    )
    from gapless.base.params import SamplingParams
    from gapless.base.structured import StructuredOutputs
    from gapless.engine.async_llm import AsyncLLM
    from gapless.engine.llm import LLM
    from gapless.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from gapless.step.processors import ProcessorTables

_HOME = {
    "LLM": "gapless.engine.llm",
    "AsyncLLM": "gapless.engine.async_llm",
    "EngineConfig": "gapless.base.config",
    "SamplingParams": "gapless.base.params",
    "StructuredOutputs": "gapless.base.structured",
    "CompletionOutput": "gapless.engine.outputs",
    "RequestMetrics": "gapless.engine.outputs",
    "RequestOutput": "gapless.engine.outputs",
    "ProcessorTables": "gapless.step.processors",
}


def __getattr__(name: str) -> Any:
    # `import gapless` must not pay for torch: the command line answers --help in well under 0.2 s.
    if name in __all__:
        from importlib import import_module

        try:
            return getattr(import_module(_HOME.get(name, "gapless.base.errors")), name)
        except ModuleNotFoundError as error:
            if (error.name or "gapless").startswith("gapless"):
                raise
            from gapless.base.install import INSTALL

            lacks = f"gapless.{name} needs {error.name}, which is not installed: {INSTALL}"
            raise ModuleNotFoundError(lacks, name=error.name) from None
    raise AttributeError(f"module 'gapless' has no attribute {name!r}")
