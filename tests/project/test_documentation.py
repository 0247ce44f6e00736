"""The reference that `make docs` builds: it holds everything, its links work, and it needs no network."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

import pytest

import graphopt
from graphopt import errors, planning
from graphopt.report.text.pass_table import passes_json
from tests.support.browser import chromium
from tests.support.documentation.error_pages import ERRORS, message_of
from tests.support.documentation.markdown import documents, notebooks, render_markdown
from tests.support.documentation.pages import link_names
from tests.support.documentation.pass_pages import built_in_passes
from tests.support.documentation.site import build
from tests.support.paths import ROOT

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "srcset", "object": "data"}


@dataclass
class Parsed(HTMLParser):
    """What a page links to, loads and can be linked to."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if LOADED.get(tag) in given:
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    build(folder, {errors.RankError: ("a program of two ranks", "rank 1 gives no sign of life any more")})
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Parsed]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        parsed = found[path.relative_to(site).as_posix()] = Parsed()
        parsed.feed(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def index(site: Path) -> list[list[str]]:
    text = (site / "search_index.js").read_text(encoding="utf-8")
    found: list[list[str]] = json.loads(text.removeprefix("window.graphoptIndex = ").rstrip(";\n"))
    return found


def test_every_public_name_has_a_place(pages: dict[str, Parsed]) -> None:
    names = [name for name in graphopt.__all__ if not name.startswith("__")]
    modules = {name for name in names if f"graphopt/{name}.html" in pages}
    assert modules == {"checkpoint", "configs", "ops", "sharded_state"}
    assert set(names) - modules <= pages["graphopt.html"].anchors
    assert set(planning.__all__) <= pages["graphopt/planning.html"].anchors
    assert set(graphopt.configs.__all__) <= pages["graphopt/configs.html"].anchors


def test_every_pass_has_a_page_with_its_options(site: Path, pages: dict[str, Parsed]) -> None:
    passes = built_in_passes()
    assert {cls.__name__ for cls in passes} == set(graphopt.passes.__all__)
    for data in passes_json(passes):
        path = f"passes/{data['name']}.html"
        assert {f"option-{option['name']}" for option in data["options"]} <= pages[path].anchors
        text = (site / path).read_text(encoding="utf-8")
        assert all(f"{data['name']}.html" != link for link in pages[path].links)
        assert f"{data['numerics']}: " in text
        assert "&gt;&gt;&gt; " in text, "its example"


def test_an_option_has_its_meaning_from_the_docstring(site: Path) -> None:
    text = (site / "passes" / "fit-memory.html").read_text(encoding="utf-8")
    (row,) = re.findall(r'<tr><td><code id="option-time-limit">.*?</tr>', text, re.DOTALL)
    assert "seconds that the search may take" in row
    assert "<code>None</code>" in row
    assert "Arguments:" not in text, "the table is instead of the list"


def test_every_error_has_a_page_with_a_message(site: Path) -> None:
    kinds = {cls.__name__ for cls in ERRORS}
    assert {name for name in graphopt.__all__ if name.endswith("Error")} <= kinds
    for name in kinds:
        text = (site / "errors" / f"{name}.html").read_text(encoding="utf-8")
        assert re.search(r'<div class="output"><pre>[^<]{15,}</pre>', text), name
    assert "What to do" in (site / "errors" / "CaptureError.html").read_text(encoding="utf-8")


@pytest.mark.sweep
def test_a_rank_that_is_lost_is_named_in_the_message() -> None:
    assert message_of(errors.RankError)[1].startswith("rank 1 ")


def test_every_document_and_notebook_is_there(pages: dict[str, Parsed]) -> None:
    sources = [path.relative_to(ROOT).as_posix() for path in (*documents(), *notebooks())]
    assert "README.md" in sources
    assert len(sources) > 5
    assert {re.sub(r"\.(md|ipynb)$", ".html", source) for source in sources} <= set(pages)
    assert pages["notebooks/1_fit_a_budget.html"].loads[0].startswith("data:image/svg+xml;")


def test_no_link_is_dead(site: Path, pages: dict[str, Parsed]) -> None:
    dead = []
    for path, page in pages.items():
        for link in (*page.links, *(load for load in page.loads if not load.startswith("data:"))):
            address, _, anchor = unquote(link).partition("#")
            if re.match(r"https?:|mailto:", link):
                continue
            target = (site / PurePosixPath(path).parent / address).resolve() if address else site / path
            inside = pages.get(target.relative_to(site).as_posix()) if target.is_relative_to(site) else None
            if not target.is_file() or (anchor and inside is not None and anchor not in inside.anchors):
                dead.append(f"{path}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_elsewhere_and_no_path_of_this_machine_is_shown(
    site: Path, pages: dict[str, Parsed]
) -> None:
    assert [load for page in pages.values() for load in page.loads if re.match(r"https?:|//|/", load)] == []
    for path in (*site.rglob("*.html"), *site.rglob("*.js")):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", text), path
        assert str(ROOT) not in text
        assert str(Path.home()) + "/" not in text


def test_the_search_knows_everything(pages: dict[str, Parsed], index: list[list[str]]) -> None:
    titles = {title for title, *_ in index}
    assert {f"graphopt.{name}" for name in ("Program", "capture", "PassError", "Program.memory")} <= titles
    assert {cls.__name__ for cls in (*built_in_passes(), *ERRORS)} <= titles
    for _, _, address, _ in index:
        path, _, anchor = address.partition("#")
        assert not anchor or anchor in pages[path].anchors, address
    assert any(kind == "notebook" and "allocator" in text for _, kind, _, text in index)


def test_a_search_leads_to_the_page(site: Path) -> None:
    with chromium() as browser:
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto((site / "errors" / "CaptureError.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("fitmemory")
        assert page.locator("#found a").first.inner_text().startswith("FitMemory\n")
        page.keyboard.press("Enter")
        page.wait_for_url("**/passes/fit-memory.html")
        page.fill("#finder", "no-such-word")
        assert "nothing is found" in page.inner_text("#found-count")
        assert not wrong


def test_headings_get_the_anchors_of_code_hosts() -> None:
    body = render_markdown("# One `two`, three!\n\n## Same\n\n## Same\n")
    assert re.findall(r'id="([^"]*)"', body) == ["one-two-three", "same", "same-1"]


def test_names_in_code_become_links_where_they_lead_elsewhere() -> None:
    names = {"Offload": "passes/offload.html"}
    body = "<p><code>Offload</code> <a><code>Offload</code></a></p><pre><code>Offload</code></pre>"
    linked = '<a href="../passes/offload.html"><code>Offload</code></a>'
    assert link_names(body, names, "errors/x.html") == body.replace("<code>Offload</code>", linked, 1)
    assert link_names(body, names, "passes/offload.html") == body
