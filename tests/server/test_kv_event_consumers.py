"""KV events before software of others that reads them: the indexer of NVIDIA's Dynamo, and vLLM's own definitions."""

import importlib.util
import json
import random
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fake_resp import free_port
from served import Server

from gapless.base.records import PageChange, PageEvent
from gapless.server.kv_events import KvEventPublisher
from gapless.server.kv_events_config import KvEventsConfig

zmq = pytest.importorskip("zmq", reason="needs the extra events")
pytestmark = pytest.mark.net
PAGE = 16


def asked(url: str, body: dict | None = None):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read() or b"null")


def known(indexer: str, prompt: list[int]) -> int:
    """Tokens in front of a prompt that the indexer thinks the server has, when it has read what was published."""
    last, found = -1, -2
    while last != found:
        last, found = found, asked(f"{indexer}/query", {"token_ids": prompt, "model_name": "demo"})
        found = found["instances"].get("1", {}).get("longest_matched", 0)
        time.sleep(0.15)
    return found


def test_the_indexer_of_dynamo_knows_what_the_server_has_cached():
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("ai-dynamo-runtime is not installed")
    endpoint, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})
    options = ["--max-model-len", "256", "--num-gpu-blocks-override", "24", "--block-size", str(PAGE)]
    words = ["--block-size", str(PAGE), "--port", str(port), "--workers", f"1={endpoint}", "--model-name", "demo"]
    command = [sys.executable, "-m", "dynamo.indexer", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        server = Server("demo", "--device", "cpu", *options, "--kv-events-config", events)
        try:
            indexer = f"http://127.0.0.1:{port}"
            draw = random.Random(2)
            stem = [draw.randrange(3, 200) for _ in range(48)]
            prompts = [stem[: 16 * (at % 4)] + [draw.randrange(3, 200) for _ in range(80)] for at in range(8)]
            seen = set()
            for turn in range(40):
                prompt = draw.choice(prompts)
                believed = known(indexer, prompt)
                before = server.metric("vllm:prefix_cache_hits_total")
                asked(f"{server.base}/v1/completions", {"model": "demo", "prompt": prompt, "max_tokens": 2})
                cached = server.metric("vllm:prefix_cache_hits_total") - before
                # The last token is always computed, and so is its page.
                assert cached == min(believed, (len(prompt) - 1) // PAGE * PAGE), (turn, believed, cached)
                seen.add(cached)
            assert len(seen) > 4, "pages were cached, and given up, by parts"
        finally:
            server.stop()
            process.kill()


def definitions_of_vllm(monkeypatch):
    """vLLM's module of KV events, from its file; what it imports from the rest of vLLM is not needed to decode."""
    folders = [Path(folder) / "vllm/distributed/kv_events.py" for folder in sys.path]
    path = next((path for path in folders if path.exists()), None)
    if path is None:
        pytest.skip("vLLM is not installed")
    for name, fields in {
        "vllm": {}, "vllm.config": {}, "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: None}, "vllm.v1": {}, "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }.items():  # fmt: skip
        module = types.ModuleType(name)
        module.__dict__.update(fields)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("vllm_kv_events", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_event_is_decoded_by_the_definitions_of_vllm(tmp_path, monkeypatch):
    theirs = definitions_of_vllm(monkeypatch)
    given = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/out"}
    publisher = KvEventPublisher(KvEventsConfig.parse(json.dumps(given)))
    context = zmq.Context()
    try:
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe("")
        subscriber.connect(given["endpoint"])
        cleared = PageEvent(PageChange.CLEARED)
        while not subscriber.poll(20):
            publisher.publish([cleared])
        one, two = (bytes(24) + number.to_bytes(8, "big") for number in (7, 8))
        tokens = np.arange(4, dtype=np.int32)
        stored = PageEvent(PageChange.STORED, 0, (one, two), None, tokens, salt=":s", adapter="lora", window=6)
        publisher.publish([stored, PageEvent(PageChange.REMOVED, 1, (one,)), cleared])
        batch = None
        while batch is None or len(batch.events) < 3:
            assert subscriber.poll(5_000)
            batch = msgspec.msgpack.decode(subscriber.recv_multipart()[2], type=theirs.KVEventBatch)
        first, removed, last = batch.events
        assert (first.block_hashes, first.token_ids, first.block_size) == ([7, 8], [0, 1, 2, 3], 2)
        assert (first.medium, first.lora_name, first.kv_cache_spec_sliding_window) == (theirs.MEDIUM_GPU, "lora", 6)
        assert removed == theirs.BlockRemoved([7], theirs.MEDIUM_GPU, 1) and last == theirs.AllBlocksCleared()
    finally:
        publisher.close()
        context.destroy(linger=0)
