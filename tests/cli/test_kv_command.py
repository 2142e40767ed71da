"""`gapless kv inspect`."""

from __future__ import annotations

import json
from pathlib import Path

from tier_rig import SLOT, setup_of, stored

from gapless.cli.main import main
from gapless.offload.tiers.disk import LOG, DiskTier


def fill(directory: Path) -> None:
    setup = setup_of(str(directory))
    tier = DiskTier(setup)
    stored(tier, setup, 0, 1, 2)
    tier.close()


def test_inspect_prints_model_slots_and_sizes(tmp_path, capsys):
    fill(tmp_path)
    assert main(["kv", "inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "  model           checksum\n  page_size       4\n" in text
    assert f"3 of 64 slots of {SLOT:,} bytes are used\n" in text
    assert main(["kv", "inspect", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["used"], facts["used_bytes"]) == (3, 3 * SLOT)


def test_inspect_may_look_while_an_engine_writes(tmp_path, capsys):
    setup = setup_of(str(tmp_path))
    tier = DiskTier(setup)
    stored(tier, setup, 0)
    assert main(["kv", "inspect", str(tmp_path)]) == 0 and "1 of 64 slots" in capsys.readouterr().out
    tier.close()


def test_inspect_refuses_foreign_files_in_one_sentence(tmp_path, capsys):
    (tmp_path / LOG).write_bytes(b"PK\3\4" + bytes(9000))
    assert main(["kv", "inspect", str(tmp_path)]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is no index of a disk tier of this version: name another directory" in error
