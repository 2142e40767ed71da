"""`gapless doctor`: looks at this machine and reports its parts, missing ones, and their effect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

import gapless
from gapless.base.config import EngineConfig
from gapless.cli.errors import FAILED
from gapless.cli.flags import Command
from gapless.pace.constants import constants


def main(argv: Sequence[str]) -> int:
    read = {"model", "tokenizer", "revision", "download_dir", "model_impl", "check", "tensor_parallel_size"}
    read |= {"data_parallel_size", "device", "device_ids"}
    others = {f.name for f in fields(EngineConfig)} - read
    about = "Look at this machine, and at MODEL if one is named, and say what is missing."
    command = Command("doctor", about, (EngineConfig,), model_word=True, without=others)
    command.add_argument("--pace", action="store_true", help="print the tuning constants instead, with their reasons")
    command.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    command.add_argument("--port", type=int, default=8000, help="the port that a server would take (default: 8000)")
    settings = command.read(argv)
    options, given = settings.options, settings.given(EngineConfig)
    if options.pace:
        return _print_constants(options.json)
    from gapless.cli.checks import run_checks

    checks = run_checks(options.port, settings.build(EngineConfig) if given else None)
    failed = [c for c in checks if c.status == "fail"]
    if options.json:
        rows = [c._asdict() for c in checks]
        print(json.dumps({"gapless": gapless.__version__, "ok": not failed, "checks": rows}, indent=2))
    else:
        for c in checks:
            print(f"{c.status:<5} {c.name:<14} {c.detail}")
        warnings = sum(c.status == "warn" for c in checks)
        print(f"{len(checks)} checks: {len(failed)} failed, {warnings} to look at")
    return FAILED if failed else 0


def _print_constants(as_json: bool) -> int:
    found = [c._asdict() for c in constants()]
    if as_json:
        print(json.dumps({"gapless": gapless.__version__, "constants": found}, indent=2))
    else:
        print("\n".join("{module}: {name} = {value} [{unit}]\n    {reason}".format(**c) for c in found))
    return 0
