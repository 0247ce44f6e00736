"""A page of the reference, what a search finds of it, and the names that link to pages."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

__all__ = ["Entry", "Page", "link_names", "plain_text", "root_of", "sections"]


@dataclass(frozen=True)
class Entry:
    """Something that a search finds: its title, what kind of thing it is, where it is, and its text."""

    title: str
    kind: str
    address: str
    text: str


@dataclass
class Page:
    """One file of the reference.

    Attributes:
        title: in the list of pages.
        group: the heading that it is listed under.
        path: of the file, relative to the reference's folder, with ``/``.
        body: HTML without the frame around it.
        entries: what a search finds of it.
    """

    title: str
    group: str
    path: str
    body: str
    entries: list[Entry] = field(default_factory=list)


def root_of(path: str) -> str:
    """The way from a page up to the reference's folder: ``"../"`` for each folder it is in."""
    return "../" * path.count("/")


def plain_text(body: str) -> str:
    """The text of HTML in one line, without tags, scripts, styles and pictures."""
    body = re.sub(r"<(script|style|svg)\b.*?</\1>", " ", body, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def sections(body: str, page: str, kind: str, path: str) -> list[Entry]:
    """An entry for each heading of a page that has an id, with the text up to the next one.

    Args:
        body: HTML.
        page: its title, which stands before the titles of its sections.
        kind: of the entries.
        path: of the page.
    """
    parts = re.split(r'<h[1-6] id="([^"]*)"[^>]*>(.*?)</h[1-6]>', body, flags=re.DOTALL)
    found = [Entry(page, kind, path, plain_text(parts[0]))] if plain_text(parts[0]) or len(parts) == 1 else []
    for anchor, heading, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        title = plain_text(heading)
        found.append(Entry(title if title == page else f"{page}: {title}", kind, f"{path}#{anchor}", plain_text(text)))
    return found


def link_names(body: str, names: dict[str, str], path: str) -> str:
    """HTML whose ``<code>Name</code>`` link to the pages of the names, outside of links, blocks and the page itself."""

    def linked(match: re.Match[str]) -> str:
        target = names.get(match["name"] or "")
        if target is None or target.partition("#")[0] == path:
            return match[0]
        return f'<a href="{root_of(path)}{target}">{match[0]}</a>'

    pattern = r"<(a|pre|h1)\b.*?</\1>|<code>(?P<name>[\w.]+)(?:\(\))?</code>"
    return re.sub(pattern, linked, body, flags=re.DOTALL)
