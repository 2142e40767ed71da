"""`gapless doctor`."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_accelerator import child_environment

from gapless.base import host
from gapless.cli import checks
from gapless.cli.checks import Check
from gapless.cli.main import main
from gapless.device import build, compiling
from gapless.kernels import native
from gapless.kernels.native import Product
from gapless.kernels.native.speeds import Speed


def test_doctor_reports_every_check_of_this_machine(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    status = {c["name"]: c["status"] for c in report["checks"]}
    assert status["torch"] == status["machine"] == "ok"
    assert status["python"] == ("ok" if host.is_python_optimized() else "warn")
    assert {
        "libraries",
        "memory",
        "uv",
        "compiler",
        "cpu streams",
        "port",
        "demo model",
        "cpu device",
    } <= set(status)
    assert set(status.values()) <= {"ok", "warn", "fail"}
    assert (code == 0) == report["ok"] == ("fail" not in status.values())


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("'--prefix=/home/me/.pyenv/versions/3.11.7' '--enable-shared'", "warn"),
        ("'--prefix=/home/me/.pyenv/versions/3.11.7' '--enable-optimizations' '--with-lto'", "ok"),
        ("'--enable-shared' '--prefix=/usr' '--libdir=/usr/lib/x86_64-linux-gnu'", "ok"),
        ("", "warn"),
        (None, "ok"),
    ],
    ids=("by pyenv", "with optimizations", "by Debian", "without arguments", "unknown"),
)
def test_a_python_built_without_optimizations_is_a_warning(monkeypatch, arguments, status):
    monkeypatch.setattr("sysconfig.get_config_var", {"CONFIG_ARGS": arguments}.get)
    (check,) = checks.python()
    assert check.status == status
    assert ("--enable-optimizations" in check.detail) == (status == "warn")


def test_native_parts_are_told_with_the_reason(monkeypatch):
    found = {check.name: check for check in checks.native()}
    told = ["compiler", "cpu streams", "cpu kernels", "mask threads", "ranks", "cpu products"]
    speeds = ["cpu float32", "cpu bfloat16", "cpu float16"] if native.load() else ["cpu dtype"]
    assert list(found) == told + speeds
    for name in told[1:5]:
        assert found[name].detail.startswith("native: built" if found[name].status == "ok" else "not built, ")
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    reason = build.Outcome(None, "there is no C++ compiler", 0.0)
    names = "gapless_stream", "kernels", "gapless_masks", "gapless_comm"
    monkeypatch.setattr(build, "outcomes", dict.fromkeys(names, reason))
    found = {check.name: check for check in checks.native()}
    assert list(found) == [*told, "cpu dtype"] and {check.status for check in found.values()} == {"warn"}
    assert found["cpu streams"].detail == (
        "not built, a Python thread runs the steps, without graphs: there is no C++ compiler"
    )


def test_the_flags_of_the_compiler_are_told_and_why_they_are_not_those_for_all_of_the_processor():
    built = build.Outcome(Path("cache/kernels-1.so"), "", 12.4, "-march=native")
    assert checks.cpu_library("cpu kernels", built, "slow") == Check(
        "cpu kernels", "ok", "native: built now, in 12 s, -march=native, in cache"
    )
    less = built._replace(
        seconds=0.0, flags="-march=x86-64-v3 -mtune=native", fallback="-march=native: g++ failed: old"
    )
    assert checks.cpu_library("cpu kernels", less, "slow") == Check(
        "cpu kernels", "warn", "native: built, -march=x86-64-v3 -mtune=native; -march=native: g++ failed: old; remove "
        "cache/kernels-1.so to try another compiler",
    )  # fmt: skip


@pytest.mark.parametrize(
    "product, shapes, status, parts",
    [
        (Product("bf16_dot", ""), [], "ok", ["bfloat16: bf16_dot"]),
        (Product("amx", ""), [], "ok", ["GAPLESS_AMX=0 turns it off", "the first load of a model measures it"]),
        (Product("amx", ""), ["8 x 8: amx", "8 x 9: amx"], "ok", ["; 8 x 8: amx; 8 x 9: amx"]),
        (Product("bf16_dot", "amx: refused"), [], "warn", ["bfloat16: bf16_dot; amx: refused"]),
    ],
)
def test_the_product_that_runs_is_named_or_warned_of(product, shapes, status, parts):
    check = checks.cpu_products(product, shapes)
    assert check.status == status and all(part in check.detail for part in parts)


def test_the_speed_of_each_dtype_is_told_as_a_share_of_the_vector_units(monkeypatch):
    found = Speed(torch.bfloat16, "amx", 6.25, "avx512", 0.514)
    monkeypatch.setattr("gapless.kernels.native.speeds.speeds", lambda: [found])
    assert list(checks.cpu_speeds()) == [
        Check(
            "cpu bfloat16", "ok",
            "products of prompts: amx, 6.25 of the vector unit's peak in float32; attention: avx512, 0.51",
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gain", "ends"),
    [(2.25, "2.2 x as fast as bfloat16: --dtype auto takes float32"), (1.2, "1.2 x as fast as bfloat16")],
)
def test_float32_that_is_faster_than_torchs_bfloat16_is_told(monkeypatch, gain, ends):
    monkeypatch.setattr("gapless.kernels.dtypes.float32_gains", lambda dtype: gain)
    check = checks.without_cpp()
    assert check.status == "warn" and check.detail == f"torch multiplies float32 {ends}"


UNKNOWN = "unknown to the compiler"


@pytest.mark.parametrize(
    ("flags", "dot", "missing", "expected"),
    [
        ("avx2", False, UNKNOWN, Product("avx512", "")),
        ("avx512_bf16", False, UNKNOWN, Product("avx512", "avx512_bf16: unknown to the compiler")),
        ("avx512_bf16", True, UNKNOWN, Product("bf16_dot", "")),
        ("avx512_bf16 amx_bf16", True, "gave wrong sums", Product("bf16_dot", "amx: gave wrong sums")),
        ("avx512_bf16 amx_bf16", True, "", Product("amx", "")),
    ],
)
def test_an_instruction_set_that_is_missing_has_its_reason(monkeypatch, flags, dot, missing, expected):
    ops = SimpleNamespace(has_bf16_dot=lambda: dot, amx_missing=lambda: missing, vector_unit=lambda: "avx512")
    monkeypatch.setattr(native, "load", lambda: object())
    monkeypatch.setattr("torch.ops.gapless", ops, raising=False)
    monkeypatch.setattr("gapless.base.host.processor_says", lambda name: flags)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    assert native.product() == expected


def test_a_processor_that_the_environment_keeps_to_avx2_has_its_reason(monkeypatch):
    ops = SimpleNamespace(has_bf16_dot=lambda: False, vector_unit=lambda: "avx2")
    monkeypatch.setattr(native, "load", lambda: object())
    monkeypatch.setattr("torch.ops.gapless", ops, raising=False)
    monkeypatch.setattr(compiling, "is_capped", lambda: True)
    assert native.product() == Product("avx2", "ATEN_CPU_CAPABILITY=avx2 keeps AVX-512 from it")


def test_the_cpu_device_computes():
    assert [(check.name, check.status) for check in checks.devices(None)] == [("cpu device", "ok")]


@pytest.mark.process
def test_the_fake_accelerator_is_reported_with_its_capabilities():
    done = subprocess.run(
        [sys.executable, "-m", "gapless", "doctor", "demo", "--device", "fake"], env=child_environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "kernels: plain torch, graphs: yes, streams: four" in done.stdout, done.stdout + done.stderr
    assert re.search(r"fake device.*came back over two streams", done.stdout), done.stdout


def fixed(*found: Check) -> Any:
    return lambda port, config: list(found)


def test_a_check_that_fails_gives_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(checks, "run_checks", fixed(Check("a", "ok", "fine"), Check("b", "warn", "hm")))
    assert main(["doctor"]) == 0
    assert (
        capsys.readouterr().out
        == "ok    a              fine\nwarn  b              hm\n2 checks: 0 failed, 1 to look at\n"
    )
    monkeypatch.setattr(checks, "run_checks", fixed(Check("a", "fail", "broken")))
    assert main(["doctor"]) == 1
    assert "1 checks: 1 failed, 0 to look at" in capsys.readouterr().out


def test_a_taken_port_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (check,) = checks.free_port(port)
        assert check.status == "warn" and f"{port} cannot be taken" in check.detail
    (check,) = checks.free_port(99_999)
    assert check.status == "warn"


def test_a_check_that_breaks_is_a_failure(monkeypatch):
    def broken() -> Iterator[Check]:
        yield Check("memory", "ok", "seen before the break")
        raise OSError("no such counter")

    monkeypatch.setattr(checks, "memory", broken)
    monkeypatch.setattr(checks, "devices", lambda config: [])
    found = [c for c in checks.run_checks(0) if c.name == "memory"]
    assert found[-1] == Check("memory", "fail", "OSError: no such counter")


def test_a_folder_of_the_hub_that_is_a_file_fails_with_the_mend(monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (check,) = checks.hub()
    text = f"{home / 'token'}: Not a directory: set HF_HOME to a folder that can be read"
    assert check == ("hub", "fail", text)


@pytest.mark.parametrize(
    "version, status", [("2.10.1", "warn"), ("2.11.0", "ok"), ("2.15.1+cu132", "ok"), ("2.16.0", "warn")]
)
def test_a_version_of_torch_has_its_status(monkeypatch, version, status):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert [c.status for c in checks.torch_version()] == [status]


def test_an_old_python_fails(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    assert [c.status for c in checks.python()] == ["fail"]


def test_missing_libraries_say_what_needs_them(monkeypatch):
    monkeypatch.setattr(checks, "NEEDED_BY", {"numpy": "everything", "no-such-library": "serve"})
    first, second = checks.libraries()
    assert first.detail.startswith("numpy ")
    assert second == Check("missing", "warn", "no-such-library (for serve)")
