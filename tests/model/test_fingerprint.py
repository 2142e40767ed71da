"""A fingerprint names a model by its contents."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from gapless.model import fingerprint as module
from gapless.model.fingerprint import digest_of, fingerprint


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


def test_another_config_is_another_model(checkpoint):
    before = fingerprint(checkpoint)
    (checkpoint / "config.json").write_text(json.dumps({"layers": 3}))
    assert fingerprint(checkpoint) != before


@pytest.mark.parametrize("digest", [fingerprint, digest_of])
def test_every_byte_counts_of_a_file_that_several_threads_read(checkpoint, monkeypatch, digest):
    monkeypatch.setattr(module, "HASH_BLOCK", 100)
    monkeypatch.setattr(module, "READ_BYTES", 30)
    path = checkpoint / "model.safetensors"
    whole, seen = path.read_bytes(), {digest(checkpoint)}
    places = sorted({*range(0, len(whole), 29), 99, 100, 129, 130, len(whole) - 1})
    for at in places:
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        seen.add(digest(checkpoint))
    path.write_bytes(whole[100:200] + whole[:100] + whole[200:])
    seen.add(digest(checkpoint))
    path.write_bytes(whole[:-1])
    seen.add(digest(checkpoint))
    assert len(seen) == 1 + len(places) + 2


@pytest.fixture
def reads(tmp_path, monkeypatch):
    """The bytes that were read of weights; digests of files are kept however young these are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "YOUNG_NS", -(10**12))
    monkeypatch.setattr(module, "read_before", {})
    pread, counted = os.pread, []

    def counting(*args):
        counted.append(len(data := pread(*args)))
        return data

    monkeypatch.setattr(os, "pread", counting)
    return counted


def test_a_file_is_read_once_while_it_stays_as_it_is(checkpoint, tmp_path, reads):
    first = fingerprint(checkpoint)
    assert sum(reads) == sum(path.stat().st_size for path in checkpoint.iterdir())
    reads.clear()
    assert fingerprint(checkpoint) == first and not reads
    module.read_before.clear()
    assert fingerprint(checkpoint) == first and not reads, "another process finds it in the cache"
    (tmp_path / "link").symlink_to(checkpoint)
    assert fingerprint(tmp_path / "link") == first and not reads, "it is the same file"
    assert digest_of(checkpoint) == first and reads, "who asks for all bytes has all of them read"


def test_a_file_that_was_written_again_with_its_size_and_time_is_read_again(checkpoint, reads):
    path = checkpoint / "model.safetensors"
    before, facts = fingerprint(checkpoint), path.stat()
    while path.stat().st_ctime_ns == facts.st_ctime_ns:  # the system's time of the change
        with path.open("r+b") as file:
            file.seek(500)
            file.write(b"!")
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert path.stat().st_mtime_ns == facts.st_mtime_ns and path.stat().st_ino == facts.st_ino
    assert fingerprint(checkpoint) != before


def test_a_digest_of_a_young_file_is_not_kept(checkpoint, reads, monkeypatch):
    monkeypatch.setattr(module, "YOUNG_NS", 10**12)
    fingerprint(checkpoint)
    reads.clear()
    fingerprint(checkpoint)
    assert reads


def test_without_a_cache_a_process_reads_a_file_once_and_says_that_others_will_too(checkpoint, tmp_path, reads, caplog):
    (tmp_path / "cache").write_text("no folder")
    first = fingerprint(checkpoint)
    assert len(caplog.messages) == 2 and all("each start reads all of" in line for line in caplog.messages)
    reads.clear()
    assert fingerprint(checkpoint) == first and not reads


@pytest.mark.parametrize("spoil", [
    lambda note: note.write_bytes(note.read_bytes()[:-1]), lambda note: note.write_bytes(b"\xff" * 200),
    lambda note: (note.unlink(), note.mkdir()), lambda note: note.parent.chmod(0o777),
])  # fmt: skip
def test_a_cache_that_is_torn_or_not_ours_is_not_believed(checkpoint, tmp_path, reads, spoil):
    first = fingerprint(checkpoint)
    for note in [*(tmp_path / "cache" / "gapless" / module.DIGESTS).iterdir()]:
        spoil(note)
    module.read_before.clear()
    reads.clear()
    assert fingerprint(checkpoint) == first and reads
