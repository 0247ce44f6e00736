"""Markdown documents and notebooks of the repository as pages, with links that work inside of the reference."""

from __future__ import annotations

import base64
import html
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from tests.support.documentation.pages import Page, plain_text, sections
from tests.support.paths import ROOT

__all__ = ["Links", "document_page", "documents", "notebook_page", "notebooks", "render_markdown"]

_CODE = '<pre class="pdoc-code codehilite">'
"""How a block of coloured code begins; the classes are those of pdoc's stylesheet."""

_SKIPPED = {"build", "dist", "runs", "node_modules"}


def documents() -> list[Path]:
    """Every Markdown document of the repository, the README first."""
    found = [path for path in _files(ROOT) if path.suffix == ".md"]
    return sorted(found, key=lambda path: (path.parent != ROOT, path.parent.as_posix(), path.name != "README.md", path))


def notebooks() -> list[Path]:
    """The notebooks, in the order of their numbers."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder, without what tools leave there, and without what links point to."""
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in _SKIPPED or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _files(entry)
        else:
            yield entry


# --- text ------------------------------------------------------------------------------------------------------------


def render_markdown(text: str) -> str:
    """HTML of Markdown: tables, HTML as it is, coloured code, headings with the anchors that code hosts give them."""
    body = str(MarkdownIt("commonmark", {"html": True, "highlight": _coloured}).enable("table").render(text))
    body = body.replace("<pre><code", f"{_CODE}<code")
    taken: dict[str, int] = {}

    def heading(match: re.Match[str]) -> str:
        anchor = re.sub(r"[^\w\- ]", "", html.unescape(re.sub(r"<[^>]*>", "", match[2])).lower()).replace(" ", "-")
        number = taken.get(anchor, 0)
        taken[anchor] = number + 1
        return f'<h{match[1]} id="{anchor}{f"-{number}" if number else ""}">{match[2]}</h{match[1]}>'

    return re.sub(r"<h([1-6])>(.*?)</h\1>", heading, body, flags=re.DOTALL)


def _coloured(source: str, language: str, _: Any = None) -> str:
    """The inside of a block of code, as HTML; empty for a language that is unknown."""
    try:
        return str(highlight(source, get_lexer_by_name(language), HtmlFormatter(nowrap=True))) if language else ""
    except ClassNotFound:
        return ""


class Links:
    """Turns links of the repository's documents into links of the reference; remembers which files they need.

    Attributes:
        files: that pages link to or show, relative to the repository: the reference gets copies.
    """

    def __init__(self) -> None:
        pages = [*documents(), *notebooks()]
        self._pages = {path.relative_to(ROOT).as_posix() for path in pages}
        self.files: set[str] = set()

    def rewrite(self, body: str, source: str) -> str:
        """HTML of the document ``source`` (a path in the repository) with the targets of its links replaced."""

        def target(match: re.Match[str]) -> str:
            return f'{match[1]}="{html.escape(self._target(html.unescape(match[2]), source))}"'

        return re.sub(r'\b(href|src|srcset)="([^"]*)"', target, body)

    def _target(self, address: str, source: str) -> str:
        if re.match(r"[a-z][a-z0-9+.-]*:|#|//", address):
            return address
        name, sharp, anchor = address.partition("#")
        folder = PurePosixPath(source).parent
        place = os.path.normpath((folder / name).as_posix())
        if (ROOT / place).is_dir():
            place = next((page for page in (f"{place}/README.md",) if page in self._pages), "index.html")
        elif place not in self._pages:
            self.files.add(place)
        return os.path.relpath(_page_path(place), folder.as_posix()) + sharp + anchor


def _page_path(place: str) -> str:
    return re.sub(r"\.(md|ipynb)$", ".html", place)


# --- pages -----------------------------------------------------------------------------------------------------------


def document_page(path: Path, links: Links) -> Page:
    """The page of a Markdown document; its title is its first heading."""
    source = path.relative_to(ROOT).as_posix()
    body = links.rewrite(render_markdown(path.read_text(encoding="utf-8")), source)
    return _page(body, source, "Documents", "document")


def notebook_page(path: Path, links: Links) -> Page:
    """The page of a notebook: its text, its code and its stored outputs."""
    source = path.relative_to(ROOT).as_posix()
    cells = nbformat.read(path, as_version=4).cells
    body = links.rewrite("\n".join(_cell(cell) for cell in cells), source)
    return _page(body, source, "Notebooks", "notebook")


def _page(body: str, source: str, group: str, kind: str) -> Page:
    heading = re.search(r"<h1[^>]*>(.*?)</h1>", body, re.DOTALL)
    title = plain_text(heading[1]) if heading else source
    if PurePosixPath(source).name == "README.md" and "/" in source:
        title = f"{title} ({PurePosixPath(source).parent})"
    path = _page_path(source)
    return Page(title, group, path, body, sections(body, title, kind, path))


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return render_markdown(cell.source)
    shown = "".join(_output(output) for output in cell.outputs)
    code = f"{_CODE}<code>{_coloured(cell.source, 'python') or html.escape(cell.source)}</code></pre>"
    return f'{code}<div class="output">{shown}</div>' if shown else code


def _output(output: Any) -> str:
    if output.output_type == "stream":
        return f"<pre>{html.escape(output.text)}</pre>"
    data = output.get("data", {})
    if "image/svg+xml" in data:
        encoded = base64.b64encode(data["image/svg+xml"].encode()).decode()
        return f'<div class="picture"><img alt="the picture" src="data:image/svg+xml;base64,{encoded}"></div>'
    if "image/png" in data:
        return f'<div class="picture"><img alt="the picture" src="data:image/png;base64,{data["image/png"]}"></div>'
    return str(data.get("text/html") or f"<pre>{html.escape(data.get('text/plain', ''))}</pre>")
