"""The disk tier: restarts, kills, foreign and torn files, bounds, the lock."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tier_rig import NAMESPACE, SLOT, content, has, key, loaded, page, setup_of, slot_of, stored
from waiting import until

from gapless.base.errors import ConfigError
from gapless.offload.tiers.disk import DISK_BLOCK, LOG, PAGES_FILE, RECORD_BYTES, DiskRecord, DiskTier, describe
from gapless.offload.tiers.seam import Namespace

FOREIGN = [b"", b"\0" * 5000, b"PK\3\4 an archive", b"gapless KV pages, version 1\n{}\n".ljust(DISK_BLOCK)]
CHILD = """
import sys
sys.path[:0] = sys.argv[2:]
from tier_rig import page, setup_of, end_of
from gapless.offload.tiers.disk import DiskTier
setup = setup_of(sys.argv[1], pages=6)
tier = DiskTier(setup)
print("up", flush=True)
for job in range(1, 10**9):
    tier.store(job, [page(setup, job % 40, 0, 0)])
    end_of(tier, job)
"""


@pytest.fixture
def reopened(opened, tmp_path):
    """Opens a tier in the test's folder, once the one before it is closed: the tier and its setup."""
    before = []

    def again(pages=64, namespace=NAMESPACE):
        for one in before:
            one.close()
        setup = setup_of(str(tmp_path), pages, namespace)
        before.append(opened(DiskTier(setup)))
        return before[-1], setup

    return again


@pytest.fixture
def filled(tmp_path):
    """Makes a folder with the first pages."""

    def fill(count=4):
        tier = DiskTier(setup := setup_of(str(tmp_path)))
        stored(tier, setup, *range(count))
        tier.close()

    return fill


def flip(path, at, bits=0x10):
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


def test_another_process_finds_the_pages_of_the_first(filled, reopened):
    filled()
    tier, setup = reopened()
    assert has(tier, 0, 1, 2, 3, 4) == [True] * 4 + [False]
    end, data = loaded(tier, setup, 3, 0)
    assert not end.failed and data == [content(3), content(0)] and end.nbytes == 2 * SLOT


def test_the_least_recently_used_page_makes_room_and_a_restart_keeps_the_order(reopened, tmp_path):
    tier, setup = reopened(pages=3)
    stored(tier, setup, 0, 1, 2)
    tier.touch([key(0)])
    stored(tier, setup, 3)
    assert has(tier, 0, 1, 2, 3) == [True, False, True, True]
    tier, setup = reopened(pages=3)
    stored(tier, setup, 4)
    assert has(tier, 0, 2, 3, 4) == [True, False, True, True]
    assert (tmp_path / PAGES_FILE).stat().st_size <= 3 * SLOT


def test_a_smaller_tier_keeps_the_pages_that_fit_it(filled, reopened, tmp_path):
    filled(4)
    tier, setup = reopened(pages=2)
    assert sum(has(tier, 0, 1, 2, 3)) == 2 and (tmp_path / PAGES_FILE).stat().st_size == 2 * SLOT
    kept = [number for number in range(4) if has(tier, number) == [True]]
    assert loaded(tier, setup, *kept)[1] == [content(number) for number in kept]


def test_a_dropped_page_stays_away_after_a_restart(reopened, opened, tmp_path):
    tier, setup = reopened()
    stored(tier, setup, 0, 1)
    tier.drop([key(0)])
    copied = shutil.copytree(tmp_path, tmp_path / "as it was when the process was killed")
    assert (copied / LOG).stat().st_size == DISK_BLOCK + 3 * RECORD_BYTES
    assert has(opened(DiskTier(setup_of(str(copied)))), 0, 1) == [False, True]


