"""Which files are fetched, from which commit, and where they go."""

from __future__ import annotations

import json
import logging
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub.loopback import folder_files
from huggingface_hub import constants, file_download, try_to_load_from_cache
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.speculative import SpeculativeConfig
from gapless.engine.frontdoor import locate, survey
from gapless.hub import progress
from gapless.text.tokenizer import Tokenizer

NEVER = {
    name: b"import os" for name in ("modeling_x.py", "pytorch_model.bin", "README.md", "tokenizer.model", "a.gguf")
}
NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def folder(config: EngineConfig) -> Path:
    return Path(locate(config).config.model)


def test_files_that_are_read_are_fetched_once_and_no_others(hub, tiny, cache):
    commit = hub.add("org/tiny", {**tiny, **NEVER, "chat_template.jinja": b"{{ messages }}", "onnx/model.onnx": b"1"})
    located = locate(EngineConfig(model="org/tiny"))
    assert located.commit == commit and located.config.revision is None
    there = Path(located.config.model)
    assert there == cache / "models--org--tiny" / "snapshots" / commit
    assert sorted(hub.fetched()) == sorted(NEEDED | {"chat_template.jinja"})
    assert folder_files(there) == {**{n: tiny[n] for n in NEEDED}, "chat_template.jinja": b"{{ messages }}"}
    assert not list(cache.rglob("*.incomplete"))

    hub.asked.clear()
    assert locate(EngineConfig(model="org/tiny")) == located
    assert [(a.method, a.path) for a in hub.asked] == [("GET", "/api/models/org/tiny/revision/main")]


def test_every_file_of_a_tokenizer_is_fetched(hub, tiny):
    read = {
        "special_tokens_map.json": b"{ }", "added_tokens.json": b"{  }", "chat_template.jinja": b"plain",
        "additional_chat_templates/tool_use.jinja": b"with tools", "additional_chat_templates/rag.jinja": b"with texts",
    }  # fmt: skip
    never = {f"additional_chat_templates/{name}": b"x" for name in ("x.py", "deep/y.jinja", "jinja", "z.jinja.bin")}
    hub.add("org/tiny", {**tiny, **read, **never, "tool_use.jinja": b"x", "other/tool_use.jinja": b"x"})
    there = folder(EngineConfig(model="org/tiny"))
    assert sorted(hub.fetched()) == sorted(NEEDED | {Path(name).name for name in read})
    tokenizer = Tokenizer.from_dir(there)
    chat = [{"role": "user", "content": "x"}]
    assert (tokenizer.chat(chat), tokenizer.chat(chat, tools=[{}])) == ("plain", "with tools")


def test_other_programs_find_the_files(hub, tiny, cache):
    hub.add("org/tiny", tiny)
    locate(EngineConfig(model="org/tiny"))
    for name in NEEDED:
        found = try_to_load_from_cache("org/tiny", name, cache_dir=cache)
        assert isinstance(found, str) and Path(found).read_bytes() == tiny[name]


def test_files_that_another_program_fetched_are_used(hub, tiny, cache):
    from huggingface_hub import hf_hub_download

    hub.add("org/tiny", tiny)
    hf_hub_download("org/tiny", "model.safetensors", cache_dir=cache)
    hub.asked.clear()
    locate(EngineConfig(model="org/tiny"))
    assert set(hub.fetched()) == NEEDED - {"model.safetensors"}


def test_the_shards_that_the_index_names_are_fetched(hub, tiny):
    del tiny["model.safetensors"]
    shards = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 1000 for n in (1, 2)}
    index = {"weight_map": dict(zip("ab", shards, strict=True)) | {"c": "../evil.safetensors", "d": "x.bin", "e": 3}}
    others = {"consolidated.safetensors": b"1", "x.bin": b"2", "evil.safetensors": b"3"}
    hub.add("org/tiny", {**tiny, **shards, **others, "model.safetensors.index.json": json.dumps(index).encode()})
    there = folder(EngineConfig(model="org/tiny"))
    assert {p.name for p in there.glob("model*")} == {*shards, "model.safetensors.index.json"}
    assert not {"consolidated.safetensors", "x.bin", "evil.safetensors"} & set(hub.fetched())


