"""The report as JSON, Markdown and one HTML file, from made-up runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from ab_made_up import arm_run, load_run, made_report, made_runs, sample

from gapless.lab.arms import arms_from_flags, arms_from_urls
from gapless.lab.report_pages import p_value, percent, render_html, render_markdown, with_spread

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '</script><img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return made_report(made_runs(pairs=6, effect=0.1), metadata=(("commit", "abc"),))


def test_the_json_holds_what_the_table_needs(report):
    assert json.loads(json.dumps(report)) == report
    assert (report["schema"], report["kind"]) == (1, "gapless-ab")
    assert report["design"]["order"] == "ABBA" * 3 and report["design"]["unit"] == "run"
    assert [arm["letter"] for arm in report["arms"]] == ["A", "B"]
    assert [arm["completed"] for arm in report["arms"]] == [96, 96]
    assert report["arms"][0]["completed_a_run"] == [16, 0.0]
    first, second = report["runs"][:2]
    assert (first["seed"], first["first"], second["first"]) == (second["seed"], True, False)
    assert report["tokens"] == {"compared": 96, "differ": 0, "by": "text", "first": None, "not_compared": 0}
    rows = {row["key"]: row for row in report["metrics"]}
    assert rows["mean_tpot_ms"]["verdict"] == "worse"
    assert rows["p99_ttft_ms"]["a_tail"]["behind_a_run"] == 1
    assert len(json.dumps(report)) < 200_000


def test_a_report_has_quantiles_and_pairs_of_requests(report):
    for name, figure in report["requests"].items():
        for letter in "AB":
            points = figure[letter]["quantiles"]
            assert len(points) == 101 and points == sorted(points), name
    paired = report["requests"]["e2el"]["paired"]
    assert paired["n"] == 96 and paired["lower_in_b"] < 0.2
    # The whole answer takes 9 gaps of about 10 ms; 10 % of that are 9 ms.
    assert paired["p10"] < 9 < paired["p90"] and paired["median"] == pytest.approx(9, abs=2)


def test_settings_of_servers_that_ran_already_are_compared(report):
    a, b = report["arms"]
    facts = {**a["server"], "settings": {"depth": "1", "seed": 3}, "device": "cpu", "dtype": "float32"}
    sides = [{**a, "flags": [], "server": facts}, {**b, "flags": [], "server": {**facts, "settings": {}}}]
    text = render_markdown({**report, "arms": sides})
    assert "| all flags | `depth=1 seed=3` | defaults |" in text
    assert "| model | demo, cpu, float32 | demo, cpu, float32 |" in text


def test_markdown_is_a_table_for_people(report):
    text = render_markdown({**report, "rules": [{"rule": "worse:1%", "failed": True, "why": "Mean TPOT is worse"}]})
    rows = [line for line in text.splitlines() if line.startswith("|")]
    header = rows[0]
    assert header.startswith("| metric | A (6) | B (6) | Δ | 95 % interval |")
    assert {row.count("|") for row in rows[:10]} == {header.count("|")}
    (tpot,) = [row for row in rows if row.startswith("| Mean TPOT [ms] ↓")]
    assert "✗" in tpot and re.search(r"\| \+\d+\.\d+ % \| \+\d+\.\d+ % … \+\d+\.\d+ % \|", tpot)
    assert "**Same tokens: yes**, all 96 answers" in text
    assert "| own flags | `--depth 1` | `--depth auto` |" in text
    assert "✗ `--fail-if worse:1%`: Mean TPOT is worse" in text
    assert "cross-over" in text.lower()
    assert "Work of a run: dataset random, num prompts 16, commit abc." in text


def test_numbers_are_rounded_in_markdown():
    assert [percent(x) for x in (0.0123, -0.0123, 0.0, -0.000001, 0.123, 12.3)] == [
        "+1.23 %", "−1.23 %", "0.00 %", "0.00 %", "+12.3 %", "+1230 %"]  # fmt: skip
    assert with_spread(12.3456, 0.123) == "12.35 ± 0.12" and with_spread(1234.5, 67.8) == "1234 ± 68"
    assert with_spread(5.0, 0.0) == "5" and p_value(0.00001) == "< 0.0001" and p_value(None) == "n/a"


def test_a_report_says_what_weakens_it():
    runs = made_runs(pairs=4)
    runs[0] = runs[0]._replace(busy_before=0.9)
    runs[2] = runs[2]._replace(notes=("the client was late",))
    runs[3] = runs[3]._replace(metrics={k: v for k, v in runs[3].metrics.items() if k != "mean_itl_ms"})
    bad = load_run(0.01)
    bad = bad._replace(samples=(*bad.samples[:-1], sample(15, error="HTTP 500: no")))
    runs[5] = arm_run(runs[5].letter, runs[5].pair, runs[5].first, bad)
    text = "\n".join(made_report(runs)["warnings"])
    assert "no such figure: mean_itl_ms" in text
    assert "requests of arm" in text and "HTTP 500: no" in text
    assert "1 of 8 runs began while other processes" in text
    assert "the client was late" in text
    assert "worst one of 16 samples" in text
    assert "too few" not in text and "too few runs" in "\n".join(made_report(made_runs(pairs=2))["warnings"])


def test_a_drift_is_reported():
    runs = made_runs(pairs=8, noise=0.001)
    slow = [arm_run(r.letter, r.pair, r.first, load_run(0.01 * (1 + 0.01 * k))) for k, r in enumerate(runs)]
    report = made_report(slow)
    assert "drifted by" in "\n".join(report["warnings"])
    assert all(row["verdict"] == "same" for row in report["metrics"]), "ABBA keeps the drift out"


def test_other_tokens_are_reported():
    runs = made_runs(pairs=2)
    other = runs[1].load.samples[3]._replace(text="another answer")
    samples = (*runs[1].load.samples[:3], other, *runs[1].load.samples[4:])
    runs[1] = runs[1]._replace(load=runs[1].load._replace(samples=samples))
    report = made_report(runs)
    assert report["tokens"]["differ"] == 1 and report["tokens"]["first"]["place"] == 3
    assert "Same tokens: NO" in render_markdown(report)
    assert any("1 of 32 answers differ" in text for text in report["warnings"])


def test_keys_do_not_get_into_reports():
    arms = arms_from_flags(["--api-key", "sesame"], ["--api-key=tulip", "--depth", "1"], ["--depth", "2"])
    command = ("gapless", "ab", "--api-key", "rose", "--", "--api-key", "sesame", "--", "--header", "daisy")
    report = made_report(arms=arms)
    report["command"] = made_report_command(command)
    for secret in ("sesame", "tulip", "rose", "daisy"):
        assert secret not in json.dumps(report) + render_markdown(report)
    assert "--api-key" in json.dumps(report)


def made_report_command(command: tuple[str, ...]) -> list[str]:
    from gapless.lab.arms import shown_flags

    return shown_flags(command)


def test_the_html_is_one_file_with_a_strict_policy(report):
    page = render_html(report)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    for tag, name in (('<script type="module">', "script"), ("<style>", "style")):
        inner = page.split(tag)[1].split(f"</{name}>")[0]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    addresses = set(re.findall(r"https?://[^\"'\s)<]+", page)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set(), "nothing is loaded from anywhere"
    assert not re.search(r"\son\w+=|javascript:|style=|@import|url\(", page)


def test_names_cannot_break_out_of_the_html():
    page = render_html(made_report(arms=arms_from_urls(HOSTILE, "http://b")))
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["arms"][0]["url"] == HOSTILE
    assert "<img" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine draws the page")
@pytest.mark.process
def test_a_browser_draws_it(tmp_path):
    made = made_report(made_runs(pairs=6, effect=0.1), arms=arms_from_urls(HOSTILE, "http://b"))
    path = tmp_path / "report.html"
    path.write_text(render_html(made), encoding="utf-8")
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    drawn = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)
    assert drawn.count('<tr><th scope="row">') >= len(made["metrics"])
    assert "worse" in drawn and "✗" in drawn and "Both sides" in drawn
    assert drawn.count("<svg") == 3 and "<title>A, pair 1, seed 0" in drawn
    assert "&lt;/script&gt;&lt;img" in drawn and "<img" not in drawn
    assert "undefined" not in drawn and "NaN" not in drawn and "[object" not in drawn
