"""The static lint: the shapes of the catalogue in source text, and few false reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gapless.cli.main import main
from gapless.guard.child_commands import with_python
from gapless.guard.lint import lint

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from gapless import guard

def step(x: Tensor, index: Tensor, mask: Tensor, n: int, device, pairs, array: np.ndarray, other=None):
"""

BAD = [
    ("x.item()", "host-read"),
    ("x.tolist()", "host-read"),
    ("y = x * 2 + n; y[0].tolist()", "host-read"),
    ("float(x.mean())", "host-read"),
    ("bool((x > 0).all())", "host-read"),
    ("if x.sum() > 0: pass", "host-read"),
    ("while not mask.any(): pass", "host-read"),
    ("assert other is None or (x > 0).all()", "host-read"),
    ("print(x)", "host-read"),
    ("text = f'{x}'", "host-read"),
    ("torch.equal(x, x)", "host-read"),
    ("torch.linalg.cholesky(x)", "host-read"),
    ("x.max().item()", "host-size"),
    ("int(index.max())", "host-size"),
    ("x.cpu()", "copy-to-host"),
    ("x.to('cpu')", "copy-to-host"),
    ("x.to(torch.device('cpu'))", "copy-to-host"),
    ("torch.zeros(n, device=device).numpy()", "copy-to-host"),
    ("x[: index.max()]", "host-index"),
    ("for i in range(index.max()): pass", "host-index"),
    ("x[0] = 5.0", "scalar-assign"),
    ("x[-1] = 1", "scalar-assign"),
    ("torch.tensor([1, 2], device=device)", "list-to-device"),
    ("torch.tensor(pairs, device='cuda')", "list-to-device"),
    ("torch.as_tensor(array, device=device)", "list-to-device"),
    ("x.new_tensor(pairs)", "list-to-device"),
    ("torch.from_numpy(array).to(device)", "upload"),
    ("torch.tensor(pairs).cuda()", "upload"),
    ("host = torch.from_numpy(array)\nhost.to(device)", "upload"),
    ("torch.from_numpy(array).to(device, non_blocking=True)", "pageable-async"),
    ("host = torch.from_numpy(array)\nhost.to('cuda', non_blocking=True)", "pageable-async"),
    ("x[[1, 2]]", "index-by-host"),
    ("x[torch.tensor(pairs)]", "index-by-host"),
    ("x[np.array(pairs)]", "index-by-host"),
    ("x[index] = 5", "index-put-scalar"),
    ("x.nonzero()", "data-size"),
    ("torch.nonzero(mask)", "data-size"),
    ("torch.where(x > 0)", "data-size"),
    ("torch.masked_select(x, mask)", "data-size"),
    ("x[x > 0]", "mask-index"),
    ("keep = x > 0\nx[keep]", "mask-index"),
    ("x[~(x > 0) & mask.bool()] = x", "mask-index"),
    ("torch.repeat_interleave(index)", "repeat-interleave"),
    ("x.repeat_interleave(index, dim=0)", "repeat-interleave"),
    ("torch.bincount(index)", "counted-size"),
    ("index.unique()", "counted-size"),
    ("torch.histc(x)", "counted-size"),
    ("torch.split(x, index.tolist())", "host-read"),
    ("torch.tensor_split(x, index)", "device-split"),
    ("x.type(torch.BoolTensor)", "type-hop"),
    ("torch.from_numpy(array).pin_memory()", "pinned-alloc"),
    ("torch.empty(n, pin_memory=True)", "pinned-alloc"),
    ("torch.cuda.empty_cache()", "empty-cache"),
    ("torch.cuda.synchronize()", "stream-wait"),
    ("other.synchronize()", "event-wait"),
    ("dist.barrier()", "collective"),
    ("with torch.cuda.graph(other): pass", "graph-capture"),
    ("z = torch.zeros(n, device=device)\nz.tolist()", "host-read"),
    ("[v.item() for v in x]", "host-read"),
    ("(z := x + 1).tolist()", "host-read"),
]

