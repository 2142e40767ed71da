"""Every kind of request gets what it got when the record was made, from every engine and at every depth.

`record_tokens.py` makes the record; `demo_engines.py` says how far it holds on another processor.
"""

from __future__ import annotations

import json
import warnings

import demo_engines
import pytest
from demo_engines import NEAR, ROUNDED
from record_tokens import DEMO
from sharpest import sharpest
from wishes import WISHES

from gapless.device import build

BY_NAME = {wish.name: wish for wish in WISHES}


@pytest.fixture(scope="module", autouse=True)
def engines_have_no_race():
    """Each test builds its own engines: those with the mark run under no_race."""


@pytest.fixture(scope="module")
def recorded():
    return json.loads(DEMO.read_text())


@pytest.mark.no_race
@pytest.mark.filterwarnings("default:.*near tie")
@pytest.mark.parametrize(("arm",), sharpest([(arm,) for arm in demo_engines.ARMS]), ids=str)
def test_the_demo_model_says_the_recorded_tokens(arm, recorded):
    kernels = arm[0]
    if kernels == "native" and not demo_engines.native.load():
        pytest.skip(f"no C++ kernels here: {build.outcomes['kernels'].reason}")
    here, found = demo_engines.arithmetic(), demo_engines.play(*arm)
    # Plain torch works through matrices whose shapes are those of the batch: its last bits are not promised.
    exact = kernels == "native" and here == recorded["arithmetic"]
    differing = list(demo_engines.differences(recorded[kernels], found))
    trouble = demo_trouble(arm, recorded[kernels], found, differing, exact)
    same = [name for name in found if name not in {name for name, *_ in differing}]
    trouble += scored_trouble(
        {name: recorded[kernels][name] for name in same}, found, ROUNDED if exact else NEAR, exact
    )
    assert not trouble, "\n".join([f"recorded with {recorded['arithmetic']}, here {here}", *trouble])
    if differing:
        warnings.warn(f"{len(differing)} answers went another way at a near tie, with {here}", stacklevel=1)


def demo_trouble(arm, recorded, found, differing, exact) -> list[str]:
    """What is wrong with answers that differ. All of them, or those that differ where there was no near tie."""
    trouble = []
    for name, index, at in differing:
        old, new = (record[name]["outputs"][index]["tokens"] for record in (recorded, found))
        what = f"{name}, completion {index}: another token at {at}:\n  recorded {old}\n  now      {new}"
        if exact:
            trouble.append(what)
            continue
        if at == min(len(old), len(new)):
            trouble.append(f"{what}\n  one ends where the other goes on")
            continue
        with demo_engines.open_demo(*arm) as llm:
            apart = demo_engines.gap(llm, BY_NAME[name], index, old[:at], (old[at], new[at]))
        if apart > NEAR:
            trouble.append(f"{what}\n  no near tie: the scores of the two are {apart:.4f} apart")
    return trouble


def scored_trouble(recorded, found, tolerance, ranks) -> list[str]:
    """Log-probabilities that differ by more than `tolerance`, or `ranks` that differ at all."""
    trouble = []
    for name, want in recorded.items():
        pairs = [(want.get("prompt", []), found[name].get("prompt", []))]
        for old, new in zip(want["outputs"], found[name]["outputs"], strict=True):
            pairs.append((old.get("logprobs", []), new.get("logprobs", [])))
        for old, new in pairs:
            far = demo_engines.worst(old, new)
            other = ranks and [place[0][2] for place in old] != [place[0][2] for place in new]
            if far > tolerance or other:
                trouble.append(f"{name}: log-probabilities are {far:.5f} apart:\n  recorded {old}\n  now      {new}")
    return trouble


@pytest.mark.seeds
def test_a_difference_at_no_near_tie_is_found(recorded):
    arm = ("native" if demo_engines.native.load() else "torch", "roomy", "1")
    planted = {name: json.loads(json.dumps(recorded[arm[0]][name])) for name in ("greedy", "temperature 1", "n=4")}
    for name, index in (("greedy", 0), ("temperature 1", 0), ("n=4", 3)):
        planted[name]["outputs"][index]["tokens"][2] ^= 1
    before = {name: recorded[arm[0]][name] for name in planted}
    differing = list(demo_engines.differences(before, planted))
    assert len(differing) == 3
    trouble = demo_trouble(arm, before, planted, differing, exact=False)
    assert len(trouble) == 3 and all("no near tie" in text for text in trouble)


def test_the_record_holds_every_kind_of_request(recorded):
    assert list(recorded["native"]) == list(BY_NAME)
    assert {one["reason"] for each in recorded["native"].values() for one in each["outputs"]} == {"stop", "length"}