def patched(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


DAMAGE = {
    "a torn record": (lambda folder: os.truncate(folder / LOG, DISK_BLOCK + 4 * RECORD_BYTES - 5), {0, 1, 2}),
    "the key of another page": (lambda folder: patched(folder / LOG, DISK_BLOCK, key(9)), {1, 2, 3}),
    "pages cut short": (lambda folder: os.truncate(folder / PAGES_FILE, 2 * SLOT + 100), {0, 1}),
} | {
    f"a changed record at {at}": (lambda folder, at=at: flip(folder / LOG, DISK_BLOCK + RECORD_BYTES + at), {0, 2, 3})
    for at in (0, 35, 36, 40, 48, 56, 60, RECORD_BYTES - 1)
} | {
    f"a foreign log {log[:4]}": (lambda folder, log=log: (folder / LOG).write_bytes(log), set())
    for log in FOREIGN
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_has_the_pages_that_are_whole_and_takes_new_ones(filled, reopened, tmp_path, damage):
    harm, whole = DAMAGE[damage]
    filled()
    harm(tmp_path)
    tier, setup = reopened()
    assert has(tier, *range(10)) == [number in whole for number in range(10)]
    stored(tier, setup, 7)
    tier, setup = reopened()
    assert loaded(tier, setup, 7, *whole)[1] == [content(number) for number in (7, *whole)]


def test_two_records_of_one_slot_are_the_later_one(filled, reopened, tmp_path):
    filled(2)
    with (tmp_path / LOG).open("ab") as log:
        log.write(DiskRecord(key(5), 0, 99, 0, SLOT).packed(NAMESPACE.digest))
    tier, _ = reopened()
    assert has(tier, 0, 1, 5) == [False, True, True]


def test_a_load_from_a_file_that_is_truncated_under_it_keeps_the_good_pages_in_front(reopened, tmp_path):
    tier, setup = reopened()
    stored(tier, setup, 0, 1, 2, 3)
    os.truncate(tmp_path / PAGES_FILE, 2 * SLOT + 100)
    end, data = loaded(tier, setup, 0, 1, 2, 3)
    assert end.failed and data == [content(0), content(1)]


def test_pages_of_another_namespace_are_not_there(filled, reopened):
    filled()
    tier, setup = reopened(namespace=Namespace.of({"model": "another"}))
    assert has(tier, 0, 1) == [False, False]
    stored(tier, setup, 0, version=5)
    tier, _ = reopened()
    assert has(tier, 0, 1) == [False, False], "the other one has taken the directory"


def test_one_directory_has_one_engine(tmp_path):
    tier = DiskTier(setup_of(str(tmp_path)))
    with pytest.raises(ConfigError, match="is in use by another engine: give each its own"):
        DiskTier(setup_of(str(tmp_path)))
    tier.close()
    DiskTier(setup_of(str(tmp_path))).close()


def test_a_directory_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "a-file").touch()
    for target in (tmp_path / "a-file" / "below", "/proc/nowhere"):
        with pytest.raises(ConfigError, match=f"kv_tiers: disk:{target}: [A-Z]"):
            DiskTier(setup_of(str(target)))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc/self/fd, which is Linux's")
def test_a_tier_that_cannot_open_leaves_no_file_open(tmp_path):
    (tmp_path / PAGES_FILE).mkdir()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="Is a directory"):
        DiskTier(setup_of(str(tmp_path)))
    assert os.listdir("/proc/self/fd") == before


def test_a_second_close_closes_no_file_of_others(reopened):
    tier, setup = reopened()
    stored(tier, setup, 0)
    tier.close()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    tier.close()
    for other in others:
        os.close(other)
    tier, _ = reopened()
    assert has(tier, 0) == [True]
    tier.close()


@pytest.mark.parametrize("size", [2**50, 2**62])
def test_a_tier_larger_than_its_filesystem_is_refused_at_once(tmp_path, size):
    with pytest.raises(ConfigError, match=r"asks for [\d,]+ bytes of a filesystem that has [\d,]+: give less"):
        DiskTier(setup_of(str(tmp_path))._replace(nbytes=size))


def test_a_tier_too_small_for_a_page_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no page"):
        DiskTier(setup_of(str(tmp_path), 0))


def test_the_log_is_rewritten_before_it_grows_without_bound(reopened, tmp_path):
    tier, setup = reopened(pages=2)
    for number in range(2_000):
        stored(tier, setup, number % 5, job=number)
    assert (tmp_path / LOG).stat().st_size < DISK_BLOCK + 1_100 * RECORD_BYTES
    assert loaded(tier, setup, 4)[1] == [content(4)]


def no_space(monkeypatch, refuses):
    """Have the system refuse some writes, by their size and place; returns what writes all."""
    write = os.pwrite

    def full(file, data, at):
        if refuses(len(data), at):
            raise OSError(28, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    return write


def test_a_full_disk_refuses_a_page_and_gives_up_an_old_one(reopened, monkeypatch):
    tier, setup = reopened()
    stored(tier, setup, 0, 1)
    no_space(monkeypatch, lambda size, at: size == SLOT and at >= 2 * SLOT)
    end = stored(tier, setup, 2)
    assert end.failed and end.checksums == () and has(tier, 0, 1, 2) == [False, True, False]
    assert not stored(tier, setup, 2).failed and loaded(tier, setup, 1, 2)[1] == [content(1), content(2)]


def test_a_log_without_space_costs_no_slot(reopened, monkeypatch):
    tier, setup = reopened(pages=2)
    stored(tier, setup, 0, 1)
    write = no_space(monkeypatch, lambda size, at: size == RECORD_BYTES)
    with pytest.raises(OSError, match="No space"):
        tier.store(2, [page(setup, 2, 2, 0)])
    monkeypatch.setattr(os, "pwrite", write)
    stored(tier, setup, 3, 4)
    assert has(tier, 3, 4) == [True, True]


def test_a_log_that_cannot_be_rewritten_is_written_on_and_no_other_file_is(reopened, tmp_path, monkeypatch):
    monkeypatch.setattr("gapless.offload.tiers.disk.SPARE_RECORDS", 0)
    tier, setup = reopened(pages=2)
    stored(tier, setup, 0, 1)
    open_ = os.open

    def refused(path, *args):
        raise OSError("too many open files")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OSError, match="too many open files"):
        for number in range(2, 9):
            tier.store(number, [page(setup, number, 2, 0)])
    monkeypatch.setattr(os, "open", open_)
    other = open_(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    tier.poll()
    stored(tier, setup, 9)
    assert os.fstat(other).st_size == 0
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OSError, match="too many open files"):
        tier.close()
    monkeypatch.setattr(os, "open", open_)
    os.close(other)
    assert has(reopened(pages=2)[0], 9) == [True]


