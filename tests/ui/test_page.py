"""The live page in a real browser, on a real server with the demo model, by roles and names as a reader has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from lab.ab_made_up import made_report
from playwright.sync_api import Browser, Page, expect
from served import Server
from ui_browser import PATIENCE_MS, Watch, browser
from ui_load import Load

KEY = "sk-of-the-page-tests"
SIZE = {"width": 1240, "height": 980}
CAUSES = ("host late", "depth", "launch", "graph miss", "grammar", "copy wait", "no work")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(chromium: Browser) -> Iterator[Server]:
    server = Server("--max-num-seqs", "8", "--api-key", KEY, "--kv-tier", "host:64MiB")
    yield server
    assert server.stop() == 0, "".join(server.lines)


@pytest.fixture
def load(server: Server) -> Iterator[None]:
    """Work for the engine, only in tests that need it: it takes all of a core."""
    with Load(server.base, KEY):
        yield


@pytest.fixture(scope="module")
def opened(chromium: Browser, server: Server) -> Iterator[tuple[Page, Watch]]:
    """One page for all tests that leave it as they found it; it has the key."""
    context = chromium.new_context(viewport=SIZE)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(f"sessionStorage.setItem('gapless-api-key', '{KEY}')")
    page = context.new_page()
    watch = Watch(page, server.base)
    page.goto(f"{server.base}/ui")
    yield page, watch
    context.close()


@pytest.fixture
def page(opened: tuple[Page, Watch]) -> Iterator[Page]:
    """Live again before each test, and after it nothing has gone wrong."""
    page, watch = opened
    page.evaluate("gapless.view.span = 2000")
    if page.evaluate("!gapless.view.live"):
        page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "false")
    yield page
    watch.none()


def count(page: Page, name: str) -> int:
    return int(page.evaluate(f"gapless.counters.{name}"))


def wait_for_more(page: Page, name: str, more: int = 1) -> None:
    """Until a counter has grown by `more` from now on."""
    page.wait_for_function(f"(goal) => gapless.counters.{name} >= goal", arg=count(page, name) + more)


def timeline(page: Page):
    return page.get_by_role("application", name="Timeline of host and device")


def test_the_page_asks_for_the_key_and_keeps_it_for_the_tab_only(chromium, server):
    context = chromium.new_context(viewport=SIZE)
    page = context.new_page()
    page.goto(f"{server.base}/ui")
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    expect(page.locator("#status")).to_have_text("an API key is needed")
    dialog.get_by_label("Key", exact=True).fill("wrong")
    with page.expect_response(lambda answer: answer.status == 401):
        page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_role("button", name="Use it").click()
    expect(page.locator("#status")).to_have_text("live")
    wait_for_more(page, "events")
    assert page.evaluate("Object.values(localStorage).join()").find(KEY) == -1
    assert KEY not in page.content()
    context.close()


def test_the_timeline_gets_steps_and_the_gauges_move(page, load):
    expect(page.locator("#status")).to_have_text("live")
    for name in ("steps", "gaps", "frames", "gauges", "pages", "requests"):
        wait_for_more(page, name)
    gauges = page.get_by_label("Gauges")
    terms, values = gauges.get_by_role("term"), gauges.locator(".value")
    names = ("Tokens per second", "Running", "Bubbles", "Step on the device", "Steps in flight", "KV pages in use")
    assert terms.all_text_contents() == list(names)
    page.wait_for_function("() => document.querySelectorAll('.value')[1].textContent === '3'")
    page.wait_for_function("() => parseFloat(document.querySelector('.value').textContent) > 0")
    shown = dict(zip(names, values.all_text_contents(), strict=True))
    assert re.fullmatch(r"[\d.]+\s(µs|ms|s)", shown["Step on the device"])
    words = page.locator("#summary").text_content()
    busy = float(re.search(r"device busy ([\d.]+)", words)[1])
    assert 0 < busy <= 100 and int(re.search(r"([\d,]+) steps", words)[1].replace(",", "")) > 0, words
    assert page.locator(".spark .line").first.get_attribute("d").count("L") > 0


def test_the_steps_are_those_of_the_engine(page, load):
    wait_for_more(page, "steps", 10)
    steps = page.evaluate(
        """async () => {
          const { call } = await import("/ui/api.js");
          const { serverEvents } = await import("/ui/sse.js");
          const stop = new AbortController();
          const found = [];
          let columns;
          for await (const data of serverEvents(await call("debug/steps", { signal: stop.signal }))) {
            const event = JSON.parse(data);
            columns ??= event.columns;
            found.push(...event.steps);
            if (found.length > 20) return { columns, found };
          }
        }"""
    )
    place = {name: steps["columns"].index(name) for name in steps["columns"]}
    order = ("planning_at", "planned_at", "packed_at", "launched_at", "observed_at", "committed_at")
    numbers = [line[place["step"]] for line in steps["found"]]
    assert numbers == sorted(set(numbers))
    for line in steps["found"]:
        times = [line[place[name]] for name in order]
        assert times == sorted(times) and line[place["device_start"]] < line[place["device_end"]]


def test_bubbles_have_a_legend_in_words(page):
    items = page.get_by_role("list", name="Causes of device idle time").get_by_role("listitem")
    texts = [text.replace("\u00a0", " ") for text in items.all_text_contents()]
    assert [re.sub(r"^.|[\d.–]+( %)?$", "", text) for text in texts] == list(CAUSES)
    marks = [text[0] for text in texts]
    assert len(set(marks)) == len(CAUSES)
    colours = page.locator("#legend .swatch").evaluate_all(
        "all => all.map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert len(set(colours)) == len(CAUSES)


def test_bubbles_are_told_in_a_table_and_shown_on_demand(page, load):
    page.get_by_text("Longest bubbles in sight", exact=True).click()
    rows = page.get_by_role("table", name="Longest bubbles in sight").locator("tbody tr")
    expect(rows.first).to_be_visible()
    # In one go: the table lives, and another bubble may come first at any moment.
    click = "row => { const cause = row.cells[0].textContent; row.querySelector('button').click(); return cause }"
    with_cause = rows.first.evaluate(click)
    assert with_cause in CAUSES
    expect(page.locator("#status")).to_have_text("paused")
    detail = page.locator("#detail").text_content()
    assert re.match(rf"{with_cause}: device idle [\d.]+\s\S+ before step \d+", detail), detail
    page.get_by_text("Longest bubbles in sight", exact=True).click()


def test_every_control_is_reached_by_keyboard(page, load):
    page.locator("h1").click()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        active = "document.activeElement"
        reached.append(page.evaluate(f"{active}.getAttribute('aria-label') ?? {active}.textContent"))
    nav = ["Timeline", "Requests", "Chat", "Memory", "Settings", "Reports"]
    tools = ["Pause", "Zoom out", "Zoom in", "Save trace", "Timeline of host and device"]
    assert reached == [*nav, "Theme: auto", *tools]
    lanes = timeline(page)
    lanes.focus()
    wait_for_more(page, "gaps", 5)  # so that some are in sight
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#status")).to_have_text("paused")
    page.wait_for_timeout(100)
    frames, steps = count(page, "frames"), count(page, "steps")
    wait_for_more(page, "events", 3)
    assert count(page, "frames") == frames and count(page, "steps") > steps, "paused: collected, not drawn"
    end = page.evaluate("gapless.view.heldEnd")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("gapless.view.heldEnd") == pytest.approx(end - 200)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("gapless.view.heldEnd") == pytest.approx(end)
    page.keyboard.press("+")
    assert page.evaluate("gapless.view.span") == 1000
    for _ in range(3):  # so that the idle times of a slow machine are in sight too
        page.keyboard.press("-")
    page.keyboard.press("ArrowUp")
    first = page.locator("#detail").text_content()
    page.keyboard.press("ArrowUp")
    assert page.locator("#detail").text_content() != first and "device idle" in first
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_contain_text("Point at")
    page.keyboard.press("End")
    expect(page.locator("#status")).to_have_text("live")
    page.get_by_label("Message").focus()
    page.keyboard.type("a b")
    expect(page.locator("#status")).to_have_text("live")  # a space in a message pauses nothing
    page.get_by_label("Message").fill("")


def test_pointer_and_wheel_move_the_timeline(page):
    lanes = timeline(page)
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 60, box["y"] + 120)
    span = page.evaluate("gapless.view.span")
    scrolled = page.evaluate("scrollY")
    page.locator("h1").click()
    page.mouse.move(box["x"] + box["width"] - 60, box["y"] + 120)
    page.mouse.wheel(0, 100)
    page.wait_for_function("(before) => scrollY > before", arg=scrolled)
    assert page.evaluate("gapless.view.span") == span, "a wheel that passes by scrolls the page"
    page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    lanes.focus()
    page.mouse.wheel(0, -200)
    page.wait_for_function("(before) => gapless.view.span < before", arg=span)
    page.keyboard.press("Space")
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 120)
    page.mouse.down()
    end = page.evaluate("gapless.view.heldEnd")
    page.mouse.move(box["x"] + 600, box["y"] + 120, steps=4)
    page.mouse.up()
    assert page.evaluate("gapless.view.heldEnd") < end


def test_a_request_marks_its_steps(page, load):
    row = page.get_by_role("region", name="Last requests").locator("tbody tr").first
    expect(row).to_be_visible()
    words = row.get_by_role("img").get_attribute("aria-label")
    assert words.startswith("queued ")
    row.get_by_role("button").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Last requests").locator("tr.chosen")).to_have_count(1)
    expect(page.locator("#status")).to_have_text("paused")
    expect(page.locator("#detail")).to_contain_text(re.compile(r"^\S+: queued "))
    page.keyboard.press("Escape")
    expect(page.get_by_role("region", name="Last requests").locator("tr.chosen")).to_have_count(0)


def test_the_pages_shown_add_up_to_all(page):
    wait_for_more(page, "pages")
    label = page.get_by_role("img", name="KV pages of").get_attribute("aria-label")
    total, *counts = map(int, re.findall(r"(\d+) (?:KV|free|cached|owned|fenced)", label))
    assert len(counts) == 4 and sum(counts) == total > 0, label
    names = page.get_by_role("list", name="KV pages by state").get_by_role("listitem").all_text_contents()
    assert [re.sub(r"[\d,]+$", "", name) for name in names] == ["free", "cached", "owned", "fenced"]


def test_the_host_tier_is_a_row_with_what_was_stored(page, load):
    row = page.get_by_role("table", name="KV tiers").get_by_role("row", name="host")
    cells = row.get_by_role("cell")
    expect(cells.nth(0)).to_have_text(re.compile(r"^[1-9][\d,]* of [\d,]+ pages$"))
    expect(cells.nth(5)).to_have_text(re.compile(r"^[\d.]+\s[KM]iB$"))
    wait_for_more(page, "tiers")


def test_settings_show_what_was_changed_and_no_secret(page):
    changed = page.get_by_role("table", name="Settings that differ from the defaults")
    expect(changed.get_by_role("row", name="max_num_seqs")).to_contain_text("8")
    page.get_by_text("All settings").click()
    expect(page.get_by_role("table", name="All settings").get_by_role("row", name="block_size").first).to_contain_text(
        "16"
    )
    assert KEY not in page.content()
    page.get_by_text("All settings").click()


def test_chat_answers_with_its_cost_and_remembers(page):
    message, log = page.get_by_label("Message"), page.get_by_role("log", name="Conversation")
    bodies = []
    page.on(
        "request", lambda request: bodies.append(request.post_data_json) if "chat/completions" in request.url else None
    )
    message.fill("What is 12 + <b>30</b>?")
    page.keyboard.press("Enter")
    cost = log.locator(".cost")
    expect(cost.first).to_contain_text(re.compile(r"TTFT [\d.]+\s(ms|s) · [\d.,–]+ tokens/s · \d+ tokens · prompt \d+"))
    assert log.locator(".text").first.text_content()
    assert log.locator("b").count() == 0, "text stays text"
    message.fill("And plus 1?")
    page.get_by_role("button", name="Send").click()
    expect(cost.nth(1)).to_contain_text("prompt")
    assert [m["role"] for m in bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[-1]["temperature"] == 0 and bodies[-1]["max_tokens"] == 256
    page.get_by_role("button", name="New chat").click()
    expect(log).to_be_empty()


def test_chat_takes_a_schema_and_tools_and_shows_calls(page):
    message, log = page.get_by_label("Message"), page.get_by_role("log", name="Conversation")
    page.get_by_text("Schema and tools").click()
    schema = {"type": "object", "properties": {"pens": {"type": "integer"}}, "required": ["pens"]}
    page.get_by_label("JSON schema of the answer").fill(json.dumps({**schema, "additionalProperties": False}))
    message.fill("How many pens?")
    page.keyboard.press("Enter")
    expect(log.locator(".cost").first).to_contain_text("prompt")
    assert list(json.loads(log.locator(".text").first.text_content())) == ["pens"]
    page.get_by_label("JSON schema of the answer").fill("{")
    message.fill("Again")
    page.keyboard.press("Enter")
    expect(log.get_by_role("alert")).to_contain_text("the schema is not JSON")
    page.get_by_label("JSON schema of the answer").fill("")
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the current weather of a city", "parameters": city}
    page.get_by_label("Tools").fill(json.dumps([{"type": "function", "function": function}]))
    page.get_by_role("button", name="New chat").click()
    message.fill("What is the weather in Paris?")
    page.keyboard.press("Enter")
    expect(log.locator(".call")).to_have_text(re.compile(r'^get_weather\({"city": ?"Paris"}\)$'))
    page.get_by_label("Tools").fill("")
    page.get_by_text("Schema and tools").click()
    page.get_by_role("button", name="New chat").click()


def test_chat_keeps_thinking_collapsed(page):
    message, log = page.get_by_label("Message"), page.get_by_role("log", name="Conversation")
    page.get_by_role("button", name="New chat").click()
    deltas = [{"role": "assistant"}, {"reasoning": "Let me "}, {"reasoning": "see"}, {"content": "Yes"}]
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=body))
    message.fill("Is it?")
    page.keyboard.press("Enter")
    expect(log.locator(".text")).to_have_text("Yes")
    expect(log.get_by_text("Let me see")).to_be_hidden()
    log.get_by_text("Thinking").click()
    expect(log.get_by_text("Let me see")).to_be_visible()
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="New chat").click()


def endless(body: dict[str, object]) -> str:
    return json.dumps({**body, "ignore_eos": True})


STOPS = """() => {
  const watch = new MutationObserver(() => {
    if (document.querySelector("[role=log] .cost")?.textContent.includes("TTFT")) {
      watch.disconnect();
      document.getElementById("chat-stop").click();
    }
  });
  watch.observe(document.body, { subtree: true, childList: true, characterData: true });
}"""
"""Presses Stop with the first token: on a busy machine the whole answer has come before the test can."""


def test_chat_can_be_stopped_and_shows_errors(page):
    message, log = page.get_by_label("Message"), page.get_by_role("log", name="Conversation")
    page.get_by_label("Mode", exact=True).select_option("completion")
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Max tokens").fill("1500")
    # Long enough to be stopped: the demo model's own answers are short.
    page.route("**/v1/completions", lambda route: route.continue_(post_data=endless(route.request.post_data_json)))
    page.evaluate(STOPS)
    message.fill("Count: 1 2 3 4")
    page.keyboard.press("Enter")
    expect(log.locator(".cost").first).to_contain_text("stopped")
    expect(log.locator(".cost").first).to_contain_text("TTFT")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.unroute("**/v1/completions")
    page.get_by_label("Mode", exact=True).select_option("chat")
    page.get_by_role("button", name="New chat").click()
    refusal = {"error": {"message": "the queue is full", "type": "overloaded", "param": None, "code": None}}
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=200, body=f"data: {json.dumps(refusal)}\n\n")
    )
    message.fill("hello")
    page.keyboard.press("Enter")
    expect(log.get_by_role("alert")).to_have_text("the queue is full")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Max tokens").fill("256")


def test_a_hidden_page_ends_the_feed(page, load):
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    expect(page.locator("#status")).to_have_text("not watching")
    events, connections = count(page, "events"), count(page, "connections")
    page.wait_for_timeout(400)
    assert count(page, "events") == events
    page.evaluate(hide, False)
    wait_for_more(page, "events")
    assert count(page, "connections") == connections + 1


def test_an_engine_that_is_down_is_said_and_the_feed_comes_back(page, opened):
    _, watch = opened
    down = json.dumps({"error": {"message": "the engine is down: signal 9", "type": "x", "param": None, "code": None}})
    page.route("**/health", lambda route: route.fulfill(status=503, body=down))
    expect(page.locator("#status")).to_have_text("the engine is down: signal 9")
    page.unroute("**/health")
    expect(page.locator("#status")).to_have_text("live")
    page.evaluate("performance.clearResourceTimings()")
    page.route("**/debug/steps", lambda route: route.fulfill(status=503, body=down))
    page.evaluate("gapless.restart()")
    expect(page.locator("#status")).to_have_text("no step records: the engine is down: signal 9")
    tried = """() => performance.getEntriesByType("resource")
      .filter((entry) => entry.name.endsWith("/debug/steps")).map((entry) => entry.startTime)"""
    page.wait_for_function(f"() => ({tried})().length >= 2")
    page.unroute("**/debug/steps")
    connections = count(page, "connections")
    page.wait_for_function("(before) => gapless.counters.connections > before", arg=connections)
    expect(page.locator("#status")).to_have_text("live")
    first, second, *_ = page.evaluate(f"({tried})()")
    assert second - first > 490, "it waits before it tries again"
    watch.problems.clear()  # the browser logs each 503


def test_an_ab_report_is_drawn_from_its_file(page, tmp_path):
    report, other = tmp_path / "report.json", tmp_path / "other.json"
    report.write_text(json.dumps(made_report()))
    other.write_text('{"kind": "shopping list"}')
    section = page.get_by_role("region", name="A/B report")
    section.get_by_label("Open a report").set_input_files(report)
    expect(section.get_by_role("status")).to_have_text("report.json is shown below")
    expect(section.get_by_role("article").get_by_role("table").first).to_be_visible()
    assert section.get_by_role("article").locator("svg").count() > 0
    section.get_by_label("Open a report").set_input_files(other)
    expect(section.get_by_role("status")).to_contain_text("other.json is not a report of gapless ab")
    expect(section.get_by_role("article")).to_have_count(0)
    assert count(page, "reports") == 1
    drop = """([name, text]) => {
      const files = new DataTransfer();
      files.items.add(new File([text], name));
      const event = new DragEvent("drop", { dataTransfer: files, cancelable: true });
      document.getElementById("report-zone").dispatchEvent(event);
    }"""
    page.evaluate(drop, ["dropped.json", report.read_text()])
    expect(section.get_by_role("status")).to_have_text("dropped.json is shown below")


def test_the_server_says_where_the_page_is(server):
    assert f"  live page {server.base}/ui\n" in server.greeting


def test_the_trace_file_is_saved(page, load):
    with page.expect_download() as download:
        page.get_by_role("button", name="Save trace").click()
    trace = json.loads(download.value.path().read_text())
    assert trace["traceEvents"]
    assert download.value.suggested_filename.endswith(".json")


def contrasts(page: Page, selectors: tuple[str, ...]) -> dict[str, float]:
    """Of each first element's text with what lies behind it, as WCAG 2 counts it."""
    found: dict[str, float] = page.evaluate(
        """(selectors) => {
          const light = (text) => {
            const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
              .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          return Object.fromEntries(selectors.map((selector) => {
            const element = document.querySelector(selector);
            let behind = element;
            while (/, 0\\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
            const text = light(getComputedStyle(element).color);
            const ground = light(getComputedStyle(behind).backgroundColor);
            return [selector, (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05)];
          }));
        }""",
        selectors,
    )
    return found


