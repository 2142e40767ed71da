"""The chat in a real browser: answers of the demo model, Markdown, conversations that stay in the browser."""

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from served import Server
from ui_browser import KEY, PATIENCE_MS, Watch

WRITTEN = """# Sums

**42**, since *17* and `25` <b>make</b> it:

1. start
   - by tens
2. end

```python
x = "**no bold**"
```

| item | price |
|---|---:|
| pens | 17 |

> said [so](https://example.org/x), not [here](javascript:alert(1))
"""


@pytest.fixture
def page(chromium: Browser, server: Server) -> Iterator[Page]:
    """A browser that has no conversation yet; after the test nothing has gone wrong."""
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(f"sessionStorage.setItem('gapless-api-key', '{KEY}')")
    page = context.new_page()
    watch = Watch(page, server.base)
    page.goto(f"{server.base}/ui/chat")
    expect(page.get_by_label("Model")).to_have_value("demo")
    yield page
    watch.none()
    context.close()


def log(page: Page):
    return page.get_by_role("log", name="Conversation")


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def settings(page: Page) -> None:
    page.get_by_text("Settings, schema and tools").click()


def answered(page: Page, *deltas: dict[str, str]) -> None:
    """Let the server answer with these."""
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=body))


@pytest.mark.process
def test_an_answer_has_its_cost_and_the_conversation_is_kept(page):
    bodies = []
    page.on("request", lambda one: bodies.append(one.post_data_json) if "chat/completions" in one.url else None)
    settings(page)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Max tokens").fill("40")
    say(page, "What is 12 + <b>30</b>?")
    cost = log(page).locator(".cost")
    expect(cost.first).to_contain_text(re.compile(r"TTFT [\d.]+\s(ms|s) · [\d.,–]+ tokens/s · \d+ tokens · prompt \d+"))
    assert log(page).locator(".text").first.text_content() and log(page).locator("b").count() == 0
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_function("() => gapless.counters.answers === 2")
    say(page, "And plus 1?")
    page.wait_for_function("() => gapless.counters.answers === 3")
    assert [m["role"] for m in bodies[-1]["messages"]] == ["system", "user", "assistant", "user"]
    assert [m["role"] for m in bodies[1]["messages"]] == ["system", "user"]
    assert bodies[-1]["temperature"] == 0 and bodies[-1]["max_tokens"] == 40
    page.reload()
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(log(page)).to_be_empty()
    page.get_by_role("list", name="Conversations").get_by_role("button", name="What is 12").click()
    expect(log(page).locator(".message")).to_have_count(4)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    kept = json.loads(download.value.path().read_text())
    assert [m["role"] for m in kept["messages"]] == ["user", "assistant"] * 2
    assert KEY not in page.evaluate("JSON.stringify(localStorage)")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("list", name="Conversations").get_by_role("listitem")).to_have_count(0)
    expect(log(page)).to_be_empty()


def test_markdown_is_shown_as_elements_and_nothing_else_is(page):
    answered(page, {"reasoning": "Let me see"}, *({"content": WRITTEN[i : i + 7]} for i in range(0, len(WRITTEN), 7)))
    say(page, "Is it?")
    page.wait_for_function("() => gapless.counters.answers === 1")
    text = log(page).locator(".text")
    outline = text.evaluate("one => [...one.querySelectorAll('*')].map((each) => each.localName).join(' ')")
    assert outline == (
        "h3 p strong em code ol li ul li li div div span button pre code "
        "div table thead tr th th tbody tr td td blockquote p a"
    )
    assert text.locator("pre code").text_content() == 'x = "**no bold**"'
    assert "<b>make</b>" in text.text_content() and "[here](javascript:alert(1))" in text.text_content()
    link = text.get_by_role("link", name="so")
    assert link.get_attribute("href") == "https://example.org/x" and "noopener" in link.get_attribute("rel")
    text.get_by_role("button", name="Copy code (python)").click()
    expect(text.get_by_role("button", name="Copy code (python)")).to_have_text(re.compile("Copied|Selected"))
    expect(log(page).get_by_text("Let me see")).to_be_hidden()
    log(page).get_by_text("Thinking").click()
    expect(log(page).get_by_text("Let me see")).to_be_visible()


@pytest.mark.process
def test_a_schema_and_tools_are_sent_and_calls_shown(page):
    settings(page)
    schema = {"type": "object", "properties": {"pens": {"type": "integer"}}, "required": ["pens"]}
    page.get_by_label("JSON schema of the answer").fill("{")
    say(page, "How many pens?")
    expect(log(page).get_by_role("alert")).to_contain_text("the schema is not JSON")
    page.get_by_label("JSON schema of the answer").fill(json.dumps({**schema, "additionalProperties": False}))
    page.get_by_role("button", name="Regenerate").click()
    page.wait_for_function("() => gapless.counters.answers === 1")
    assert list(json.loads(log(page).locator(".text").last.text_content())) == ["pens"]
    page.get_by_label("JSON schema of the answer").fill("")
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the current weather of a city", "parameters": city}
    page.get_by_label("Tools").fill(json.dumps([{"type": "function", "function": function}]))
    page.get_by_role("button", name="New chat").click()
    say(page, "What is the weather in Paris?")
    expect(log(page).locator(".call")).to_have_text(re.compile(r'^get_weather\({"city": ?"Paris"}\)$'))


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


@pytest.mark.process
def test_an_answer_is_stopped_and_errors_are_shown(page):
    settings(page)
    page.get_by_label("Temperature").fill("1")
    page.get_by_label("Max tokens").fill("1500")

    def endless(route) -> None:  # long enough to be stopped: the demo model's own answers are short
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", endless)
    page.evaluate(STOPS)
    say(page, "Count: 1 2 3 4")
    expect(log(page).locator(".cost").first).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.unroute("**/v1/chat/completions")
    refusal = {"error": {"message": "the queue is full", "type": "overloaded", "param": None, "code": None}}
    body = f"data: {json.dumps(refusal)}\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=200, body=body))
    say(page, "hello")
    expect(log(page).get_by_role("alert")).to_have_text("the queue is full")


@pytest.mark.process
def test_a_narrow_chat_needs_no_sideways_scrolling(page):
    page.set_viewport_size({"width": 360, "height": 640})
    answered(page, {"content": WRITTEN + "x" * 300})
    say(page, "y" * 300)
    page.wait_for_function("() => gapless.counters.answers === 1")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport()
