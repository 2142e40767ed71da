"""The base of dispatch modes that cost little."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class PlainMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that torch does not wrap against its compiler.

    The wrapper would import the compiler at the first operation, and every operation would go through it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
