"""The page's modules on their own, in a browser without a server, against figures worked out here."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route

import gapless.ui

pytestmark = pytest.mark.process
FOLDER = Path(gapless.ui.__file__).parent
BASE = "http://page.test"
TYPES = {".js": "text/javascript", ".html": "text/html", ".css": "text/css", ".svg": "image/svg+xml"}
COLUMNS = (
    "step", "decode_rows", "chunk_tokens", "in_flight", "planning_at", "planned_at", "packed_at", "launched_at",
    "device_start", "device_end", "home_at", "observing_at", "observed_at", "committed_at", "waited",
)  # fmt: skip


def from_disk(route: Route) -> None:
    name = route.request.url.removeprefix(BASE + "/")
    if name == "":
        route.fulfill(body="<!doctype html><title>empty</title>", content_type="text/html")
    else:
        path = FOLDER / name
        route.fulfill(body=path.read_text(encoding="utf-8"), content_type=TYPES[path.suffix])


@pytest.fixture(scope="module")
def page(chromium: Browser) -> Iterator[Page]:
    page = chromium.new_page()
    page.route("**/*", from_disk)
    page.goto(BASE + "/")
    yield page
    page.close()


def step(number: int, start: float, end: float) -> list[object]:
    """A step on the device from `start` to `end` ms; the host's times around it do not matter here."""
    begin, finish = round(start * 1e6), round(end * 1e6)
    return [number, 4, 0, 2, *[begin - 1000] * 4, begin, finish, finish, finish, finish, finish + 1000, True]


def event(steps: list[list[object]], gaps: list[list[object]], now: float) -> dict[str, object]:
    return {"now": round(now * 1e6), "columns": COLUMNS, "steps": steps, "gaps": gaps}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_events_are_the_same_however_the_bytes_are_cut(page, newline):
    text = newline.join(
        ['data: {"a": "ä€😀"}', "", ": ping", "", "data: two", "data: lines", "", "data:bare", "", "data: cut"]
    )
    whole = ['{"a": "ä€😀"}', "two\nlines", "bare"]
    found = page.evaluate(
        """async ([text, sizes]) => {
          const { serverEvents } = await import("/sse.js");
          const bytes = new TextEncoder().encode(text);
          const results = [];
          for (const size of sizes) {
            const stream = new ReadableStream({ start(controller) {
              for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
              controller.close();
            } });
            const events = [];
            for await (const data of serverEvents(new Response(stream))) events.push(data);
            results.push(events);
          }
          return results;
        }""",
        [text, list(range(1, 20))],
    )
    assert found == [whole] * 19


def test_coverage_equals_a_count_over_fine_samples(page):
    rng = random.Random(1)
    spans = [sorted((rng.uniform(-5, 45), rng.uniform(-5, 45))) for _ in range(40)]
    columns = page.evaluate(
        """async ([spans, from, per, many]) => {
          const { cover } = await import("/coverage.js");
          const columns = new Float64Array(many);
          for (const [start, end] of spans) cover(columns, from, per, start, end);
          return Array.from(columns);
        }""",
        [spans, 3.0, 0.7, 50],
    )
    fine = 200
    for place, share in enumerate(columns):
        samples = (3.0 + 0.7 * (place + (k + 0.5) / fine) for k in range(fine))
        counted = sum(sum(start <= at < end for start, end in spans) for at in samples) / fine
        assert share == pytest.approx(counted, abs=len(spans) / fine)


def test_the_words_under_the_timeline_are_the_numbers_of_the_records(page):
    # 100 ms: busy 0..40 and 50..90, host late 40..46, depth 46..50, no work 90..100.
    steps = [step(1, 0, 40), step(2, 50, 90)]
    gaps = [[40e6, 46e6, "host_late", 2], [46e6, 50e6, "depth", 2], [90e6, 100e6, "no_work", 3]]
    words, idle, long = page.evaluate(
        """async ([event]) => {
          const { History } = await import("/history.js");
          const { idleByCause, longestBubbles, summary } = await import("/bubbles.js");
          const history = new History();
          history.add({ now: 0 }, 0);
          history.add(event, 100);
          const idle = idleByCause(history.gapsBetween(0, 100), 0, 100);
          return [summary(history, 0, 100, idle), Object.fromEntries(idle), longestBubbles(history, 0, 100)];
        }""",
        [event(steps, gaps, 100)],
    )
    assert idle == {"host_late": 6, "depth": 4, "no_work": 10}
    assert [(gap["cause"], gap["end"] - gap["start"]) for gap in long] == [("host_late", 6), ("depth", 4)]
    assert words.replace("\u00a0", " ") == (
        "100 ms: device busy 80 %, bubbles 10 %, mostly host late, no work 10 %; 2 steps, median 40.0 ms"
    )


