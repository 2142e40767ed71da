"""Environment variables that mean something to gapless, as one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gapless.base.config import EngineConfig
from gapless.base.variables import OTHERS, OWN_VARIABLES, unknown_variables
from gapless.cli.spec import Spec, specs
from gapless.server.config import ServerConfig


def variables() -> dict[str, str]:
    """Every variable and its effect: for the flags of `serve`, our others, and libraries' ones."""
    flags = {spec.env: f"{spec.flag}: {spec.help}" for config in (EngineConfig, ServerConfig) for spec in specs(config)}
    return flags | OWN_VARIABLES | OTHERS


def mistyped(env: Mapping[str, str], own: Iterable[Spec]) -> list[str]:
    """A line for each variable that begins with our prefix and sets nothing, here or in another command."""
    known = {spec.env for spec in own}
    return unknown_variables(env, known | variables().keys()) if unknown_variables(env, known) else []
