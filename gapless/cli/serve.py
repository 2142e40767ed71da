"""`gapless serve`: the OpenAI server."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gapless.base.config import EngineConfig
from gapless.cli.flags import Command
from gapless.server.config import ServerConfig


def command() -> Command:
    about = "Serve a model over the OpenAI API."
    return Command("serve", about, (EngineConfig, ServerConfig), model_word=True, greedy=True)


def main(argv: Sequence[str]) -> int:
    settings = command().read(argv)
    engine, server = settings.build(EngineConfig), settings.build(ServerConfig)
    from gapless.server.logs import say
    from gapless.server.pair import serve_pair
    from gapless.server.run import serve

    for note in settings.notes:
        say(server, logging.WARNING, note)
    return serve_pair(argv, engine, server) if server.pd != "none" else serve(engine, server)
