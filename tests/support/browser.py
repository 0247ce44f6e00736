"""A headless Chromium for tests of the interactive page, and a page that remembers everything that went wrong on it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

SIZES = ((390, 844), (1280, 800), (1920, 1200))
"""A phone, a laptop and a large screen, in pixels."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The installed Chromium, without its sandbox, which needs rights that containers lack."""
    program = shutil.which("chromium")
    if program is None:
        pytest.fail(
            "these tests drive a program called chromium: `make test` installs it (Debian: apt-get install chromium)"
        )
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """An open page.

    Attributes:
        page: playwright's.
        problems: dialogs, errors and warnings of the console and of scripts.
        requests: everything that was asked for, the file itself included.
    """

    page: Page
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def ask(self, expression: str, argument: Any = None) -> Any:
        """What the page's own ``window.graphoptPage`` says: ``ask("place", "mm_1")``."""
        return self.page.evaluate(f"(argument) => window.graphoptPage.{expression}(argument)", argument)

    def places(self, names: Iterable[str]) -> dict[str, list[float]]:
        """Where calls stand in the picture, whatever part of it is in view."""
        wanted = sorted(names)
        found = self.page.evaluate("names => names.map(name => window.graphoptPage.place(name).world)", wanted)
        return dict(zip(wanted, found, strict=True))

    def text(self, selector: str) -> str:
        """What an element says."""
        return self.page.locator(selector).inner_text()

    def table(self, selector: str, part: str = "tbody") -> list[list[str]]:
        """The cells of a table's body, row by row."""
        return self.page.eval_on_selector_all(
            f"{selector} {part} tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
        )

    def show(self, selector: str) -> Locator:
        """The first of some elements, scrolled into view."""
        found = self.page.locator(selector).first
        found.scroll_into_view_if_needed()
        return found

    def slide(self, index: int) -> None:
        """Move the slider to a snapshot."""
        slider = self.show("#slider")
        slider.focus()
        self.page.keyboard.press("Home")
        for _ in range(index):
            self.page.keyboard.press("ArrowRight")

    def find(self, name: str) -> None:
        """Search for a name, and select the best match; the picture is in view then."""
        self.page.fill("#search", name)
        self.page.press("#search", "Enter")
        self.show("#graph")

    def click_node(self, name: str) -> None:
        """Click a call in the picture."""
        self.show("#graph")
        place = self.ask("place", name)
        self.page.mouse.click(place["x"], place["y"])

    def details(self) -> dict[str, str]:
        """The facts of the selected call."""
        return dict(
            self.page.eval_on_selector_all(
                "#details dt", "terms => terms.map(term => [term.textContent, term.nextElementSibling.textContent])"
            )
        )


@contextlib.contextmanager
def opened(
    browser: Browser, file: Path, *, size: tuple[int, int] = (1280, 800), dark: bool = False, harmless: bool = True
) -> Iterator[Opened]:
    """Open a file the way a double click does; if ``harmless``, fail where it asked for anything or complained."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", offline=True
    )
    page = context.new_page()
    found = Opened(page)
    page.on("dialog", lambda dialog: (found.problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("console", lambda message: found.problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.problems.append(f"error: {error}"))
    page.on("request", lambda request: found.requests.append(request.url))
    try:
        page.goto(file.as_uri())
        page.wait_for_selector("main:not([hidden])")
        yield found
        if harmless:
            assert found.problems == []
            assert found.requests == [file.as_uri()]
    finally:
        context.close()
