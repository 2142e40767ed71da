"""The live page in a real browser, on a real server with the demo model, by roles and names as a reader has them."""

import json
import re
from collections.abc import Iterator

import pytest
from lab.ab_made_up import made_report
from playwright.sync_api import Browser, Page, expect
from served import Server
from ui_browser import KEY, PATIENCE_MS, Watch
from ui_load import Load

pytestmark = pytest.mark.process
SIZE = {"width": 1240, "height": 980}
CAUSES = ("host late", "depth", "launch", "graph miss", "capture", "grammar", "copy wait", "ranks", "no work")


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
    for name in ("steps", "gaps", "frames", "gauges", "samples", "pages", "requests"):
        wait_for_more(page, name)
    gauges = page.get_by_label("Gauges")
    terms, values = gauges.get_by_role("term"), gauges.locator(".value")
    latency = ("First token", "Between tokens", "In the queue")
    names = (*latency, "Tokens per second", "Running", "Bubbles", "Step on the device", "KV pages in use")
    assert terms.all_text_contents() == list(names)
    page.wait_for_function("() => document.querySelectorAll('.value')[4].textContent === '3'")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.value')].slice(0, 4).every((one) => parseFloat(one.textContent) > 0)"
    )
    shown = dict(zip(names, values.all_text_contents(), strict=True))
    assert re.fullmatch(r"[\d.]+\s(µs|ms|s)", shown["Step on the device"])
    words = page.locator("#summary").text_content()
    busy = float(re.search(r"device busy ([\d.]+)", words)[1])
    assert 0 < busy <= 100 and int(re.search(r"([\d,]+) steps", words)[1].replace(",", "")) > 0, words
    assert page.locator(".spark .line-0").nth(3).get_attribute("d").count("L") > 0
    assert page.locator(".note").first.text_content().startswith("p99")


def test_the_history_has_axes_and_is_zoomed(page, load):
    wait_for_more(page, "samples", 2)
    charts = page.locator("#trends figure")
    expect(charts).to_have_count(4)
    expect(page.get_by_role("button", name="15 min")).to_have_attribute("aria-pressed", "true")
    expect(charts.nth(1).locator(".u-legend")).to_contain_text("generated")
    plot = charts.nth(1).locator(".u-over")
    assert re.match(r"Tokens per second, now: generated [\d.,]+, prompt ", plot.get_attribute("aria-label"))
    box, range = plot.bounding_box(), page.evaluate("gapless.trends.range")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + 40, steps=4)
    page.mouse.up()
    held = page.evaluate("gapless.trends.held")
    assert held[1] - held[0] == pytest.approx(0.4 * (range[1] - range[0]), rel=0.15)
    page.locator("#trends").focus()
    page.keyboard.press("+")
    assert page.evaluate("gapless.trends.held[1] - gapless.trends.held[0]") == pytest.approx((held[1] - held[0]) / 2)
    page.keyboard.press("End")
    assert page.evaluate("gapless.trends.held") is None


def test_the_page_names_the_events_that_stand_out_and_their_mends(page, load):
    wait_for_more(page, "samples", 2)
    reasons = page.get_by_role("list", name="What stands out").get_by_role("listitem")
    expect(reasons.first).to_be_visible()
    expect(page.locator("#mends li")).to_have_count(len(CAUSES))
    assert all(": " in text and text.endswith(".") for text in page.locator("#mends li").all_text_contents())


def test_the_machine_is_told(page):
    wait_for_more(page, "samples")
    table = page.get_by_role("table", name="Machine")
    expect(table.get_by_role("row", name="Memory of the host")).to_contain_text(re.compile(r"GiB of [\d.]+\sGiB"))
    expect(table.get_by_role("row", name="KV pages")).to_contain_text("on cpu")


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
    for _ in range(18):
        page.keyboard.press("Tab")
        active = "document.activeElement"
        reached.append(page.evaluate(f"{active}.getAttribute('aria-label') ?? {active}.textContent"))
    nav = ["History", "Timeline", "Requests", "Memory", "Settings", "Reports", "Chat"]
    ranges = ["1 min", "5 min", "15 min", "30 min"]
    history = "History: arrows move, + and - zoom, End is now; or drag over a chart"
    reached = [name for name in reached if name != "show the stall"][:17]
    tools = ["Pause", "Zoom out", "Zoom in", "Save trace", "Timeline of host and device"]
    assert reached == [*nav, "Theme: auto", *ranges, history, *tools][:17]
    lanes = timeline(page)
    lanes.focus()
    page.wait_for_function("gapless.counters.bubbles > 1")  # in sight, and so they stay
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#status")).to_have_text("paused")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
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
    for _ in range(6):  # so that the idle times of a slow machine are in sight too
        page.keyboard.press("-")
    page.keyboard.press("ArrowUp")
    first = page.locator("#detail").text_content()
    page.keyboard.press("ArrowUp")
    assert page.locator("#detail").text_content() != first and "device idle" in first
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_contain_text("Point at")
    page.keyboard.press("End")
    expect(page.locator("#status")).to_have_text("live")
    page.get_by_label("Find").focus()
    page.keyboard.type("a b")
    expect(page.locator("#status")).to_have_text("live")  # a space in a field pauses nothing
    page.get_by_label("Find").fill("")


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


def test_a_request_is_found_by_either_of_its_names(page, load):
    wait_for_more(page, "requests")
    report = page.evaluate("async () => (await import('/ui/api.js')).getJson('debug/requests?limit=3')")
    one = {**report["requests"][0], "id": "cmpl-of-the-test", "request_id": "my-own-name"}
    answer = json.dumps({"requests": [*report["requests"], one]})
    page.route("**/debug/requests**", lambda route: route.fulfill(status=200, body=answer))
    rows = page.get_by_role("region", name="Last requests").locator("tbody tr")
    for name in ("own-name", "cmpl-of"):
        page.get_by_label("Find").fill(name)
        expect(rows).to_have_count(1)
        expect(rows.get_by_role("button")).to_have_attribute("title", "my-own-name (cmpl-of-the-test)")
    page.unroute("**/debug/requests**")
    page.get_by_label("Find").fill("")


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
            page, ("h2", ".muted", ".gauge dt", "nav a", "#summary", "#why", "button", "label", ".primary", "kbd")
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
        "[...document.querySelectorAll('section, header, canvas, form, button, figure, figure *')]"
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
