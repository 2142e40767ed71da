"""KV events before software of others that reads them: the indexer of NVIDIA's Dynamo."""

import importlib.util
import json
import random
import subprocess
import sys
import time
import urllib.request

import pytest
from fake_resp import free_port
from served import Server

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
