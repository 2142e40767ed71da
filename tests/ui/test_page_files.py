"""The page's files as they are: small, plain, and without any way to run what is not theirs."""

import hashlib
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gapless.ui
from gapless.base.records import CAUSES

FOLDER = Path(gapless.ui.__file__).parent
ROOT = FOLDER.parent.parent
ALL = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
VENDORED = {"uPlot.iife.min.js", "uPlot.min.css"}
FILES = [path for path in ALL if path.name not in VENDORED]
MOST_BYTES = 180_000
MOST_LINES = 500
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
# Whatever makes code or markup out of text, or leaves the content policy's ground.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|setHTML|srcdoc"
    r"|\beval\(|new Function|setTimeout\(\s*[\"'`]|cssText|setAttribute\(\s*[\"']style|(?<!\{)\bimport\("
)


def test_the_files_of_the_page_are_small():
    sizes = {path.name: path.stat().st_size for path in FILES}
    assert sum(sizes.values()) < MOST_BYTES, sizes
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= MOST_LINES


def test_the_files_of_others_are_as_they_were_published():
    told = (FOLDER / "uPlot.txt").read_text(encoding="utf-8")
    listed = dict(reversed(line.split()) for line in told.splitlines() if re.match(r"[0-9a-f]{64} ", line))
    assert listed == {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in VENDORED}
    assert "uPlot 1.6" in told and "MIT" in told


def test_the_page_names_every_cause_of_idle_time_once():
    text = (FOLDER / "causes.js").read_text(encoding="utf-8")
    assert sorted(re.findall(r'\{ key: "(\w+)", name:', text)) == sorted(CAUSES)
    marks = re.findall(r'mark: "(.)", help: "\w.*, mend: "\w', text)
    assert len(set(marks)) == len(marks) == len(CAUSES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_text_becomes_code_or_markup(path):
    assert FORBIDDEN.findall(path.read_text(encoding="utf-8")) == []


def test_the_search_can_fail():
    assert FORBIDDEN.search("element.innerHTML = text") and FORBIDDEN.search("setTimeout('x()', 1)")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_names_no_outside_address(path):
    text = path.read_text(encoding="utf-8").replace(SVG_NAMESPACE, "")
    assert re.findall(r"(?:https?:|wss?:)?//[\w-]+\.\w+|@import|url\(", text) == []


class Elements(HTMLParser):
    """Every element with its attributes; text inside of script and style."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] in ("script", "style") and data.strip():
            self.inline.append(data)


def elements(page: str) -> Elements:
    parser = Elements()
    parser.feed((FOLDER / page).read_text(encoding="utf-8"))
    return parser


PAGES = ("index.html", "chat.html")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_inline_script_or_style(page):
    parser = elements(page)
    assert parser.inline == []
    assert [
        tag for tag, attributes in parser.found if any(n == "style" or n.startswith("on") for n in attributes)
    ] == []


def test_every_file_that_the_page_names_is_there_and_packed():
    named = {
        (a[key] or "").removeprefix("ui/")
        for page in PAGES
        for _, a in elements(page).found
        for key in ("src", "href")
        if a.get(key, "#")[0] != "#"
    }
    imported = {
        name
        for path in FILES
        if path.suffix == ".js"
        for name in re.findall(r'from "\./([\w.]+)"', path.read_text(encoding="utf-8"))
    }
    there = {path.name for path in ALL} - set(PAGES)
    assert named | imported == there | {"chat", "../ui"}  # the pages name each other
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    assert "ui/*" in packed["gapless"]


@pytest.mark.parametrize("page", PAGES)
def test_every_control_has_a_label(page):
    found = elements(page).found
    labelled = {attributes.get("for") for tag, attributes in found if tag == "label"}
    assert {attributes["id"] for tag, attributes in found if tag in ("input", "select", "textarea")} == labelled
