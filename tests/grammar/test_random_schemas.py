"""A thousand random schemas, and those of applications: whatever is drawn from the masks satisfies them."""

import json
import random

import pytest
from corpus import CORPUS
from jsonschema import Draft202012Validator, FormatChecker
from schemas import as_root, random_schema
from sharpest import sharpest
from walks import SPEAKERS, demo

from gapless.base.structured import StructuredOutputs

SEEDS, EACH = 1_000, 2
FORMATS = FormatChecker(["email", "ipv4", "ipv6", "uuid"])
"""A date is one by its digits for llguidance: 30 February passes."""


def check(schema, text):
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


def form_of(schema, seed):
    tight = seed % 3 == 0
    return StructuredOutputs(json=schema, disable_any_whitespace=tight)


@pytest.mark.parametrize("begin", sharpest(range(0, SEEDS, 50)))
def test_outputs_drawn_under_random_schemas_satisfy_them(begin):
    for seed in range(begin, begin + 50):
        schema = as_root(random_schema(random.Random(seed)))
        speaker = SPEAKERS["bytes" if seed % 4 == 0 else "demo"]()
        for draw in range(EACH):
            check(schema, speaker.say(form_of(schema, seed), seed * EACH + draw, freely=40))


@pytest.mark.parametrize("name", CORPUS)
def test_outputs_drawn_under_schemas_of_applications_satisfy_them(name):
    schema = CORPUS[name]
    for seed in range(10):
        check(schema, demo().say(StructuredOutputs(json=schema), seed, freely=60))