def test_waits_for_other_ranks_are_bubbles_in_a_step_and_lanes_of_each_rank(page):
    # 100 ms: steps at 0..40 and 40..100, whose ends are waits of 4 and 6 ms; the second rank waits 1 and 2 ms.
    columns = [*COLUMNS, "ranks_ns", "waits"]
    steps = [[*step(1, 0, 40), 4e6, [1e6]], [*step(2, 40, 100), 6e6, [2e6]]]
    gaps = [[36e6, 40e6, "ranks", 1], [94e6, 100e6, "ranks", 2]]
    words, detail, lanes, before = page.evaluate(
        """async ([event]) => {
          const { History } = await import("/history.js");
          const { idleByCause, summary } = await import("/bubbles.js");
          const { gapText } = await import("/lanes.js");
          const { lanesFor } = await import("/lanes_draw.js");
          const history = new History();
          history.add({ now: 0 }, 0);
          const lanesNow = () => lanesFor([], history.ranks).filter((lane) => lane.name.startsWith("rank"));
          const before = lanesNow().length;
          history.add(event, 100);
          const [gap] = history.gapsBetween(90, 100);
          const idle = idleByCause(history.gapsBetween(0, 100), 0, 100);
          const lanes = lanesNow().map((lane) => [lane.name, ...history.steps.flatMap(lane.spans)]);
          return [summary(history, 0, 100, idle), gapText(gap), lanes, before];
        }""",
        [{**event(steps, gaps, 100), "columns": columns}],
    )
    assert words.replace("\u00a0", " ").startswith("100 ms: device busy 90 %, bubbles 10 %, mostly ranks, no work 0 %")
    assert detail.replace("\u00a0", " ").startswith("ranks: device idle 6.00 ms in step 2 (a step waited")
    assert lanes == [["rank 0", 0, 36, 40, 94], ["rank 1", 0, 39, 40, 98]] and before == 0


def test_a_window_holds_what_touches_it_and_a_minute_is_kept(page):
    result = page.evaluate(
        """async ([columns]) => {
          const { History } = await import("/history.js");
          const history = new History();
          history.add({ now: 0, columns }, 0);
          for (let at = 0; at < 100_000; at += 50) {
            const ns = at * 1e6;
            const ends = ns + 40e6;
            const line = [at / 50, 1, 0, 1, ns, ns, ns, ns, ns, ends, ends, ends, ends, ends, true];
            history.add({ now: ns + 50e6, steps: [line] }, at + 57);
          }
          const window = history.stepsBetween(99_045, 99_200).map((one) => one.step);
          const [first] = history.steps;
          const edge = history.edge(100_007);
          history.add({ now: 5e6, steps: [] }, 0);
          return { window, oldest: first.end, edge, afterJump: history.steps.length };
        }""",
        [COLUMNS],
    )
    assert result["window"] == [1981, 1982, 1983]  # one ends at 99,040: not in sight
    assert 100_000 - 60_000 - 500 * 50 <= result["oldest"] <= 40_000
    assert 99_000 < result["edge"] < 100_000
    assert result["afterJump"] == 0


def test_zoom_keeps_the_moment_under_the_pointer_and_end_follows_again(page):
    result = page.evaluate(
        """async () => {
          const { View } = await import("/view.js");
          const view = new View();
          view.zoom(0.5, 0.3, 10_000);
          const live = [view.live, view.end(10_000), view.span];
          view.hold(10_000);
          const before = view.start(0) + 0.25 * view.span;
          view.zoom(0.1, 0.25, 11_000);
          const after = view.start(0) + 0.25 * view.span;
          view.pan(-0.5, 11_000);
          const panned = view.heldEnd;
          view.pan(1e9, 11_000);
          const latest = view.heldEnd;
          view.zoom(1e-9, 0.5, 11_000);
          const shortest = view.span;
          view.follow();
          return { live, before, after, panned, latest, shortest, end: view.end(12_000) };
        }"""
    )
    assert result["live"] == [True, 10_000, 1000]
    assert result["after"] == pytest.approx(result["before"])
    assert result["panned"] < 10_000
    assert result["latest"] == 11_000
    assert result["shortest"] == pytest.approx(0.05)
    assert result["end"] == 12_000


