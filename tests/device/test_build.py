"""The builder of C++ sources: one library for each set of inputs, and a reason where there is none."""

from __future__ import annotations

import errno
import itertools
import os
import platform
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from gapless.base.errors import CaptureError, UserError
from gapless.base.host import cache_folder
from gapless.cli import native as native_setup
from gapless.comm import shared
from gapless.device import CpuDevice, build, compiling, cpu_native
from gapless.kernels import native
from gapless.loop import mask_threads

PLAIN = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real compiler behind a script that keeps count, with a cache of its own; gives the file with its calls."""
    real = compiling.compiler()
    if real is None:
        pytest.skip("there is no C++ compiler")
    calls, script = tmp_path / "calls", tmp_path / "cxx"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {real} "$@"\n')
    script.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "outcomes", {})
    monkeypatch.setattr(build, "modules", {})
    return calls


def source(folder: Path, text: str = PLAIN, name: str = "plain.cpp") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_cache_has_it_the_second_time(compiler: Path, tmp_path: Path) -> None:
    first = build.build("plain", [source(tmp_path)])
    assert first.reason == "" and first.library is not None and first.seconds > 0
    assert first.library.parent == tmp_path / "cache" / "gapless" / "native"
    assert len(compiler.read_text().splitlines()) == 2, "compiled and linked"
    assert build.build("plain", [source(tmp_path)]) == first._replace(seconds=0.0)
    assert len(compiler.read_text().splitlines()) == 2


def test_a_library_that_several_want_at_once_is_built_once(compiler: Path, tmp_path: Path) -> None:
    """The lock is one of files: it holds threads of one process apart as it does processes."""
    path, found = source(tmp_path), []
    threads = [threading.Thread(target=lambda: found.append(build.build("plain", [path]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({outcome.library for outcome in found}) == 1 and found[0].library is not None
    assert len(compiler.read_text().splitlines()) == 2


def test_a_lock_that_is_held_too_long_is_an_error_that_names_its_holder(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.2)
    lock = cache_folder(build.CACHE_FOLDER) / "plain.lock"
    with build.only_one(lock, 0), pytest.raises(UserError) as raised:
        build.build("plain", [source(tmp_path)])
    assert str(raised.value) == (
        f"{lock} is still locked by process {os.getpid()} on {platform.node()} after 0.2 s: end that process if it "
        "hangs, or start again when it is ready"
    )
    assert build.build("plain", [source(tmp_path)]).library is not None, "the lock is free again"


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    """A process that waits gets it, whatever the file says of its last holder."""
    lock, got = tmp_path / "plain.lock", threading.Event()
    holds = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(); time.sleep(99)"

    def wait() -> None:
        with build.only_one(lock, 30):
            got.set()

    with subprocess.Popen([sys.executable, "-uc", holds, lock], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(4 * build.LOCK_LOOK_SECONDS), "two processes have one lock"
        lock.write_text("process 1 on nowhere, and more of it than the next one writes")
        holder.kill()
        assert got.wait(30)
        waiting.join()
    assert lock.read_text() == f"process {os.getpid()} on {platform.node()}"


def test_a_change_that_matters_makes_another_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source(tmp_path)
    keys = [build.library_key("plain", [path])]
    keys += [build.library_key("other", [path]), build.library_key("plain", [path, source(tmp_path, "", "plain.h")])]
    source(tmp_path, PLAIN.replace("42", "43"))
    keys.append(build.library_key("plain", [path]))
    for where, name, value in (
        (build, "FLAGS", (*compiling.FLAGS, "-g")), (build, "levels", lambda: [("-march=another",)]),
        (build, "_processor", lambda: "another"), (torch, "__version__", "9.9"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            keys.append(build.library_key("plain", [path]))
    assert len(set(keys)) == len(keys)
    assert build.library_key("plain", [path]) == keys[3]


def test_an_error_of_the_compiler_is_the_reason(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = source(tmp_path, "int f() { return nowhere; }\n", "bad.cpp"), source(tmp_path)
    outcome = build.operators("plain", [bad, good])
    assert outcome.library is None and "error" in outcome.reason and "nowhere" in outcome.reason
    assert caplog.messages == [f"C++ (plain) is not there, and work on the CPU is slower: {outcome.reason}"]
    assert not list((tmp_path / "cache").rglob("*.so")) and not list((tmp_path / "cache").rglob("*.o"))
    assert build.module("silent", [source(tmp_path, "int g() { return nothing; }\n")], warns=False) is None
    assert len(caplog.messages) == 1 and "nothing" in build.outcomes["silent"].reason


def refusing(compiler: Path, flag: str) -> None:
    """Make the compiler one that does not know a flag."""
    script = compiler.parent / "cxx"
    first, *rest = script.read_text().splitlines()
    script.write_text(
        "\n".join([first, f'case " $* " in *" {flag} "*) echo "error: unknown {flag}"; exit 1;; esac', *rest])
    )


def test_a_source_that_does_not_compile_for_all_of_the_processor_is_compiled_for_less_of_it(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "levels", lambda: [("-Dmost",), ("-Dless",), ()])
    refusing(compiler, "-Dmost")
    built = build.build("plain", [source(tmp_path)])
    assert built.library is not None and built.reason == "" and built.flags == "-Dless"
    assert built.fallback.startswith("-Dmost: ") and built.fallback.endswith("failed: error: unknown -Dmost")
    assert caplog.messages == [f"C++ (plain) is not compiled for all of this processor: {built.fallback}"]
    calls = len(compiler.read_text().splitlines())
    assert build.build("plain", [source(tmp_path)]) == built._replace(seconds=0.0), "the cache knows why"
    assert len(compiler.read_text().splitlines()) == calls


def test_a_source_that_compiles_for_no_processor_has_the_reason_of_the_first_try(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "levels", lambda: [("-Dmost",), ("-Dless",)])
    refusing(compiler, "-Dmost"), refusing(compiler, "-Dless")
    assert "unknown -Dmost" in build.build("plain", [source(tmp_path)]).reason


def test_a_compiler_that_does_not_end_is_not_asked_again(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.2)
    script = compiler.parent / "cxx"
    script.write_text(script.read_text().replace("exec", "exec sleep 60 #"))
    reason = build.build("plain", [source(tmp_path)]).reason
    assert reason == f"{script} has not ended after 0.2 s" and len(compiler.read_text().splitlines()) == 1


def test_a_compiler_that_is_killed_does_not_leave_a_lesser_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "levels", lambda: [("-Dmost",), ()])
    script = compiler.parent / "cxx"
    script.write_text(script.read_text().replace("exec", "kill -9 $$; exec"))
    found = build.build("plain", [source(tmp_path)])
    assert found.library is None and "was stopped: signal 9" in found.reason
    assert len(compiler.read_text().splitlines()) == 1


@pytest.mark.process
def test_files_that_include_torch_are_compiled_as_one(compiler: Path, tmp_path: Path) -> None:
    texts = {
        "one.cpp": '#include "ours.h"\nextern "C" int one() { return 1; }\n',
        "two.cpp": '#include <pybind11/pybind11.h>\nextern "C" int two() { return 2; }\n',
        "ours.h": "#pragma once\n#include <c10/macros/Macros.h>\n",
    }
    sources = [source(tmp_path), *(source(tmp_path, text, name) for name, text in texts.items())]
    assert build.build("plain", sources).reason == ""
    *compiled, linked = compiler.read_text().splitlines()  # two at once, in any order
    glue, plain = sorted(compiled, key=lambda call: "plain.cpp" in call)
    assert "glue.cpp" in glue and compiling.GLUE in glue and "plain.cpp" in plain and compiling.GLUE not in plain
    assert linked.count(".o ") == 2


def test_no_more_is_compiled_at_once_than_there_are_cores(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "usable_cores", lambda: 2)
    script, lines = compiler.parent / "cxx", compiler.parent / "lines"
    two_run = f"until test $(grep -c + {lines}) -ge 2; do sleep 0.01; done"
    script.write_text(script.read_text().replace("exec", f"echo + >> {lines}; {two_run}; echo - >> {lines}; exec"))
    texts = [PLAIN.replace("answer", f"answer_{i}") for i in range(5)]
    files = [source(tmp_path, text, f"{i}.cpp") for i, text in enumerate(texts)]
    assert build.build("plain", files).reason == ""
    running = list(itertools.accumulate(1 if sign == "+" else -1 for sign in lines.read_text().split()))
    assert len(running) == 12 and max(running) == 2


def test_a_library_that_cannot_be_loaded_is_a_reason(compiler: Path, tmp_path: Path) -> None:
    path = source(tmp_path, 'extern "C" int missing_symbol();\nint there = missing_symbol();\n')
    assert build.operators("plain", [path]).reason.startswith("built, but not loaded: ")
    assert build.module("another", [source(tmp_path)]) is None
    assert "built, but not loaded" in build.outcomes["another"].reason


def test_a_build_that_was_cut_off_on_disk_is_built_again(compiler: Path, tmp_path: Path) -> None:
    library = build.build("plain", [source(tmp_path)]).library
    assert library is not None
    whole = library.stat().st_size
    for left in (0, 60, whole // 2, whole - 1):
        os.truncate(library, left)
        assert build.build("plain", [source(tmp_path)]).library == library and library.stat().st_size == whole


def test_a_reason_is_said_once_and_not_for_each_library(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for name in ("plain", "other"):
        assert build.operators(name, [source(tmp_path)]).library is None
    reason = "there is no C++ compiler (g++ or clang++)"
    assert caplog.messages == [f"C++ (plain) is not there, and work on the CPU is slower: {reason}"]


def test_a_folder_that_others_can_write_is_not_used(compiler: Path, tmp_path: Path) -> None:
    folder = cache_folder(build.CACHE_FOLDER)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    outcome = build.build("plain", [source(tmp_path)])
    assert outcome.library is None and "can be written by others" in outcome.reason
    assert outcome.reason.endswith("set XDG_CACHE_HOME to a folder of yours")


def test_a_folder_that_a_loose_umask_has_made_or_left_is_taken_from_others(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    before = os.umask(0o002)
    try:
        assert stat.S_IMODE(cache_folder("a").parent.stat().st_mode) == 0o700
        (tmp_path / "new" / "gapless").chmod(0o775)
        assert stat.S_IMODE(cache_folder("b").parent.stat().st_mode) == 0o755
    finally:
        os.umask(before)


def test_files_of_a_killed_process_are_cleared_away(compiler: Path, tmp_path: Path) -> None:
    folder = cache_folder(build.CACHE_FOLDER)
    for name in ("plain-x1", "other-x1"):
        (folder / name).mkdir()
        (folder / name / "half.o").touch()
    assert build.build("plain", [source(tmp_path)]).reason == ""
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["other-x1"]


def test_a_cache_that_cannot_be_written_still_serves(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.build("plain", [source(tmp_path)])

    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "utime", refuse)
    assert build.build("plain", [source(tmp_path)]) == first._replace(seconds=0.0)


def test_a_user_without_a_home_gets_a_reason(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    outcome = build.build("plain", [source(tmp_path)])
    assert outcome.library is None and "home directory" in outcome.reason


def test_old_builds_are_forgotten(compiler: Path, tmp_path: Path) -> None:
    folder = cache_folder(build.CACHE_FOLDER)
    for number in range(12):
        old = folder / f"plain-{number}.so"
        old.touch()
        for suffix in (".flags", ".json"):
            old.with_suffix(suffix).touch()
        os.utime(old, (number, number))
    outcome = build.build("plain", [source(tmp_path)])
    left = {path.name for path in folder.glob("*.so")}
    assert outcome.library is not None
    assert left == {outcome.library.name, *(f"plain-{number}.so" for number in range(5, 12))}
    assert {path.stem for path in folder.glob("*.json")} == {f"plain-{number}" for number in range(5, 12)}
    assert {path.stem for path in folder.glob("*.flags")} == {Path(name).stem for name in left}


def test_setting_up_says_what_came_of_it(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)  # the libraries below are not there
    names = cpu_native.STREAM_NAME, native.NAME, mask_threads.MASKS_EXTENSION, shared.COMM_NAME
    for name, seconds in zip(names, (3.0, 4.0, 1.0, 2.0), strict=True):
        build.outcomes[name] = build.Outcome(Path("a.so"), "", seconds)
    native_setup.main()
    build.outcomes.update({name: build.Outcome(Path("a.so"), "", 0.0) for name in build.outcomes})
    native_setup.main()
    build.outcomes.clear()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    native_setup.main()
    assert capsys.readouterr().out.splitlines() == [
        "C++: built in 4 s",  # side by side
        "C++: built before",
        "C++: not built, so work on the CPU is slower: there is no C++ compiler (g++ or clang++)",
    ]


def test_a_build_is_logged_before_it_begins(compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gapless.start")
    path = source(tmp_path)
    build.build("plain", [path])
    build.build("plain", [path])
    assert caplog.messages == ["compiling C++ for this machine and this torch, once: 0 of 1 files, 0 s"]


def test_without_a_compiler_the_cpu_device_runs_in_python(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert cpu_native.load() is None and cpu_native.reason() == "there is no C++ compiler (g++ or clang++)"
    device = CpuDevice(threads=1)
    ran: list[int] = []
    device.run(ran.append, 1)
    assert ran == [1] and not device.caps.captures
    with pytest.raises(CaptureError, match="no native streams: there is no C"):
        device.capture("k", int)
    device.close()
