"""Alarms and the dashboard's queries in a real Prometheus, which scrapes a server under load:
`PROMETHEUS_FOLDER=/usr/bin make test ARGS=tests/server/test_prometheus.py` where Debian's package prometheus is.
"""

import json
import os
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_dashboard import ALARMS, FILE, expressions

FOLDER = os.environ.get("PROMETHEUS_FOLDER")
PATIENCE = 60
pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(
        not FOLDER, reason="PROMETHEUS_FOLDER names no folder that has prometheus and promtool (Debian: prometheus)"
    ),
]


def test_promtool_takes_the_alarms():
    done = subprocess.run([f"{FOLDER}/promtool", "check", "rules", str(ALARMS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextmanager
def prometheus(folder, target):
    """The address of a Prometheus that scrapes `target` every second and evaluates the alarms."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALARMS)],
        "scrape_configs": [{"job_name": "gapless", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{place.getsockname()[1]}"
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with subprocess.Popen(
        [f"{FOLDER}/prometheus", *flags, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL
    ) as running:
        try:
            yield f"http://{address}/api/v1"
        finally:
            running.terminate()


def ask(api, path, **query):
    with urllib.request.urlopen(f"{api}/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]


def filled(expression):
    for name in ("job", "instance", "model_name"):
        expression = expression.replace(f"${name}", ".*")
    return expression.replace("$__rate_interval", "30s")


def test_every_query_and_alarm_is_answered_by_a_real_prometheus(server, client, tmp_path: Path):
    queries = [filled(expression) for expression in expressions(json.loads(FILE.read_text(encoding="utf-8")))]
    with prometheus(tmp_path, server.url.removeprefix("http://")) as api:
        end = time.monotonic() + PATIENCE
        while True:
            client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 20, "ignore_eos": True})
            try:
                data = ask(api, "query", query="rate(vllm:generation_tokens_total[30s]) > 0")["result"]
            except OSError:
                data = []
            if data:
                break
            assert time.monotonic() < end
            time.sleep(0.5)
        found = {query: ask(api, "query", query=query)["result"] for query in queries}
        rules = [rule for group in ask(api, "rules")["groups"] for rule in group["rules"]]
    silent = [query for query, values in found.items() if not values]
    print(f"{len(queries)} queries, {len(silent)} without data")
    special = ("kv_lower_tier", "kv_event", "adapter", "spec_decode", "http_requests_total", "admission_rejections")
    assert [query for query in silent if not any(name in query for name in special)] == []
    assert len(rules) > 10 and {rule["health"] for rule in rules} == {"ok"}, rules