@pytest.mark.parametrize(
    "call, text",
    [
        ("duration(0.0871)", "87.1 µs"), ("duration(3.124)", "3.12 ms"), ("duration(1400)", "1.40 s"),
        ("duration(0)", "0 µs"), ("duration(NaN)", "–"), ("percent(0.0004)", "0.04 %"), ("percent(0.0123)", "1.2 %"),
        ("percent(0.5)", "50 %"), ("percent(0)", "0 %"), ("rate(1234.4)", "1,234"), ("rate(0.4211)", "0.42"),
        ("count(1234567)", "1,234,567"), ("duration(0.9999)", "1000 µs"), ("median([3, 1, 2])", 2),
        ("bytes(1536)", "1.50 KiB"), ("bytes(0)", "0 B"), ("bytes(1023)", "1,023 B"), ("bytes(NaN)", "–"),
        ("bytes(12 * 2 ** 30)", "12.0 GiB"), ("bytes(3e15)", "2728 TiB"),
    ],
)  # fmt: skip
def test_numbers_are_written_for_people(page, call, text):
    found = page.evaluate(f"import('/format.js').then(({{ bytes, duration, percent, rate, count, median }}) => {call})")
    assert found == text or found.replace("\u00a0", " ") == text


def test_copies_of_pages_have_lanes_once_a_step_tells_of_some(page):
    columns = [*COLUMNS, "loads_from", "loads_until", "stores_from", "stores_until"]
    first, second = [*step(1, 10, 20), 0, 0, 0, 0], [*step(2, 30, 40), 21e6, 29e6, 5e6, 8e6]
    copies, before, after = page.evaluate(
        """async (events) => {
          const { History } = await import("/history.js");
          const { lanesFor } = await import("/lanes_draw.js");
          const [history, lanes] = [new History(), []];
          for (const event of events) {
            history.add(event, 0);
            lanes.push(lanesFor(history.copies).filter((lane) => lane.kind === "copy").map((lane) => lane.name));
          }
          return [history.copies.map((one) => [one.lane, one.end - one.start]), ...lanes];
        }""",
        [{"now": 50e6, "columns": columns, "steps": [one]} for one in (first, second)],
    )
    assert before == [] and after == ["copy in", "copy out"]
    assert copies == [["in", pytest.approx(8)], ["out", pytest.approx(3)]]


def test_copies_of_both_directions_are_found_whichever_ended_first(page):
    columns = [*COLUMNS, "loads_from", "loads_until", "stores_from", "stores_until"]
    moved = [(1, 4, 0, 0), (5, 45, 6, 8), (0, 0, 9, 10), (0, 0, 11, 12), (0, 0, 13, 14)]
    steps = [[*step(n, 50 + n, 51 + n), *[at * 1e6 for at in copies]] for n, copies in enumerate(moved, 1)]
    found = page.evaluate(
        """async (event) => {
          const { History } = await import("/history.js");
          const history = new History();
          history.add(event, 0);
          const origin = history.copies[0].start - 1;
          return history.copiesBetween(origin + 30, origin + 60).map((one) => [one.lane, one.end - one.start]);
        }""",
        {"now": 90e6, "columns": columns, "steps": steps},
    )
    assert found == [["in", pytest.approx(40)]]


def test_tiers_are_rows_and_without_any_there_is_no_table(page):
    none = {"dropped": {"slow": 0}, "refused": 0, "late": 0}
    moved = {"loading": 1, "storing": 2, "read_bytes": 2048, "written_bytes": 3 << 20}
    tiers = [
        {"tier": "host", "used": 48, "size": 64, "hits": 31, "missed": 31, **moved, **none},
        {"tier": "disk", "used": 1 << 30, "size": 2 << 30, "hits": 0, "missed": 9, **moved, **none, "late": 4},
        {"tier": "redis", "used": 0, "size": 0, "hits": 0, "missed": 0, **moved, **none, "dropped": {"slow": 7}},
    ]
    rows, hidden = page.evaluate(
        """async (tiers) => {
          const { TierTable } = await import("/tiers.js");
          const section = document.body.appendChild(document.createElement("section"));
          section.hidden = true;
          const body = section.appendChild(document.createElement("table")).createTBody();
          const table = new TierTable(body);
          table.show(tiers);
          const rows = [...body.rows].map((row) => [...row.cells].map((cell) => cell.textContent));
          const hidden = [section.hidden];
          table.show([]);
          return [rows, [...hidden, section.hidden, body.rows.length]];
        }""",
        tiers,
    )
    rows = [[cell.replace("\u00a0", " ") for cell in row] for row in rows]
    same = ["1", "2", "2.00 KiB", "3.00 MiB"]
    assert rows == [
        ["host", "48 of 64 pages", "50 %", *same, "–"],
        ["disk", "1.00 GiB of 2.00 GiB", "0 %", *same, "4 late"],
        ["redis", "–", "–", *same, "7 slow"],
    ]
    assert hidden == [False, True, 0]


