"""Sampling flags of run, chat and complete, under the names that the API gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gapless.base.config import EngineConfig, flag
from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.cli.errors import UsageError
from gapless.cli.flags import Settings

_GROUP = "Sampling"


@dataclass(frozen=True)
class SamplingFlags:
    """An option that was not given stays None and is left to the engine or the server."""

    max_tokens: int | None = flag(
        None, "new tokens at most; default: up to the context limit", group=_GROUP, aliases=("--max-new-tokens", "-n")
    )
    temperature: float | None = flag(None, "0 is greedy", group=_GROUP, aliases=("--temp",))
    top_p: float | None = flag(None, "keep the smallest set of tokens this probable", group=_GROUP)
    top_k: int | None = flag(None, "keep this many best tokens", group=_GROUP)
    stop: tuple[str, ...] = flag((), "text that ends the output; may be given several times", group=_GROUP)


def sampling_fields(settings: Settings) -> dict[str, Any]:
    """The given ones, as fields of SamplingParams and of the API. --seed is the engine's and the request's.

    Raises UsageError for a value out of range.
    """
    fields = {name: value for name, value in settings.given(SamplingFlags).items() if value not in (None, ())}
    if "stop" in fields:
        fields["stop"] = list(fields["stop"])
    if "seed" in settings.given(EngineConfig):
        fields["seed"] = settings.given(EngineConfig)["seed"]
    return checked_fields(fields)


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields. Raises UsageError for a value out of range."""
    try:
        SamplingParams.from_dict({"max_tokens": None, **fields})
    except RequestError as error:
        raise UsageError(str(error)) from error
    return fields
