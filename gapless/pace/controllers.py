"""The controllers of an engine; an installed class may take the place of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gapless.base.errors import ConfigError
from gapless.base.plug_ins import check_name, load
from gapless.pace.chunk_limit import ChunkLimit
from gapless.pace.depth import Depth
from gapless.pace.draft_gate import DraftGate
from gapless.pace.load_gate import LoadGate

CONTROLLER_PLUG_INS = "gapless.controllers"
"""Entry points of this group are further controllers: their names, and subclasses of the built-in ones."""


class Controllers(NamedTuple):
    """The class of each controller."""

    depth: type[Depth] = Depth
    chunk_limit: type[ChunkLimit] = ChunkLimit
    draft_gate: type[DraftGate] = DraftGate
    load_gate: type[LoadGate] = LoadGate

    @classmethod
    def named(cls, names: Iterable[str]) -> Controllers:
        """Return the built-in classes, and the plug-ins of these names in place of their base classes. Raises
        ConfigError."""
        chosen = CONTROLLERS
        for name in names:
            check_name("controllers", name, (), CONTROLLER_PLUG_INS)
            made = load(CONTROLLER_PLUG_INS, name, "controllers")
            bases = [base for base in CONTROLLERS if isinstance(made, type) and issubclass(made, base)]
            if not bases:
                known = ", ".join(base.__name__ for base in CONTROLLERS)
                raise ConfigError(f"controllers: {name} is {made!r}, and must be a subclass of one of {known}")
            chosen = chosen._replace(**{cls._fields[CONTROLLERS.index(bases[0])]: made})
        return chosen


CONTROLLERS = Controllers()
"""The built-in ones"""
