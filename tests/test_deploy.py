"""What carries gapless elsewhere: the wheel and the sdist have what they must, and the manifests of containers do."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from gapless.cli.serve import command
from gapless.device import build, compiling, prebuilt
from gapless.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[1]
RELEASE = prebuilt.minor(torch.__version__)


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    """deploy/wheel.py"""
    spec = importlib.util.spec_from_file_location("gapless_wheel", ROOT / "deploy" / "wheel.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tool() -> str:
    return compiling.compiler() or pytest.skip("there is no C++ compiler")


@pytest.mark.process
def test_a_library_of_the_wheel_is_loaded_beside_the_torch_that_is_here(wheels: ModuleType, tmp_path: Path) -> None:
    """It is linked with empty libraries of torch's names, and calls torch."""
    stubs, made, source = tmp_path / "stubs", tmp_path / "made", tmp_path / "small.cpp"
    stubs.mkdir(), made.mkdir()
    source.write_text(
        '#include <c10/core/CPUAllocator.h>\nextern "C" void* here() { return c10::GetCPUAllocator(); }\n'
    )
    wheels.make_stubs(tool(), stubs)
    target = next(wheels.jobs(prebuilt.platform.machine(), [], tool(), stubs)).target
    wheels.compile_all([wheels.Job("small.so", "small", [source], target._replace(level=()))], made)
    (library,) = made.iterdir()
    torch.ops.load_library(str(library))
    assert str(library) in torch.ops.loaded_libraries


def test_the_wheel_has_kernels_and_sums_for_each_level_and_extensions_for_each_python(wheels: ModuleType) -> None:
    wanted = list(wheels.jobs("x86_64", [sys.executable, sys.executable], "c++", Path("stubs")))
    levels = ["x86-64-v4-amx", "x86-64-v4", "x86-64-v3", "x86-64-v2"]
    tag = sys.implementation.cache_tag
    assert [job.file for job in wanted] == [
        *(f"{name}.torch{RELEASE}.{level}.so" for level in levels for name in ("kernels", "gapless_comm")),
        *(f"{name}.{tag}.torch{RELEASE}.x86-64-v2.so" for name in ("gapless_stream", "gapless_masks")),
    ]


@pytest.mark.process
def test_a_wheel_is_whole_and_asks_for_the_torch_of_its_libraries(wheels: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / f"kernels.torch{RELEASE}.x86-64-v3.so"
    library.write_bytes(b"compiled")
    made = wheels.pack([library], "x86_64", tmp_path / "dist")
    assert made.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(made) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert f"gapless/device/prebuilt/{library.name}" in names
    assert {"gapless/kernels/native/vec.h", "gapless/ui/index.html", "gapless/py.typed"} <= names
    assert any(re.fullmatch(r"gapless/demo/weights/.*\.safetensors", name) for name in names)
    assert re.findall(r"^Requires-Dist: (torch.*)", metadata, re.M) == [f"torch=={RELEASE}.*"]
    assert not any("/tests/" in name or name.endswith((".pyc", ".o")) for name in names)


@pytest.mark.process
def test_the_sdist_has_the_manual_and_no_tests(tmp_path: Path) -> None:
    stage = tmp_path / "stage"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", ".", ":!tests/*/*", ":!gapless/demo/weights"], cwd=ROOT, capture_output=True,
        text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("this is no git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, stage / name, follow_symlinks=False)
    code = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    subprocess.run([sys.executable, "-c", code], cwd=stage, check=True, capture_output=True, timeout=120)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CHANGELOG.md", "docs/index.md", "examples/README.md", "deploy/wheel.py", "Makefile"} <= names
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)


def test_the_image_gets_every_package_before_it_gets_gapless() -> None:
    """An edit of gapless must not install torch again."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)[1:]
    by_name = {stage.split()[2]: stage for stage in stages}
    for name in ("cpu", "cuda"):
        packages, last = by_name[f"{name}-packages"], by_name[name]
        assert packages.index("torch==2.13.0") < packages.index("COPY") and "COPY . ." not in packages
        assert last.startswith(f"{name}-packages AS") and "--no-deps" in last and "COPY" not in last
    assert "g++" not in by_name["cpu-packages"] + by_name["base"]
    done = subprocess.run(
        [sys.executable, "deploy/needed.py", "events"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert {"numpy>=1.26", "pyzmq>=26"} <= set(done.stdout.splitlines())


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text(encoding="utf-8")))


def served(words: list[str]) -> ServerConfig:
    """What a manifest's command line asks of `gapless serve`."""
    assert words[0] == "serve"
    return command().read(words[1:], {}).build(ServerConfig)


def test_compose_gives_a_server_its_port_its_volume_and_time_to_drain() -> None:
    (compose,) = documents("compose.yaml")
    targets = re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
    assert compose["services"].keys() == {"cpu", "cuda"}
    for service in compose["services"].values():
        config = served(service["command"])
        assert service["build"]["target"] in targets and (ROOT / "deploy" / service["build"]["context"]).samefile(ROOT)
        assert service["ports"] == [f"{config.port}:{config.port}"] and config.host == "0.0.0.0"
        assert int(service["stop_grace_period"].removesuffix("s")) >= config.drain_seconds + 10
        assert service["volumes"] == ["cache:/home/gapless/.cache"]


def test_a_pod_is_probed_at_its_port_and_has_time_to_leave_the_service_and_to_drain() -> None:
    deployment, service = documents("kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = served(container["args"])
    assert container["ports"] == [{"name": "http", "containerPort": config.port}] and config.host == "0.0.0.0"
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/health", "readiness": "/ready", "liveness": "/health",
    }  # fmt: skip
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + config.drain_seconds + 10
    assert container["resources"].keys() == {"requests", "limits"}
    assert pod["enableServiceLinks"] is False, "GAPLESS_PORT would be the address of the service"


def test_a_build_says_how_many_files_are_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool()
    phases: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("gapless.base.progress.show", lambda phase: phases.append(str(phase)))
    files = [tmp_path / f"{i}.cpp" for i in range(3)]
    for i, file in enumerate(files):
        file.write_text(f"int number{i}() {{ return {i}; }}\n")
    assert build.build("counted", files).library is not None
    assert phases[0] == f"{compiling.COMPILES}: 0 of 3 files, 0 s"
    assert re.fullmatch(rf"{re.escape(compiling.COMPILES)}: 3 of 3 files, \d+ s", phases[-1])
