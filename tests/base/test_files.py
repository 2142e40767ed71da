"""Files of a model directory: what is wrong with one is told with its name."""

from __future__ import annotations

import pytest

from gapless.base.errors import CheckpointError
from gapless.base.files import read_json, read_text


def test_a_missing_file_is_read_as_none(tmp_path):
    assert read_text(tmp_path / "a.json") is None
    assert read_json(tmp_path / "a.json") is None


def test_a_json_file_that_is_there_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": "\u00e9"}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": "\u00e9"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must hold one JSON object, got list"),
        (b"\xff", "not UTF-8 text"),
    ],
    ids=["open", "deep", "list", "bytes"],
)
def test_a_file_that_is_wrong_is_named_with_the_fault(tmp_path, content, says):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        read_json(tmp_path / "a.json")
    assert str(tmp_path / "a.json") in str(caught.value)


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_text(tmp_path)
