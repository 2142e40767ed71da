"""`serve` from its start to its end, as a process whose engine is a child, by the lines of JSON that it writes."""

import json
import re

import httpx
from server_process import process, write_tiny


def test_a_whole_run_is_told_in_lines_of_json(tmp_path_factory):
    settings = {"log_format": "json", "enable_log_requests": True, "api_key": ["s3cret"]}
    with process(write_tiny(tmp_path_factory), **settings) as server:
        said = []
        while not said or " serves " not in said[-1]:
            said.append(server.popen.stderr.readline())
            assert said[-1], "it ended"
        assert len(said) <= 8
        url = re.search(r"http://[^ ,]+:\d+", said[-1])[0]
        with httpx.Client(base_url=url, timeout=60, headers={"authorization": "Bearer s3cret"}) as client:
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers={"x-request-id": "r1"})
            client.get("/metrics")
        assert server.end() == 0
        out, rest = server.popen.communicate(timeout=60)
    assert out == ""
    lines = [json.loads(line) for line in "".join([*said, rest]).splitlines()]
    assert "s3cret" not in str(lines)
    assert (lines[0]["level"], lines[0]["phase"]) == ("info", "starting the engine's process")
    assert lines[1]["settings"]["api_key"] == "<secret>"
    assert any("startup_seconds" in line and line["startup_seconds"]["ready"] > 0 for line in lines)
    (asked,) = [line for line in lines if "request_id" in line]
    assert (asked["request_id"], asked["generation_tokens"]) == ("r1", 3)
    assert [line["path"] for line in lines if line["logger"] == "uvicorn.access"] == ["/v1/completions"]
