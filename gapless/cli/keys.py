"""The API key of a server that a command talks to: a flag, or the environment."""

from __future__ import annotations

import argparse
import os

KEY_VARIABLES = ("GAPLESS_API_KEY", "OPENAI_API_KEY")


def add_api_key(command: argparse.ArgumentParser, of: str = "of the server") -> None:
    """`--api-key KEY`."""
    command.add_argument("--api-key", metavar="KEY", help=f"key {of}; also ${' and $'.join(KEY_VARIABLES)}")


def api_key(options: argparse.Namespace) -> str:
    """What was typed, else the first variable that is set, else nothing."""
    return options.api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), "")
