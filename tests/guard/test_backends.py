"""The rows of backends.py: each patches what it names, reports, and leaves everything as it was."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch

from gapless import guard
from gapless.guard import lint, present, run
from gapless.guard.backends import GENERIC, KINDS_OF_DEVICES, DeviceKind, backend

OWN_MODULES = ("cuda", "xpu", "mps")
"""Kinds whose modules torch itself has on every machine."""
NEWER = {("torch.accelerator.Graph", "capture_begin"), ("torch.accelerator.Graph", "__enter__")}
"""What older versions of torch lack."""
ROWS = [*KINDS_OF_DEVICES.values(), DeviceKind("other")]


def stand_in(row: DeviceKind) -> ModuleType:
    """Return a module with what a row names; each function and method notes its call and gives its own name."""
    module = ModuleType(f"torch.{row.type}")
    module.calls = []
    module.is_available = lambda: True
    module.get_sync_debug_mode, module.set_sync_debug_mode = lambda: 0, lambda mode: None
    for path, name, _ in row.all_waits():
        owner = path.removeprefix(f"torch.{row.type}").removeprefix(".")
        if owner and not hasattr(module, owner):
            setattr(module, owner, type(owner, (), {}))

        def called(*args: Any, full: str = f"{path}.{name}") -> str:
            module.calls.append(full)
            return full

        setattr(getattr(module, owner) if owner else module, name, called)
    return module


@pytest.fixture(params=ROWS, ids=lambda row: row.type)
def played(request, monkeypatch):
    """A kind whose module is a stand-in, and which is this machine's accelerator."""
    row = request.param
    module = stand_in(row)
    monkeypatch.setattr(torch, row.type, module, raising=False)
    monkeypatch.setattr(present, "CHOSEN", [row.type])
    return row, module


def call(path: str, name: str) -> Any:
    owner = present.owner_of(path)
    return getattr(owner() if isinstance(owner, type) else owner, name)()


def test_each_wait_of_a_kind_reports_its_rule_and_is_made(played):
    row, module = played
    for path, name, rule in row.all_waits():
        with guard.no_sync(mode="record") as region:
            for _ in range(60 if rule == "event-poll" else 1):
                assert call(path, name) == f"{path}.{name}"
        assert [(one.rule, one.what) for one in region.report.findings] == [(rule, f"{path}.{name}")]
    assert len(module.calls) >= len(row.all_waits())


def test_a_kind_is_as_before_after_the_region(played):
    row, _ = played
    waits = (*row.all_waits(), *GENERIC)
    found = [(path, name) for path, name, _ in waits if hasattr(present.owner_of(path), name)]
    before = [getattr(present.owner_of(path), name) for path, name in found]
    with guard.no_sync(mode="record"):
        assert [getattr(present.owner_of(path), name) for path, name in found] != before
    assert [getattr(present.owner_of(path), name) for path, name in found] == before


@pytest.mark.parametrize("kind", OWN_MODULES)
def test_names_of_a_row_are_there_in_torch(kind):
    missing = {"torch.mps.Stream"}  # it has one stream, without a class
    if not hasattr(torch.xpu, "XPUGraph"):  # came with torch 2.12
        missing |= {"torch.xpu.XPUGraph", "torch.xpu.graph"}
    for path, name, _ in backend(kind).all_waits():
        assert path in missing or hasattr(present.owner_of(path), name), f"{path}.{name}"


def test_generic_names_are_there_in_torch():
    for path, name, _ in GENERIC:
        assert hasattr(present.owner_of(path), name) or (path, name) in NEWER, f"{path}.{name}"


def test_a_class_of_c_is_patched_for_objects_that_exist_and_put_back(monkeypatch):
    monkeypatch.setattr(present, "CHOSEN", ["xpu"])
    stream, event = torch.Stream("cpu"), torch.Event("cpu")
    before = torch.Stream.synchronize, torch.Event.query
    for _ in range(3):
        with guard.no_sync(mode="record") as region:
            stream.synchronize()
        assert [one.rule for one in region.report.findings] == ["stream-wait"]
        stream.synchronize()
    assert (torch.Stream.synchronize, torch.Event.query) == before
    assert event.query() in (True, False)


