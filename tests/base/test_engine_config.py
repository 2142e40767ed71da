"""EngineConfig: what it refuses, and how it says so."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from gapless.base.config import MAX_DEPTH, EngineConfig, parse_depth
from gapless.base.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_num_seqs", "8", "a whole number"),
        ("max_num_seqs", 2.5, "a whole number"),
        ("max_num_seqs", -1, "a whole number from 0 to"),
        ("max_num_seqs", 10**9, "a whole number from 0 to"),
        ("threads", 100_000, "a whole number from 0 to"),
        ("max_model_len", True, "a whole number"),
        ("max_model_len", 0, "a whole number from 1 to"),
        ("block_size", 0, "a whole number from 1 to"),
        ("seed", 2**80, "a whole number from"),
        ("gpu_memory_utilization", "0.5", "a number from"),
        ("gpu_memory_utilization", math.nan, "a number from"),
        ("gpu_memory_utilization", 1.01, "a number from"),
        ("watchdog_seconds", math.inf, "a number from 0 to"),
        ("enable_prefix_caching", "no", "true or false"),
        ("enable_prefix_caching", 1, "true or false"),
        ("model", 5, "text"),
        ("tokenizer", 5, "text"),
        ("dtype", "int8", "one of auto, bfloat16, float16, float32"),
        ("depth", 9, "auto or a whole number from 1 to 8"),
        ("depth", "deep", "auto or a whole number from 1 to 8"),
        ("depth", True, "auto or a whole number from 1 to 8"),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(name, value, rule):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert str(caught.value).startswith(f"{name} must be {rule}")
    assert str(value) in str(caught.value)


def test_depth_may_be_a_number():
    assert EngineConfig(depth=4) == EngineConfig(depth="4")
    assert parse_depth("auto") is None and parse_depth("8") == MAX_DEPTH


def test_a_whole_number_is_a_number():
    assert EngineConfig(watchdog_seconds=5, gpu_memory_utilization=1).watchdog_seconds == 5


def test_every_number_is_bounded():
    for field in fields(EngineConfig):
        if field.type in ("int", "float", "int | None", "float | None"):
            assert math.isfinite(field.metadata["low"]) and math.isfinite(field.metadata["high"]), field.name


@pytest.mark.parametrize(("text", "size"), [("8GiB", 8 << 30), ("8G", 8 << 30), ("8GB", 8 * 10**9), ("4096", 4096)])
def test_sizes_of_tiers_are_binary_unless_they_end_in_b(text, size):
    assert EngineConfig(kv_tiers=[f"host:{text}"]).tiers["host"].nbytes == size


def test_a_tier_without_prefix_caching_is_refused():
    with pytest.raises(ConfigError, match="kv_tiers keep prefixes, which enable_prefix_caching turns off"):
        EngineConfig(kv_tiers=("host:1G",), enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        (("tape:1G",), "kv_tiers must be host:SIZE, disk:PATH:SIZE, redis://HOST:PORT/DB"),
        (("host:1G", "s3://bucket/kv"), "got 's3://bucket/kv'; S3 is nixl://BUCKET/PREFIX"),
        (("disk:/kv:1G",), "kv_tiers: disk works below a host tier: add host:SIZE"),
        (("host:1G", "disk:1G"), "a disk tier is disk:PATH:SIZE, such as disk:/var/kv:100GiB, got 'disk:1G'"),
        (("host:1G", "disk:/kv:"), "the size must be like 8GiB, got ''"),
        (("host:1G", "redis:6379"), "a Redis tier is redis://HOST:PORT/DB, .* the host is missing or wrong"),
        (("host:1G", "redis://[h/0"), "the host is missing or wrong"),
        (("host:1G", "redis://h:port/0"), "a Redis tier is redis://HOST:PORT/DB, .* the port is missing or wrong"),
        (("host:1G", "redis://h:0/0"), "the port is missing or wrong"),
        (("host:1G", "redis://h/nine"), "a Redis tier is redis://HOST:PORT/DB, .* the database is no number"),
        (("host:1G", "redis://h/0?a=b"), "In what was given there is a query"),
        (("host:1G", "redis://h/0?ssl_ca_certs=a"), "In what was given there is a query"),
        (("host:1G", "rediss://h/0?socket_timeout=9"), "In what was given there is a query"),
        (("host:1G", "redis+cluster://h/3"), "there is a database, which clusters do not have"),
        (("host:1G", "redis+sentinel://h,i:2"), "the service is missing"),
        (("host:1G", "redis+sentinel://h,:2/s"), "the host is missing or wrong"),
        (("host:1G", "redis+sentinel://h:1,i:x/s/0"), "the port is missing or wrong"),
        (("host:1G", "redis+sentinel://h/s/nine"), "the database is no number"),
        (("host:1G", "redis+unix://"), "the path of the socket is missing"),
        (("host:1G", "redis://h", "rediss://h"), "kv_tiers names redis twice"),
        (("host:1G", "redis://h/0#a"), "In what was given there is a fragment"),
        (("host:1G", "lmcache://h"), "lmcache://HOST:PORT, such as lmcache://127.0.0.1:5555. In .* the port is"),
        (("host:1G", "lmcache://h:1/a"), "In what was given there is a path"),
        (("host:1G", "mooncake:h"), "a mooncake tier is mooncake://HOST:PORT, .* the host is missing or wrong"),
        (("host:1G", "nixl://"), "a nixl tier is nixl://BUCKET/PREFIX, .* the bucket is missing or wrong"),
        (("host",), "kv_tiers: the size must be like 8GiB, got '' in 'host'"),
        (("host:-1",), "got '-1' in 'host:-1'"),
        (("host:0",), "the size must be like 8GiB"),
        (("host:9999999999T",), "the size must be like 8GiB"),
        (("host:1G", "host:2G"), "kv_tiers names host twice"),
    ],
)
def test_a_tier_that_cannot_be_is_named_with_its_rule(texts, why):
    with pytest.raises(ConfigError, match=why):
        EngineConfig(kv_tiers=texts)


@pytest.mark.parametrize(
    "text",
    [
        "redis://me:secret@h:port/0",
        "redis://me:secret@h/nine",
        "redis://me:sec/secret@h",
        "redis://me:sec[secret@h",
        "redis://me:secret",
        "lmcache://me:secret@h",
        "nixl:///kv?secret_key=secret",
        "rediss://me:secret@h/nine",
        "redis+sentinel://me:secret@h",
        "secret@h",
        "host:1G,redis://me:secret@h",
        "disk:/kv:1G,redis://me:secret@h:1",
    ],
)
def test_a_tier_that_cannot_be_is_refused_without_its_password(text):
    with pytest.raises(ConfigError, match="kv_tiers") as error:
        EngineConfig(kv_tiers=(text,) if text.startswith("host") else ("host:1G", text))
    assert "secret" not in str(error.value) and error.value.__cause__ is None


@pytest.mark.parametrize(
    "text",
    [
        "rediss://me:pw@h:1/2?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
        "redis+unix:///run/redis.sock?db=2",
        "redis+cluster://h:1",
        "rediss+cluster://me:pw@h:1/0",
        "redis+sentinel://me:pw@h:1,i/service/4?sentinel_password=pw",
    ],
)
def test_every_form_of_redis_is_a_redis_tier(text):
    assert EngineConfig(kv_tiers=("host:1G", text)).tiers["redis"].target == text


def test_a_role_brings_the_tiers_that_it_needs():
    one = EngineConfig(role="prefill", kv_tiers=("host:2GiB",))
    assert [*one.tiers] == ["host", "peer"] and one.tiers["host"].nbytes == 2 * one.tiers["peer"].nbytes == 2**31
    assert str(one.peer_plan.listen) == "127.0.0.1:5600" and not one.peer_plan.peers
    two = EngineConfig(role="decode", kv_peers=["127.0.0.1:5600"])
    assert two.peer_plan.listen is None and list(map(str, two.peer_plan.peers)) == ["127.0.0.1:5600"]
    both = EngineConfig(
        role="both", kv_peer_listen="unix:/x", kv_peers=("unix:/y",), kv_tiers=("peer:1MiB", "host:1MiB")
    )
    assert both.peer_plan == EngineConfig(kv_peer_listen="unix:/x", kv_peers=("unix:/y",)).peer_plan
    assert both.peer_plan.listen.path == "/x" and both.tiers["peer"].nbytes == 2**20


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"role": "decode"}, "kv_peers must name prefillers"),
        ({"role": "decode", "kv_peers": ("unix:/x",), "kv_peer_listen": "unix:/y"}, "kv_peer_listen is for prefill"),
        ({"role": "prefill", "kv_peers": ("unix:/x",)}, "kv_peers is for decode and both"),
        ({"role": "prefill", "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"role": "prefill", "kv_peer_listen": "0.0.0.0:5600"}, "in the clear"),
        ({"role": "draft"}, "role must be one of"),
    ],
)
def test_a_role_that_cannot_be_is_named_with_its_rule(options, why):
    with pytest.raises(ConfigError, match=why):
        EngineConfig(**options)


def test_adapters_may_be_written_as_other_engines_have_them():
    texts = ('{"name": "a", "path": "/a=b"}', '{"lora_name": "b", "lora_path": "/b", "pinned": true}', "c=/c")
    assert EngineConfig(lora_modules=texts).adapters == {"a": "/a=b", "b": "/b", "c": "/c"}
    for text in ('{"name": "a"}', "{a=b", "{}"):
        with pytest.raises(ConfigError, match="lora_modules must be name=directory"):
            EngineConfig(lora_modules=(text,))
