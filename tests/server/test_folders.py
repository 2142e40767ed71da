"""Folders of sockets: one in use stays, and one that a killed process has left is removed."""

import os
import tempfile

from gapless.server.folders import FOLDER_PREFIX, own_folder


def test_a_folder_in_use_stays_when_its_files_are_cleaned_away(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, new, file, link = (tmp_path / f"{FOLDER_PREFIX}{name}" for name in ("left", "new", "file", "link"))
    for folder in (left, new):
        (folder / "below").mkdir(parents=True)
    file.touch()
    link.symlink_to(tmp_path)
    with own_folder() as used:
        for path in (used, left, file, link):
            os.utime(path, (0, 0), follow_symlinks=False)
        with own_folder() as other:
            assert sorted(tmp_path.iterdir()) == sorted((used, other, new, file, link))
            assert not [*used.iterdir()], "its lock is no file that could be cleaned away"
    assert sorted(tmp_path.iterdir()) == sorted((new, file, link))