@pytest.mark.parametrize(("kind", "up", "down"), [
    ("cuda", "pageable-async", "unpinned-download"), ("npu", "pageable-async", "unpinned-download"),
    ("xpu", None, "unpinned-download"), ("mps", None, None),
])  # fmt: skip
def test_copies_of_pageable_memory_wait_where_the_row_says(kind, up, down, monkeypatch):
    from gapless.guard.sync_ops import copy_rule

    monkeypatch.setattr(present, "CHOSEN", [kind])
    assert copy_rule(torch.zeros(4), True, up=True) == up
    assert copy_rule(torch.zeros(4), True, up=False) == down
    assert copy_rule(torch.zeros(4), False, up=True) == "upload"


def test_the_lint_knows_the_spellings_of_every_kind(tmp_path):
    for row in KINDS_OF_DEVICES.values():
        package = f"import {row.package}\n{row.package}.{row.type}.synchronize()\n" if row.package else ""
        program = tmp_path / f"of_{row.type}.py"
        program.write_text(f"import torch\ntorch.{row.type}.synchronize()\n{package}")
        assert [one.rule for one in lint.lint([str(program)]).findings] == ["stream-wait"] * (2 if package else 1), (
            row.type
        )


@pytest.mark.parametrize(("kind", "said"), [
    ("cpu", "that is the host"), ("nothing", "torch has no backend of this name; give one of cuda, xpu"),
    ("npu", "torch.npu comes with torch_npu, which is not installed"),
    ("ascend", "torch.npu comes with torch_npu, which is not installed"),
    ("gaudi", "torch.hpu comes with habana_frameworks.torch, which is not installed"),
    ("xpu", "torch.xpu.is_available() is False here"),
    ("accelerator:xpu", "torch.xpu.is_available() is False here"),
    ("rocm", "torch.cuda.is_available() is False here"),
    ("broken", "nowhere_at_all:Device cannot be loaded: ModuleNotFoundError"),
])  # fmt: skip
def test_a_device_that_is_not_there_is_refused_with_what_to_use(kind, said, monkeypatch):
    broken = EntryPoint("broken", "nowhere_at_all:Device", present.OFFERS)
    monkeypatch.setattr(present, "entry_points", lambda group: [broken])
    with pytest.raises(ValueError, match="--device-tensors cuda emulates") as caught:
        present.choose(kind)
    assert said in str(caught.value)


@pytest.mark.parametrize(("flags", "said"), [
    (("--device", "xpu"), "--device xpu: torch.xpu.is_available() is False here; --device-tensors cuda emulates CUDA"),
    (("--device", "xpu", "--device-tensors", "cuda"), "--device-tensors is for a machine without an accelerator"),
])  # fmt: skip
def test_san_ends_with_one_sentence_for_a_device_that_it_cannot_watch(flags, said, tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text("print('ran')\n")
    assert run.main([*flags, str(program)]) == run.EXIT_USAGE
    out = capsys.readouterr()
    assert f"gapless san: error: {said}" in out.err and out.out == ""


def test_the_word_fake_is_no_device_for_the_lint(tmp_path):
    program = tmp_path / "gan.py"
    program.write_text(
        "import torch\n\n\ndef train(net, noise, opts):\n    fake = net(noise)\n    labels = torch.tensor([0, 1])\n"
        "    labels.to(fake)\n    labels.to(opts.fake)\n    for name in ['real', 'fake']:\n"
        "        torch.zeros(3).to(name)\n"
        "    return torch.tensor([1.0]).to('xpu', non_blocking=True)\n"
    )
    assert [finding.site.line for finding in lint.lint([str(program)]).findings] == [11]