def test_events_that_stand_out_are_named_with_their_mends(page):
    calm = {"time": [1, 2, 3], "itl_p50": [0.01] * 3, "itl_max": [0.02] * 3, "waiting": [0] * 3, "busy": [0.5] * 3}
    stalled = {**calm, "itl_max": [0.02, 2.5, 0.02]}
    late = {**calm, "host_late": [0.2, None, 0.4], "launch": [0.1, None, 0.1]}
    full = {**calm, "waiting": [4] * 3, "running": [8] * 3, "kv": [0.5] * 3}
    short = {**full, "kv": [0.99] * 3, "busy": [0.95] * 3}
    found = page.evaluate(
        """async (all) => {
          const { reasons } = await import("/why.js");
          const { Samples } = await import("/samples.js");
          return all.map((columns) => {
            const samples = new Samples();
            samples.columns = columns;
            return reasons(samples, { max_num_seqs: 8 }).map((one) => one.text + ": " + one.mend);
          });
        }""",
        [calm, stalled, late, full, short],
    )
    found = [[text.replace("\u00a0", " ") for text in texts] for texts in found]
    assert found[0] == []
    (stall,) = found[1]
    assert stall.startswith("A request waited up to 2.50 s for its next token, 1.00 s ago: ")
    (bubbles,) = found[2]
    assert "idle 40 % of the time although there was work, mostly host late (30 %): " in bubbles
    assert "--threads" in bubbles
    assert len(found[3]) == 1 and "8 run, as many as may: raise --max-num-seqs" in found[3][0]
    assert len(found[4]) == 2 and "99 % of the KV pages" in found[4][0] and "busy 95 %" in found[4][1]


def test_samples_go_on_until_the_server_is_another(page):
    lengths = page.evaluate(
        """async () => {
          const { Samples } = await import("/samples.js");
          const [samples, lengths] = [new Samples(), []];
          const columns = ["time", "generated"];
          for (const [first, next, rows] of [[3, 5, [[1, 1], [2, 2]]], [5, 6, [[3, 3]]], [0, 1, [[9, 9]]]]) {
            samples.add({ columns, first, next, samples: rows, latency: {}, memory: {} });
            lengths.push([samples.length, samples.next, samples.mean("generated", 2)]);
          }
          return lengths;
        }"""
    )
    assert lengths == [[2, 5, 1.5], [3, 6, 2.5], [1, 1, 9]]


def test_a_reply_that_grows_keeps_its_finished_blocks(page):
    kept = page.evaluate(
        """async () => {
          const { showMarkdown } = await import("/markdown.js");
          const root = document.createElement("div");
          showMarkdown(root, "one\\n\\n```js\\nlet");
          const [first] = root.childNodes;
          showMarkdown(root, "one\\n\\n```js\\nlet x\\n```\\n- a\\n- b\\n\\n\\n");
          const names = [...root.children].map((one) => one.localName);
          return [root.childNodes[0] === first, names, root.querySelector("pre").textContent];
        }"""
    )
    assert kept == [True, ["p", "div", "ul"], "let x"]


def test_headings_lose_their_closing_marks_alone(page):
    texts = page.evaluate(
        """async () => {
          const { showMarkdown } = await import("/markdown.js");
          const root = document.createElement("div");
          showMarkdown(root, "# a ##  \\n# C#\\n### ##\\n#no\\n");
          return [...root.children].map((one) => [one.localName, one.textContent]);
        }"""
    )
    assert texts == [["h3", "a"], ["h3", "C#"], ["h5", ""], ["p", "#no"]]


@pytest.mark.parametrize(
    "text",
    [
        "*" * 20_000,
        "[" * 20_000,
        "`" * 9_999,
        "> " * 5_000,
        "- " * 5_000,
        "_a" * 9_999,
        "**a" * 5_000,
        f"# a{' ' * 5_000}b",
    ],
)
def test_hostile_markdown_is_shown_in_time(page, text):
    ms = page.evaluate(
        """async (text) => {
          const { showMarkdown } = await import("/markdown.js");
          const began = performance.now();
          showMarkdown(document.createElement("div"), text);
          return performance.now() - began;
        }""",
        text,
    )
    assert ms < 5_000
