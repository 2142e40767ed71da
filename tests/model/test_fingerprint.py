"""A fingerprint names a model by its contents."""

from __future__ import annotations

import json
import shutil

import pytest

from gapless.model import fingerprint as module
from gapless.model.fingerprint import fingerprint


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layers": 2}))
    header = b'{"w":{"dtype":"F32","shape":[250],"data_offsets":[0,1000]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(250)) * 4)
    return folder


def test_a_copy_elsewhere_has_the_same_fingerprint(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "another place")
    (copy / "README.md").write_text("beside the weights")
    assert fingerprint(copy) == fingerprint(checkpoint)


@pytest.mark.parametrize("at", [9, 200, -1])
def test_another_byte_is_another_model(checkpoint, at):
    before, path = fingerprint(checkpoint), checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert fingerprint(checkpoint) != before


def test_another_config_is_another_model(checkpoint):
    before = fingerprint(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps({"layers": 3}))
    assert fingerprint(checkpoint) != before


def test_large_files_are_sampled_from_header_to_end(checkpoint, monkeypatch):
    monkeypatch.setattr(module, "WHOLE", 100)
    monkeypatch.setattr(module, "SAMPLES", 5)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 10)
    path = checkpoint / "model.safetensors"
    size, before = path.stat().st_size, fingerprint(checkpoint)
    step = (size - 10) // 4
    for at, seen in ((20, True), (step + 9, True), (step + 10, False), (4 * step + 9, True)):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        assert (fingerprint(checkpoint) != before) == seen, at
        data[at] ^= 1
        path.write_bytes(data)
