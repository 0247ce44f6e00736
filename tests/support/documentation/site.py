"""Build the reference, for reading without a network: ``python -m tests.support.documentation.site FOLDER``.

It holds the public interface, a page for each pass and each error, the Markdown documents and the notebooks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import pdoc.render

import graphopt
from tests.support.docstring_examples import PREAMBLE
from tests.support.documentation.error_pages import ERRORS, error_page, message_of
from tests.support.documentation.interface import TEMPLATES, interface_pages, public_names, render_module
from tests.support.documentation.markdown import Links, document_page, documents, notebook_page, notebooks
from tests.support.documentation.pages import Entry, Page, link_names, root_of
from tests.support.documentation.pass_pages import built_in_passes, pass_page
from tests.support.paths import ROOT

__all__ = ["build", "main"]

_GROUPS = ("Documents", "Notebooks", "Interface", "Passes", "Errors")


def build(folder: Path, messages: Mapping[type[Exception], tuple[str, str]] | None = None) -> list[Page]:
    """Write the reference into a folder, which is emptied first; returns its pages.

    Args:
        folder: is made where it is not there.
        messages: of errors, where they are known already; by default a program is run for each.
    """
    if folder.exists():
        shutil.rmtree(folder)
    links = Links()
    interface, modules = interface_pages()
    pages = [
        *(document_page(path, links) for path in documents()),
        *(notebook_page(path, links) for path in notebooks()),
        *interface,
        *(pass_page(cls) for cls in built_in_passes()),
        *(error_page(error, (messages or {}).get(error) or message_of(error)) for error in ERRORS),
    ]
    pages.insert(0, _first_page(pages))
    site = {group: [page for page in pages if page.group == group] for group in _GROUPS}
    pdoc.render.env.globals |= {"site": site, "version": graphopt.__version__}
    names = {**public_names(), **_own_pages(pages)}
    for page in pages:
        if page.group == "Interface":
            text = render_module(modules[page.title], modules)
        else:
            page.body = link_names(page.body, names, page.path)
            text = _framed(page)
        target = folder / page.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    _copy_files(folder, links)
    _write_index(folder, [entry for page in pages for entry in page.entries])
    return pages


def _own_pages(pages: Sequence[Page]) -> dict[str, str]:
    """The names of passes, as class and as text, and of errors, with their pages."""
    found = {page.title: page.path for page in pages if page.group in ("Passes", "Errors")}
    return found | {cls.name: f"passes/{cls.name}.html" for cls in built_in_passes()}


def _framed(page: Page) -> str:
    template = pdoc.render.env.get_template("page.html.jinja2")
    return template.render(
        title=page.title, body=page.body, group=page.group, path=page.path, root=root_of(page.path), module=None
    )


def _first_page(pages: Sequence[Page]) -> Page:
    """What the reference holds, and what its examples begin with."""
    parts = ["<h1>graphopt, the reference</h1>", "<p>What to look up, by kind; the search field covers all of it.</p>"]
    for group in _GROUPS:
        rows = [f'<li><a href="{page.path}">{escape(page.title)}</a></li>' for page in pages if page.group == group]
        parts.append(f'<h2 id="{group.lower()}">{group}</h2><ul>{"".join(rows)}</ul>')
    parts.append('<h2 id="examples">What examples begin with</h2><p>Examples in the reference use these names:</p>')
    parts.append(f"<pre><code>{escape(PREAMBLE)}</code></pre>")
    return Page("graphopt, the reference", "", "index.html", "\n".join(parts))


def _copy_files(folder: Path, links: Links) -> None:
    """Copy what documents show and link to, and what searches."""
    for name in sorted(links.files):
        source, target = ROOT / name, folder / name
        if source.is_file() and source.resolve().is_relative_to(ROOT):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    shutil.copyfile(TEMPLATES / "search.js", folder / "search.js")


def _write_index(folder: Path, entries: Sequence[Entry]) -> None:
    rows = [[entry.title, entry.kind, entry.address, entry.text] for entry in entries]
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    (folder / "search_index.js").write_text(f"window.graphoptIndex = {text};\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the reference, and say where it begins."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.documentation.site", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write it; what is there is replaced")
    folder = parser.parse_args(argv).folder
    pages = build(folder)
    print(f"{len(pages)} pages: open {folder / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
