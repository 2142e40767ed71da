"""`gapless kv`: what a disk tier of KV pages holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gapless.base.progress import in_bytes
from gapless.cli.flags import Command
from gapless.cli.kinds import Table, dispatch, usage


def inspect(argv: Sequence[str]) -> int:
    command = Command("kv inspect", "Print what the disk tier in a directory holds.", words="DIRECTORY")
    command.add_argument("DIRECTORY", type=Path)
    command.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = command.read(argv).options
    from gapless.offload.tiers.disk import describe

    facts = describe(options.DIRECTORY)
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    print("pages of")
    for name, value in facts["pages of"].items():
        if value not in ("", []):
            print(f"  {name:<16}{value if isinstance(value, str) else json.dumps(value)}")
    print(f"{facts['used']:,} of {facts['slots']:,} slots of {facts['slot_bytes']:,} bytes are used")
    print(f"{in_bytes(facts['used_bytes'])} in pages, {in_bytes(facts['file_bytes'])} on disk")
    print(f"written {facts['written']}")
    return 0


KV_KINDS: Table = {"inspect": ("what a disk tier holds, and of which model", "kv:inspect")}


def main(argv: Sequence[str]) -> int:
    about = "Look at KV pages that --kv-tier disk:PATH:SIZE has left."
    return dispatch(argv, "kv", usage("kv", about, KV_KINDS), KV_KINDS)