def test_light_and_dark_can_be_read(page):
    backgrounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        found = contrasts(
            page, ("h2", ".muted", ".gauge dt", "nav a", "#summary", "button", "label", ".primary", "kbd")
        )
        assert {selector: ratio for selector, ratio in found.items() if ratio < 4.5} == {}
    assert len(backgrounds) == 2
    button = page.get_by_role("button", name="Theme")
    button.click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") in backgrounds
    expect(button).to_have_text("Theme: light")
    button.click()
    button.click()
    expect(button).to_have_text("Theme: auto")
    page.emulate_media(color_scheme="light")


def test_a_narrow_screen_needs_no_sideways_scrolling(page, load):
    page.set_viewport_size({"width": 360, "height": 740})
    wait_for_more(page, "gauges")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = page.evaluate(
        "[...document.querySelectorAll('section, header, canvas, form, button')]"
        ".filter((one) => one.getBoundingClientRect().right > 360).map((one) => one.id || one.textContent)"
    )
    assert wide == []
    bar = page.locator(".waterfall tbody .bar").first.bounding_box()
    assert bar is not None and bar["width"] > 100, "columns give way to the bars"
    page.set_viewport_size(SIZE)


def test_the_page_has_no_motion_where_none_is_wanted(page):
    page.emulate_media(reduced_motion="reduce")
    wait_for_more(page, "frames")
    began, before = page.evaluate("[performance.now(), gapless.counters.frames]")
    page.wait_for_timeout(1200)
    ended, after = page.evaluate("[performance.now(), gapless.counters.frames]")
    assert after - before <= (ended - began) / 1000 + 1
    wait_for_more(page, "frames")
    page.emulate_media(reduced_motion="no-preference")
    wait_for_more(page, "frames", 5)


def test_the_content_policy_holds(opened, server):
    page, watch = opened
    policy = page.request.get(f"{server.base}/ui").headers["content-security-policy"]
    for part in ("default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'"):
        assert part in policy
    assert "unsafe" not in policy
    broken = page.evaluate(
        """() => new Promise((done) => {
          const found = new Set();
          document.addEventListener("securitypolicyviolation", (event) => {
            found.add(event.effectiveDirective);
            if (found.size === 3) done([...found].sort());
          });
          const script = document.createElement("script");
          script.textContent = "window.planted = 1";
          const box = document.createElement("div");
          box.setAttribute("style", "color: red");
          const picture = document.createElement("img");
          picture.src = "http://127.0.0.1:9/x.png";
          document.body.append(script, box, picture);
          script.remove(); box.remove(); picture.remove();
        })"""
    )
    assert broken == ["img-src", "script-src-elem", "style-src-attr"]
    assert page.evaluate("window.planted") is None
    watch.problems.clear()
