"""What a wheel brings compiled: chosen by processor, torch and Python, loaded without a compiler."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from gapless.device import build, compiling, prebuilt
from gapless.device.prebuilt import V2, V3_FLAGS, V4, VARIANTS, Variant

PLAIN = 'extern "C" int answer() { return 42; }\n'
RELEASE = prebuilt.minor(torch.__version__)
ANY = Variant("any", platform.machine(), ())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's folder, for this machine, with a cache that is empty and no compiler."""
    made = tmp_path / "prebuilt"
    made.mkdir()
    monkeypatch.setattr(prebuilt, "PREBUILT", made)
    monkeypatch.setattr(prebuilt, "VARIANTS", (ANY,))
    monkeypatch.setattr(build, "outcomes", {})
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def source(folder: Path) -> Path:
    path = folder / "plain.cpp"
    path.write_text(PLAIN)
    return path


def bring(folder: Path, name: str = "plain", release: str = RELEASE) -> Path:
    tool = compiling.compiler()
    if tool is None:
        pytest.skip("there is no C++ compiler")
    library = folder / prebuilt.file_name(name, release, ANY)
    subprocess.run([tool, "-shared", "-fPIC", str(source(folder)), "-o", str(library)], check=True, timeout=60)
    return library


@pytest.mark.parametrize(
    ("machine", "has", "best"),
    [
        ("x86_64", {"sse2"}, None),
        ("x86_64", V2, "x86-64-v2"),
        ("x86_64", V3_FLAGS, "x86-64-v3"),
        ("x86_64", V3_FLAGS | {"avx512f"}, "x86-64-v3"),
        ("x86_64", V4 | {"avx512_vnni"}, "x86-64-v4"),
        ("x86_64", V4 | {"avx512_vnni", "avx512_bf16"}, "x86-64-v4-amx"),
        ("aarch64", {"asimd"}, "armv8"),
        ("aarch64", {"asimd", "asimddp", "bf16", "i8mm"}, "armv8"),
        ("aarch64", VARIANTS[-2].needs | {"asimd"}, "armv8.2-bf16"),
        ("riscv64", {"v"}, None),
    ],
)
def test_a_processor_gets_the_best_level_that_it_has(
    monkeypatch: pytest.MonkeyPatch, folder: Path, machine: str, has: set[str], best: str | None
) -> None:
    monkeypatch.setattr(prebuilt, "VARIANTS", VARIANTS)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(prebuilt, "processor_says", lambda name: " ".join(has))
    for variant in VARIANTS:
        (folder / prebuilt.file_name("kernels", RELEASE, variant)).touch()
    found = prebuilt.find("kernels")
    assert (found and found[1].name) == best
    if found:
        found[0].unlink()
        lesser = prebuilt.find("kernels")
        assert lesser is None or lesser[1].needs < found[1].needs


def test_a_processor_that_torch_may_not_use_whole_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(prebuilt, "processor_says", lambda name: " ".join(VARIANTS[0].needs))
    monkeypatch.setattr(compiling, "is_capped", lambda: True)
    assert next(v.name for v in VARIANTS if prebuilt.serves_here(v)) == "x86-64-v3"


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0", "2.13"), ("2.13.1+cu132", "2.13"), ("2.14.0.dev20261101", ""), ("2.14.0a0", "")]
)
def test_a_torch_that_is_no_release_has_no_minor_version(version: str, release: str) -> None:
    assert prebuilt.minor(version) == release


def test_a_library_of_the_wheel_is_loaded_without_a_compiler(folder: Path, tmp_path: Path) -> None:
    library = bring(folder)
    outcome = build.operators("plain", [source(folder)])
    assert outcome[:4] == (library, "", 0.0, "prebuilt for any") and outcome.brought and outcome.notes is not None
    assert build.may_have("plain") and not build.may_have("other")
    assert outcome.notes.parent == tmp_path / "cache" / "gapless" / "native"
    assert outcome.notes.name.startswith(library.stem) and not list(outcome.notes.parent.iterdir())


def test_a_library_for_another_torch_or_switched_off_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring(folder, release="2.1")
    assert prebuilt.find("plain") is None
    bring(folder)
    assert prebuilt.find("plain") is not None
    monkeypatch.setenv(prebuilt.SWITCH, "0")
    assert prebuilt.find("plain") is None
    assert "no C++ compiler" in build.operators("plain", [source(folder)]).reason


def test_an_extension_of_another_python_is_left_alone(folder: Path) -> None:
    (folder / prebuilt.file_name(prebuilt.of_python("plain", "cpython-309"), RELEASE, ANY)).touch()
    assert prebuilt.find(prebuilt.of_python("plain")) is None
    assert build.module("plain", [source(folder)]) is None


def test_a_library_of_the_wheel_that_does_not_load_is_built_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = folder / prebuilt.file_name("plain", RELEASE, ANY)
    broken.write_bytes(b"of another machine")
    monkeypatch.setattr(build, "compiler", compiling.compiler)
    outcome = build.operators("plain", [source(folder)])
    assert outcome.library is not None and not outcome.brought
    assert outcome.notes == outcome.library.with_suffix(".json")
    assert "does not load, so it is built here" in caplog.messages[0] and str(broken) in caplog.messages[0]