def test_a_shard_that_is_not_there_is_named(hub, tiny):
    del tiny["model.safetensors"]
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    hub.add("org/tiny", {**tiny, "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(CheckpointError, match=r"model: org/tiny has no model-00001-of-00001.safetensors at commit"):
        locate(EngineConfig(model="org/tiny"))


def test_branches_tags_and_commits_are_found(hub, tiny):
    first = hub.add("org/tiny", tiny)
    other = hub.add("org/tiny", {**tiny, "model.safetensors": b"other"}, revision="refs/pr/1")
    assert first != other
    for revision, commit in (("main", first), (first, first), ("refs/pr/1", other), (other, other)):
        located = locate(EngineConfig(model="org/tiny", revision=revision))
        assert located.commit == commit and Path(located.config.model).name == commit
    assert (Path(located.config.model) / "model.safetensors").read_bytes() == b"other"


def test_a_branch_that_moves_on_is_fetched_again(hub, tiny):
    first = hub.add("org/tiny", tiny)
    locate(EngineConfig(model="org/tiny"))
    hub.asked.clear()
    second = hub.add("org/tiny", {**tiny, "generation_config.json": b'{"top_k": 3}'})
    assert locate(EngineConfig(model="org/tiny")).commit == second != first
    assert hub.fetched() == ["generation_config.json"]  # the others are the same blobs


def test_a_download_dir_takes_the_place_of_the_cache(hub, tiny, tmp_path, cache):
    hub.add("org/tiny", tiny)
    there = folder(EngineConfig(model="org/tiny", download_dir=str(tmp_path / "disk")))
    assert there.is_relative_to(tmp_path / "disk" / "models--org--tiny") and not cache.exists()


@pytest.mark.skipif(find_spec("hf_xet") is None, reason="needs hf_xet, which is not made for every processor")
def test_xet_is_left_to_huggingface_hub(hub, tiny, monkeypatch, capsys):
    """Its transfer is played; its reports go to the class of progress bars that it was given."""
    hub.xet = True
    hub.add("org/tiny", tiny)

    def play(incomplete_path: Path, xet_file_data: Any, tqdm_class: Any, expected_size: int, **_: object) -> None:
        (data,) = (data for data in tiny.values() if sha256(data).hexdigest() == xet_file_data.file_hash)
        incomplete_path.write_bytes(data)
        options: Any = {"reconstruction_desc": "", "total": expected_size, "log_level": logging.WARNING}
        with XetDownloadProgressReporter(tqdm_class=tqdm_class, **options) as bars:
            for done in (len(data) // 2, len(data)):
                rates = {"total_bytes_completion_rate": 1.0, "total_transfer_bytes_completion_rate": 1.0}
                bytes_done = {"total_bytes_completed": done, "total_transfer_bytes_completed": done // 3}
                bars.update_progress(SimpleNamespace(total_bytes=len(data), **rates, **bytes_done))

    monkeypatch.setattr(file_download, "xet_get", play)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress.log, "hasHandlers", lambda: False)
    there = folder(EngineConfig(model="org/tiny"))
    assert folder_files(there) == tiny
    assert not {"model.safetensors", "tokenizer.json"} & set(hub.fetched())
    lines = [line for line in capsys.readouterr().err.splitlines() if " of 1 MB" in line]
    assert lines == ["gapless: org/tiny: 524 kB of 1 MB", "gapless: org/tiny: 1 MB of 1 MB"]


def test_a_token_opens_a_private_model_and_stays_with_the_hub(hub, tiny, monkeypatch):
    hub.add("org/tiny", tiny)
    hub.models["org/tiny"].hidden, hub.token = True, "hf_secret"
    hub.cdn = hub.url.replace("127.0.0.1", "localhost")  # another host
    with pytest.raises(ConfigError, match="if it is private, set HF_TOKEN"):
        locate(EngineConfig(model="org/tiny"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    locate(EngineConfig(model="org/tiny"))
    there = [a for a in hub.asked if a.path.startswith("/cdn/")]
    assert there and not any(a.token for a in there)
    assert {a.token for a in hub.asked[1:] if a not in there} == {"hf_secret"}


def test_another_tokenizer_is_fetched_by_its_name(hub, tiny):
    tokenizer = {name: data for name, data in tiny.items() if name.startswith("tokenizer")}
    hub.add("org/words", {**tokenizer, "model.safetensors": b"not wanted"})
    hub.add("org/tiny", {n: d for n, d in tiny.items() if n not in tokenizer})
    located = locate(EngineConfig(model="org/tiny", tokenizer="org/words")).config
    assert located.tokenizer is not None
    assert folder_files(Path(located.tokenizer)) == tokenizer
    assert set(folder_files(Path(located.model))) == NEEDED - set(tokenizer)
    assert locate(EngineConfig(tokenizer="org/words")).config == EngineConfig(tokenizer=located.tokenizer)


def test_random_weights_need_none(hub, tiny):
    del tiny["model.safetensors"]
    hub.add("org/tiny", tiny)
    folder(EngineConfig(model="org/tiny", load_format="dummy"))
    assert set(hub.fetched()) == NEEDED - {"model.safetensors"}


def test_a_model_that_cannot_run_is_refused_before_its_weights_travel(hub, tiny):
    for change, words in (({"architectures": ["Other"]}, "architectures"), ({"auto_map": {"a": "b"}}, "never run")):
        config = json.loads(tiny["config.json"]) | change
        hub.add("org/tiny", {**tiny, "config.json": json.dumps(config).encode()})
        with pytest.raises(CheckpointError, match=words):
            locate(EngineConfig(model="org/tiny"))
    hub.add("org/tiny", tiny)
    with pytest.raises(ConfigError, match="max_model_len"):
        locate(EngineConfig(model="org/tiny", max_model_len=10**6))
    assert "model.safetensors" not in hub.fetched()


def test_a_survey_counts_the_missing_bytes(hub, tiny):
    hub.add("org/tiny", tiny)
    config = EngineConfig(model="org/tiny")
    located, missing = survey(config)
    assert missing == len(tiny["model.safetensors"]) and "model.safetensors" not in hub.fetched()
    assert locate(config) == located
    assert survey(config) == (located, 0)


def test_a_draft_model_is_fetched_by_its_name(hub, tiny, cache):
    config = json.loads(tiny["config.json"])
    fitting = json.dumps(config | {"vocab_size": 2048, "eos_token_id": None}).encode()
    commit = hub.add("org/small", tiny | {"config.json": fitting})
    asked = {"method": "draft_model", "model": "org/small", "num_speculative_tokens": 2}
    drafted = EngineConfig(model="demo", speculative_config=json.dumps(asked))
    located, missing = survey(drafted)
    assert missing == len(tiny["model.safetensors"]) and "model.safetensors" not in hub.fetched()
    assert locate(drafted) == located and set(hub.fetched()) == {"config.json", "model.safetensors"}
    there = cache / "models--org--small" / "snapshots" / commit
    assert located.config.speculation == SpeculativeConfig(**asked | {"model": str(there)})


def test_a_draft_model_without_a_method_is_known_by_its_config(hub, tiny):
    config = json.loads(tiny["config.json"]) | {"vocab_size": 2048, "eos_token_id": None}
    head = json.dumps(config | {"architectures": ["LlamaForCausalLMEagle3"]}).encode()
    for name, text, method in (("small", json.dumps(config).encode(), "draft_model"), ("head", head, "eagle3")):
        hub.add(f"org/{name}", tiny | {"config.json": text})
        located, _ = survey(EngineConfig(model="demo", speculative_config=json.dumps({"model": f"org/{name}"})))
        assert located.config.speculation is not None and located.config.speculation.method == method


def test_a_draft_model_of_another_vocabulary_is_refused_before_its_weights_travel(hub, tiny):
    hub.add("org/small", tiny)
    asked = json.dumps({"method": "draft_model", "model": "org/small"})
    with pytest.raises(ConfigError, match=r"vocabulary of .* and the model one of 2048"):
        locate(EngineConfig(model="demo", speculative_config=asked))
    assert "model.safetensors" not in hub.fetched()


def test_a_cache_that_cannot_be_written_is_read(hub, tiny, monkeypatch):
    """A complete snapshot is only read, also when the branch is not noted there."""
    commit = hub.add("org/tiny", tiny)
    locate(EngineConfig(model="org/tiny", revision=commit))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert locate(EngineConfig(model="org/tiny")).commit == commit
    monkeypatch.setattr(constants, "HF_HUB_CACHE", constants.HF_HUB_CACHE + "-other")
    with pytest.raises(ConfigError, match=r"cannot be written to .*-other \(Permission denied\): .*--download-dir"):
        locate(EngineConfig(model="org/tiny"))