def direct_here(folder):
    """Whether a file of this folder's filesystem can be written past the page cache."""
    with mmap.mmap(-1, DISK_BLOCK) as block:
        try:
            file = os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        except OSError:
            return False
        try:
            return os.pwrite(file, block, 0) == DISK_BLOCK
        except OSError:
            return False
        finally:
            os.close(file)


def passes_by_the_cache(path):
    """Whether this process has the file open with O_DIRECT, as the system says."""
    (file,) = [name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == str(path)]
    flags = next(line for line in Path(f"/proc/self/fdinfo/{file}").read_text().splitlines() if "flags" in line)
    return bool(int(flags.split()[1], 8) & os.O_DIRECT)


def test_pages_pass_by_the_page_cache_if_the_filesystem_can(reopened, tmp_path):
    if not (sys.platform == "linux" and direct_here(tmp_path)):
        pytest.skip("the filesystem of temporary files has no O_DIRECT")
    for _ in range(2):  # a new file, and one that is there
        tier, setup = reopened()
        assert tier.direct and passes_by_the_cache(tmp_path.resolve() / PAGES_FILE)
        stored(tier, setup, 0, 1)
        assert loaded(tier, setup, 1, 0)[1] == [content(1), content(0)]
        assert passes_by_the_cache(tmp_path.resolve() / PAGES_FILE)
        tier.close()


def test_a_filesystem_without_o_direct_is_read_through_the_page_cache(reopened, monkeypatch):
    change = fcntl.fcntl

    def refusing(file, command, flags=0):
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return change(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    tier, setup = reopened()
    assert not tier.direct
    stored(tier, setup, 0)
    assert loaded(tier, setup, 0)[1] == [content(0)]


def test_slots_that_do_not_begin_with_a_block_are_read_through_the_page_cache(opened, tmp_path):
    setup = setup_of(str(tmp_path))
    odd = setup._replace(memory=(memoryview(bytearray(setup.memory[0].nbytes + 1))[1:],))
    tier = opened(DiskTier(odd))
    assert not tier.direct
    slot_of(odd, 3)[:] = content(3)
    stored(tier, odd, 3)
    assert loaded(tier, odd, 3)[1] == [content(3)]


@pytest.mark.process
def test_a_process_that_is_killed_while_it_writes_leaves_a_tier_that_opens(reopened, tmp_path):
    found = 0
    for turn in range(1, 5):
        command = [sys.executable, "-c", CHILD, str(tmp_path), *sys.path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
            size = (tmp_path / LOG).stat().st_size
            until(lambda size=size, turn=turn: (tmp_path / LOG).stat().st_size >= size + 7 * turn * RECORD_BYTES)
            child.send_signal(signal.SIGKILL)
        tier, setup = reopened(pages=6)
        there = [number for number in range(40) if has(tier, number) == [True]]
        found += len(there)
        for number in there:
            end, (data,) = loaded(tier, setup, number)
            # What was half written has another checksum, which the device computes.
            assert data == content(number) or end.checksums != (page(setup, number, 1, 0).checksum,)
        tier.close()
    assert found > 4


def test_a_description_tells_the_contents_of_a_directory(filled, tmp_path):
    filled(3)
    facts = describe(tmp_path)
    assert facts["pages of"] == {"model": "checksum", "page_size": 4}
    assert (facts["slots"], facts["used"], facts["used_bytes"]) == (64, 3, 3 * SLOT)
    os.truncate(tmp_path / PAGES_FILE, 2 * SLOT)
    assert describe(tmp_path)["used"] == 2, "what a tier finds there when it opens it"
    (tmp_path / PAGES_FILE).unlink()
    assert describe(tmp_path)["used"] == 0
    (tmp_path / LOG).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="is no index of a disk tier"):
        describe(tmp_path)
    with pytest.raises(ConfigError, match="name the directory of a disk tier"):
        describe(tmp_path / "nowhere")
