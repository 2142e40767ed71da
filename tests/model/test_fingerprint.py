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


def test_every_tensor_of_a_large_file_is_sampled_from_begin_to_end(checkpoint, monkeypatch):
    monkeypatch.setattr(module, "WHOLE", 100)
    monkeypatch.setattr(module, "SAMPLES", 3)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 10)
    spans = {"large": [0, 900], "small": [900, 904], "empty": [904, 904], "last": [904, 1000]}
    entries = {name: {"dtype": "U8", "shape": [high - low], "data_offsets": [low, high]}
               for name, (low, high) in spans.items()}  # fmt: skip
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path, begin = checkpoint / "model.safetensors", 8 + len(header)
    whole = len(header).to_bytes(8, "little") + header + bytes(range(250)) * 4
    path.write_bytes(whole)
    before = fingerprint(checkpoint)
    seen = {
        9: True,
        445: True,
        454: True,
        455: False,
        899: True,
        900: True,
        903: True,
        904: True,
        920: False,
        999: True,
    }
    for at, noticed in seen.items():
        data = bytearray(whole)
        data[begin + at] ^= 1
        path.write_bytes(data)
        assert (fingerprint(checkpoint) != before) == noticed, at
