"""Errors between here and the hub: one for each fault, naming the model and what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gapless.base.errors import ConfigError, GaplessError, ServerError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


class Asked(NamedTuple):
    """The model or tokenizer that was asked for. `what` is the flag that named it."""

    what: str
    name: str
    revision: str
    cache: str


def fault(error: Exception, asked: Asked) -> GaplessError:
    """The error to raise for one of huggingface_hub: ConfigError where the user can mend it, else ServerError."""
    from huggingface_hub import constants, errors

    what, name, _, cache = asked
    hub = constants.ENDPOINT
    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
        error = cause  # the reason why it looked for a local copy
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{what}: {name!r} is no directory here, and no name that the hub can have: {error}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(
            f"{what}: HF_HUB_OFFLINE is set, so the hub is not asked for {name}: unset it to fetch the model"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, asked, hub)
    if isinstance(error, OSError) and error.errno in _FULL:
        return no_room(asked, f"{cache} is full")
    if isinstance(error, OSError) and error.errno in _CLOSED:
        return ConfigError(
            f"{what}: {name} cannot be written to {cache} ({error.strerror}): "
            "name another folder with --download-dir or HF_HOME"
        )
    if isinstance(error, UnicodeEncodeError):  # headers are the only text that is encoded
        return ConfigError(f"{what}: the token for {name} holds a character that none has: set HF_TOKEN to it again")
    text = " ".join(str(error).split())
    if "No space left" in text:  # the words of Xet
        return no_room(asked, f"{cache} is full")
    return ServerError(
        f"{what}: {name} could not be fetched from {hub} ({type(error).__name__}: {text[:300]}): check the network, "
        "proxies and HF_ENDPOINT, and start again, which goes on from there; or give a directory, "
        f"for there is none named {name!r} here"
    )


@contextmanager
def readable_settings() -> Iterator[None]:
    """Turn what huggingface_hub raises where its first import reads the environment into an error of ours."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            f"huggingface_hub cannot be loaded with the settings in the environment ({error}): correct HF_ENDPOINT, "
            "HF_HUB_ETAG_TIMEOUT or HF_HUB_DOWNLOAD_TIMEOUT, whose times are whole seconds"
        ) from error


def no_room(asked: Asked, why: str) -> ConfigError:
    return ConfigError(
        f"{asked.what}: no room for {asked.name}: {why}. Free some, or name a folder on another disk "
        "with --download-dir or HF_HOME; what has arrived is kept"
    )


def _refusal(error: Exception, asked: Asked, hub: str) -> GaplessError:
    from huggingface_hub import errors

    assert isinstance(error, errors.HfHubHTTPError)
    what, name, revision, _ = asked
    status = error.response.status_code
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{what}: {name} is gated: accept its terms at {hub}/{name}, "
            "then set HF_TOKEN to a token of the account that did"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ConfigError(
            f"{what}: {name!r} is no directory here, and {hub} shows no model of that name: check the spelling; "
            "if it is private, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{what}: {name} has no revision {revision!r}: give another branch, tag or commit")
    if status in (401, 403):
        said = error.server_message or f"status {status}"
        return ConfigError(
            f"{what}: {hub} refuses {name} ({said}): check the spelling, and set HF_TOKEN to a token that may read it"
        )
    said = f"status {status}" + (f": {error.server_message}" if error.server_message else "")
    return ServerError(f"{what}: {hub} does not give {name} now ({said}): try again later")
