"""A tier of another package: found by its entry point, opened with the host tier's slots, used like ours."""

from __future__ import annotations

import dictionary_tier
import pytest
from extending.installed import install

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.engine.tiers import EngineTiers
from gapless.offload.tiers.plugins import factory_of

LONG = "The quick brown fox jumps over the lazy dog near the river bank. " * 10


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """A package is installed that has two tiers, one of which cannot be imported; what was opened."""
    install(tmp_path, "gapless.kv_tiers", shelf="dictionary_tier:Shelf", broken="no_such_module:Tier")
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**10)  # the machine may be busy
    monkeypatch.syspath_prepend(str(tmp_path))
    opened = []

    def shelf(setup):
        opened.append((setup, dictionary_tier.DictionaryTier(setup)))
        return opened[-1][1]

    monkeypatch.setattr(dictionary_tier, "Shelf", shelf, raising=False)
    return opened


def test_a_tier_of_another_package_keeps_pages_that_the_host_has_given_up(package):
    options = {"device": "cpu", "max_model_len": 512, "num_gpu_blocks_override": 40}
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM("demo", **options, kv_tiers=["host:1MiB", "shelf:/a/place?color=red"]) as llm:
        first = [llm.generate(word + LONG, params)[0] for word in ("one", "two", "six", "ten") * 2]
        stats = llm.stats()
    ((setup, tier),) = package
    assert setup.target == "/a/place?color=red" and setup.nbytes == 0 and len(setup.slot_bytes) == 1
    assert len(setup.memory[0]) == (1 << 20) // setup.slot_bytes[0] * setup.slot_bytes[0]
    assert tier.closed and tier.kept
    assert stats.lower[0].loaded > 16 and not stats.lower[0].refused  # a late answer on a busy machine is a miss
    tokens = [output.outputs[0].token_ids for output in first]
    assert tokens[:4] == tokens[4:] and any(output.num_cached_tokens > 100 for output in first[4:])


def test_names_of_plug_ins_are_among_the_forms_of_a_tier():
    with pytest.raises(ConfigError, match=r"or shelf:\.\.\., got 'tape:1G'"):
        EngineConfig(kv_tiers=("tape:1G",))


def test_a_plug_in_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"kv_tiers: broken \(no_such_module:Tier\) cannot be imported: No module"):
        factory_of("broken")


def test_peers_without_a_role_or_a_key_are_refused_before_weights_are_read(monkeypatch):
    monkeypatch.delenv("GAPLESS_KV_PEER_KEY", raising=False)
    with pytest.raises(ConfigError, match="peer is for engines with a role: add --role"):
        EngineTiers(EngineConfig("demo", kv_tiers=["host:1MiB", "peer:1MiB"]))
    with pytest.raises(ConfigError, match=r"kv_peer_listen: .* 127\.0\.0\.1:5600, .* need a key"):
        EngineTiers(EngineConfig("demo", role="prefill", kv_tiers=["host:1MiB", "peer:1MiB"]))


def test_a_key_that_no_peer_needs_is_not_looked_at(monkeypatch):
    monkeypatch.setenv("GAPLESS_KV_PEER_KEY", "short")
    assert EngineTiers(EngineConfig("demo")).kinds == []


def test_weights_that_change_while_they_are_loaded_are_refused(tmp_path):
    """Else KV of one model would be found under the name of another."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"old")
    tiers = EngineTiers(EngineConfig(str(tmp_path), kv_tiers=["host:1MiB", f"disk:{tmp_path / 'kv'}:1MiB"]))
    tiers.look_at_weights()
    weights.write_bytes(b"new")
    with pytest.raises(ConfigError, match="model: its files changed while they were loaded"):
        tiers.name(None, None, "cpu")


@pytest.mark.parametrize("tiers", [["host:900TiB"], ["host:1MiB", "peer:900TiB"]])
def test_tiers_that_the_memory_of_the_machine_cannot_hold_are_refused_at_once(tiers):
    config = EngineConfig("demo", kv_tiers=tiers, role="both", kv_peer_listen="127.0.0.1:5600")
    with pytest.raises(ConfigError, match=r"host and peer need [\d,]+ bytes, this machine has [\d,]+: give less"):
        EngineTiers(config)