GOOD = [
    "torch.where(x > 0, x, 0.0)",
    "x[:1] = 5.0",
    "x[n] = x[0] + 1",
    "x[index]",
    "x[index] = x[:2]",
    "x[mask.bool()] = 5.0",
    "x.masked_fill_(x > 0, 5)",
    "x.index_fill_(0, index, 5)",
    "x.repeat_interleave(2)",
    "x.repeat_interleave(index, output_size=n)",
    "torch.full((2,), 3, device=device)",
    "torch.zeros(n, device=device)",
    "torch.histc(x, 4, 0, 6)",
    "torch.cuda.Event.query(other)",
    "torch.tensor(pairs)",
    "torch.from_numpy(array).tolist()",
    "x.to(torch.float16)",
    "x.to(dtype=x.dtype)",
    "x.shape[0].item()",
    "if x.is_contiguous() or x.is_neg(): pass",
    "torch.linalg.cholesky_ex(x)",
    "if x.shape[0] > 2 and x.dim() == 1: pass",
    "if x is None or other: pass",
    "if other is not None: other.item()",
    "array.tolist()",
    "array[array > 0]",
    "array[[1, 2]] = 0",
    "np.unique(array); np.nonzero(array)",
    "pairs[0] = 5",
    "float(n); int(pairs[0]); print(n)",
    "pairs.unique(); other.nonzero(); other.split(index)",
    "torch.randperm(n, device=device)",
    "torch.tensor([1.0], device='cpu').item()",
    "ring = torch.empty(n)\nring.copy_(torch.from_numpy(array))",
    "x = other.rows()\nx.tolist()",
    "host = torch.zeros(n)\nhost[0] = 5\nhost.tolist()\nif host.sum() > 0: pass",
]


def linted(tmp_path: Path, body: str, head: str = HEAD):
    file = tmp_path / "program.py"
    file.write_text(head + "".join(f"    {line}\n" for line in body.split("\n")))
    return lint([str(file)]).entries()


@pytest.mark.parametrize(("body", "rule"), BAD)
def test_code_that_may_wait_is_found_by_its_rule(tmp_path, body, rule):
    entries = linted(tmp_path, body)
    assert [entry.finding.rule for entry in entries] == [rule]
    last = HEAD.count("\n") + 1 + body.count("\n")
    assert entries[0].finding.site.line in (HEAD.count("\n") + 1, last)
    assert entries[0].finding.site.function == "step"


@pytest.mark.parametrize("body", GOOD)
def test_code_that_does_not_wait_is_not_reported(tmp_path, body):
    assert [entry.finding.text() for entry in linted(tmp_path, body)] == []


def test_annotations_of_attributes_functions_and_other_files(tmp_path):
    (tmp_path / "a.py").write_text(
        "from torch import Tensor\nclass Batch:\n    rows: Tensor\n    size: int\n"
        "    def last(self) -> Tensor: ...\n    @property\n    def first(self) -> Tensor: ...\n"
        "def build() -> Tensor: ...\nclass Other:\n    size: Tensor\n"
    )
    (tmp_path / "b.py").write_text(
        "def f(batch):\n    batch.rows.tolist()\n    batch.last().item()\n    batch.first.item()\n"
        "    build().tolist()\n    batch.size.tolist()\n"
    )
    lines = [entry.finding.site.line for entry in lint([str(tmp_path)]).entries()]
    assert lines == [2, 3, 4, 5], "`size` is an int in one place and a tensor in another: not known"


def test_attributes_that_a_class_assigns(tmp_path):
    source = "import torch\nclass A:\n    def __init__(self, device):\n        self.t = torch.zeros(3, device=device)\n"
    source += "        self.h = torch.zeros(3)\n    def f(self):\n        self.h.tolist()\n        self.t.tolist()\n"
    (tmp_path / "a.py").write_text(source)
    (entry,) = lint([str(tmp_path)]).entries()
    assert (entry.finding.site.line, entry.finding.site.function) == (8, "A.f")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("x.item()  # san: ok(start-up only)", "start-up only"),
        ("y = torch.stack((\n        x,\n    )).tolist()  # san: ok(after a (passed) fence)", "after a (passed) fence"),
        ("with guard.allow('the result is wanted'):\n        x.item()", "the result is wanted"),
    ],
)  # fmt: skip
def test_an_excused_finding_has_its_reason(tmp_path, body, reason):
    (entry,) = linted(tmp_path, body)
    assert entry.excuse == reason


def test_a_comment_without_a_reason_excuses_nothing(tmp_path):
    for comment in ("# san: ok", "# san: ok()", "# san: ok(  )"):
        (entry,) = linted(tmp_path, f"x.item()  {comment}")
        assert entry.excuse is None


