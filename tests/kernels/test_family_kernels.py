"""Families by every implementation of the kernels, in float32, against transformers."""

from __future__ import annotations

import pytest
import torch
from implementations import runs
from model.model_harness import reference, reference_logits
from model.paging_driver import Driver, Sequence, prompt, relative_error

from gapless.base.config import EngineConfig
from gapless.model.loader import load_model

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
FAMILIES = (
    "gpt2", "olmo3", "cohere2", "gemma2", "gemma3", "granite", "mistral", "phi3-part", "gpt2-wide", "olmo2",
    "olmo2-biased", "cohere", "cohere-biased", "cohere2-listed", "gemma", "gemma2-biased",
    "granite-biased", "ministral", "phi3", "qwen2-windows",
)  # fmt: skip


@runs("family", FAMILIES, on=("native", "interpreter", "cuda"), keep=4)
def test_a_family_has_the_logits_of_transformers(implementation, family, tmp_path):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    device = torch.device(implementation.device)
    model = load_model(EngineConfig(model=str(tmp_path)), device, implementation.kernels)
    driver, first, second = Driver(model, 60, device=device), Sequence(), Sequence()
    parts = [driver.step(chunks=[(first, prompt(19)), (second, prompt(6))])]
    parts.append(driver.step(decode=[(second, 3)], chunks=[(first, prompt(5, 2))], inert=1, slack=4)[::-1])
    parts += [driver.step(decode=[(first, 7 + step), (second, 5)], inert=1) for step in range(2)]
    for sequence, found in zip((first, second), zip(*parts, strict=True), strict=True):
        assert relative_error(torch.cat(found), reference_logits(theirs, sequence.tokens)) < 1e-5
