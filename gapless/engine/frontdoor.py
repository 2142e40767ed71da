"""Finds a model, and reads the front's part of it: tokenizer, end-of-sequence ids, default sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.hub.names import is_hub_name
from gapless.hub.repo import CONFIG_FILE, GENERATION_FILE, Repo, fetch_tokenizer, open_repo
from gapless.model.config import (
    drafter_method,
    load_config,
    model_length,
    read_draft_config,
    read_model_config,
    resolve_model_dir,
)
from gapless.model.fields import warn_of
from gapless.text.tokenizer import Tokenizer


class Located(NamedTuple):
    """A config whose model and tokenizer are directories."""

    config: EngineConfig
    commit: str | None = None
    """The model's commit on the hub; None for a directory of the user."""


class ModelAssets(NamedTuple):
    """The parts of a model that only the front needs."""

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = {}
    """Sampling parameters recommended by the model's generation_config.json."""
    commit: str | None = None
    """Located.commit"""


def locate(config: EngineConfig) -> Located:
    """Find the model and tokenizer of `config`; hub names are looked up there, and missing files fetched.

    This may take minutes, and happens only at starts: every command that opens a model passes here, and no request
    does. Raises ConfigError, CheckpointError or ServerError naming the model and the mend.
    """
    located, repos = _look(config)
    _warn(located.config)
    for repo in repos if config.load_format != "dummy" else ():
        repo.fetch(*repo.weights())
    return located


def _warn(config: EngineConfig) -> None:
    """Warn of unused fields, once a start."""
    model, asked = load_config(config), config.speculation
    warn_of(model.heard)
    if asked is not None and asked.method == "draft_model":
        warn_of(read_draft_config(asked.model, model).files[0].heard())


def survey(config: EngineConfig) -> tuple[Located, int]:
    """Do as `locate`, without the weights; returns the number of bytes of them to fetch."""
    located, repos = _look(config)
    return located, sum(file.size for repo in repos for file in repo.missing(repo.weights()).values())


def _look(config: EngineConfig) -> tuple[Located, list[Repo]]:
    """Fetch all but the weights, so that an unsupported model is refused before its weights are fetched."""
    located, repo = _look_for_model(config)
    asked, repos = config.speculation, [] if repo is None else [repo]
    if asked is None or not asked.model:
        return located, repos
    if is_hub_name(asked.model):
        drafter = open_repo("speculative_config.model", asked.model, None, config.download_dir)
        drafter.fetch(CONFIG_FILE)
        asked, repos = asked._replace(model=str(drafter.folder)), [*repos, drafter]
    asked = asked._replace(method=asked.method or drafter_method(asked.model))
    if asked.method == "draft_model":
        read_draft_config(asked.model, load_config(located.config))
    there = json.dumps(asked._asdict())
    return located._replace(config=replace(located.config, speculative_config=there)), repos


def _look_for_model(config: EngineConfig) -> tuple[Located, Repo | None]:
    tokenizer, on_hub = config.tokenizer, is_hub_name(config.model)
    if config.revision is not None and not on_hub:
        raise ConfigError(f"revision: {config.model!r} is no hub name and has no revisions: leave out --revision")
    if tokenizer is not None and is_hub_name(tokenizer):
        revision = config.revision if tokenizer == config.model else None
        tokenizer = str(fetch_tokenizer(tokenizer, revision, config.download_dir))
    if not on_hub:
        return Located(replace(config, tokenizer=tokenizer)), None
    repo = open_repo("model", config.model, config.revision, config.download_dir)
    repo.fetch(CONFIG_FILE, more=(GENERATION_FILE,))
    model_length(config, read_model_config(repo.folder, impl=config.model_impl))
    if tokenizer is None:
        repo.fetch_tokenizer()
    there = replace(config, model=str(repo.folder), tokenizer=tokenizer, revision=None, download_dir=None)
    return Located(there, repo.commit), repo


def open_assets(config: EngineConfig, commit: str | None = None) -> ModelAssets:
    """Read the files of a located config; no weights, no torch. Raises CheckpointError or ConfigError naming the
    file."""
    model = load_config(config)
    tokenizer = Tokenizer.from_dir(config.tokenizer or resolve_model_dir(config.model), config.chat_template)
    own = tokenizer.eos_token_id
    eos_ids = dict.fromkeys([*model.eos_token_ids, *([] if own is None else [own])])
    return ModelAssets(tokenizer, tuple(eos_ids), model.default_sampling, commit)