@pytest.mark.process
def test_our_own_package_passes_the_lint(monkeypatch):
    """The launch path has nothing to excuse, and every line of .gapless-san is needed."""
    from gapless.guard.suppress import apply, gather

    monkeypatch.chdir(ROOT)
    suppressions = gather([], None)
    entries = apply(lint(["gapless"]).entries(), suppressions)
    assert [entry.finding.text() for entry in entries if entry.excuse is None] == []
    assert [one.path for one in suppressions if not one.used] == []
    launch_path = [
        e.finding.site.where for e in entries if e.finding.site.where.startswith(("gapless/step", "gapless/loop"))
    ]
    assert launch_path == []


def test_the_lint_command_exits_by_its_findings(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("import torch\ntorch.cuda.synchronize()\n")
    (tmp_path / "good.py").write_text("import torch\n")
    assert main(["san", "--lint", "good.py"]) == 0
    assert capsys.readouterr().out == "0 reports at 0 sites, 0 sites allowed\n"
    assert main(["san", "--lint", "bad.py", "good.py"]) == 1
    assert capsys.readouterr().out.startswith("bad.py:2: stream-wait: torch.cuda.synchronize()\n  why ")
    assert main(["san", "--lint", ".", "--json", "-"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["rule"], found["line"], Path(found["file"]).name) == ("stream-wait", 2, "bad.py")
    assert main(["san", "--lint", ".", "--suppress", "bad.py:2 -- it is the end", "--json", "out.json"]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["allowed"][0]["reason"] == "it is the end"
    (tmp_path / ".gapless-san").write_text("# all of them\nbad.py stream-wait -- it is the end  # really\n")
    assert main(["san", "--lint", "."]) == 0


def test_files_of_others_and_bad_files_do_not_stop_the_lint_of_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad = "import torch\ntorch.cuda.synchronize()\n"
    for folder in (".hidden", "build", "node_modules/a", "env/lib", "lib/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "others.py").write_text(bad)
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "lib" / "mark.py").write_bytes(b"\xef\xbb\xbf" + bad.encode())
    (tmp_path / "lib" / "old.py").write_bytes(b"# coding: latin-1\n# \xe9\n" + bad.encode())
    (tmp_path / "lib" / "template.py").write_text("{{ cookiecutter }\n")
    (tmp_path / "lib" / "bytes.py").write_bytes(b"\0")
    (tmp_path / "lib" / "lost.py").symlink_to("nowhere")
    assert main(["san", "--lint", ".", "--json", "-"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)["findings"]
    assert [(Path(one["file"]).name, one["line"]) for one in found] == [("mark.py", 2), ("old.py", 4)]
    names = [line.split(":")[2].strip() for line in said.err.splitlines()]
    assert names == ["lib/bytes.py", "lib/lost.py", "lib/template.py"] and "template.py:1: not Python" in said.err
    assert main(["san", "--lint", "lib/template.py"]) == 2
    assert main(["san", "--lint", ".hidden"]) == 1


def test_a_script_that_asks_env_for_python_is_a_python_program(tmp_path):
    script = tmp_path / "serve"
    for line in ("env python", "env python3.12", "env bash", "python-config"):
        script.write_text(f"#!/usr/bin/{line}\n")
        script.chmod(0o755)
        expected = [line.split()[1], str(script), "x"] if "env p" in line else [str(script), "x"]
        assert with_python([str(script), "x"]) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lint", "nowhere.py"], "nowhere.py is not there"),
        (["--lint", "broken.py"], "broken.py:1: not Python"),
        (["--lint", "fine.py", "--suppress", "fine.py"], "expected `PATH[:LINE] [RULE] -- reason`, got 'fine.py'"),
        (["--lint", "fine.py", "--suppress", "fine.py:1 --"], "expected `PATH"),
        (["--lint", "fine.py", "--suppressions", "nofile"], "nofile: cannot be read"),
        (["--lint", "fine.py", "--", "python", "x.py"], "one of them at a time"),
        ([], "say what to run"),
        (["--", "torchrunn", "x.py"], "torchrunn is not found"),
        (["--", "./nope"], "./nope is not found"),
        (["--", "ls"], "san runs Python programs, got 'ls'"),
        (["--", "python", "-c", "pass"], "-c and standard input are not run"),
        (["--", "python"], "needs a program"),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("def\n")
    (tmp_path / "fine.py").write_text("")
    assert main(["san", *args]) == 2
    assert message in capsys.readouterr().err


def test_the_lint_does_not_import_torch():
    code = "import sys; from gapless.cli.main import main; main(['san', '--lint', 'gapless/step'])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.endswith("False\n"), done.stdout
