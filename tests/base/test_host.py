"""Cores and memory of this process, with the limits of a container."""

from __future__ import annotations

import pytest

from gapless.base import host


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1)])
def test_a_container_limits_the_cores(tmp_path, monkeypatch, quota, cores):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert host.usable_cores() == cores


def test_a_container_limits_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n")
    assert host.memory() == (800 * 1024, 1000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1024\n")
    assert host.memory() == (800 * 1024, 1000 * 1024)
    (tmp_path / "memory.max").write_text("10240\n")
    assert host.memory() == (9 * 1024, 10 * 1024)
    (tmp_path / "memory.current").write_text("8192\n")
    (tmp_path / "memory.stat").write_text("anon 2048\nfile 6144\ninactive_file 4096\nactive_file 1024\n")
    assert host.memory() == (7 * 1024, 10 * 1024), "cached file pages come back when memory is asked for"


def test_the_first_processor_is_described(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "cpuinfo")
    assert host.processor_says("flags") == ""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu amx_bf16\n\nprocessor\t: 1\nflags\t\t: other\n")
    assert host.processor_says("flags") == "fpu amx_bf16"
    assert host.processor_says("Features") == ""
