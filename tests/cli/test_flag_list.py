"""The frozen lists of flags.txt: adding, renaming or dropping a flag is a decision, which is written down there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gapless.base.config import EngineConfig
from gapless.cli.ab import NOT_OURS
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.sampling import SamplingFlags
from gapless.cli.spec import specs
from gapless.lab.ab_plan import AbFlags
from gapless.lab.eval_run import EvalFlags
from gapless.lab.target import RequestFlags
from gapless.server.config import ServerConfig

TEXT = (Path(__file__).parent / "flags.txt").read_text()
LISTS = {name: flags.split("\n") for name, flags in re.findall(r"^\[(.*)\]\n((?:-.*\n)*-.*)", TEXT, re.MULTILINE)}


def listed(config: type) -> list[str]:
    return [" ".join([s.flag, *sorted(s.spellings[1:])]) for s in specs(config)]


@pytest.mark.parametrize(
    "name, record", [("engine", EngineConfig), ("server", ServerConfig), ("ab", AbFlags), ("sampling", SamplingFlags)]
)
def test_the_flags_of_a_record_are_those_listed(name, record):
    assert listed(record) == LISTS[name]


def test_bench_and_eval_flags_begin_with_those_of_every_request():
    assert listed(RequestFlags) == LISTS["request"]
    assert listed(BenchFlags) == LISTS["request"] + LISTS["bench"]
    assert listed(EvalFlags) == LISTS["request"] + LISTS["eval"]


def test_ab_has_its_own_flags_and_those_of_bench_that_it_does_not_refuse():
    load, own = {s.field for s in specs(BenchFlags)}, {s.field for s in specs(AbFlags)}
    assert load >= NOT_OURS and not own & (load - NOT_OURS)
