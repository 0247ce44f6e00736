"""The documents of the repository, and what tests take out of them: blocks of code, commands, headings and links."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT

FOLDERS = ("graphopt", "passes", "examples/**", "notebooks", "tests/benchmarks")

DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "graphopt/*.md",
        "passes/*.md",
        "examples/**/*.md",
        "notebooks/*.md",
        "tests/benchmarks/*.md",
    )
    for path in ROOT.glob(pattern)
)
"""Paths from the root of the checkout."""


def text_of(document: str) -> str:
    """A document as it stands."""
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language: the line they start at, counted from 0, and their source."""
    text = text_of(document)
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def commands(document: str, program: str) -> list[list[str]]:
    """The arguments of every call of ``program`` in the blocks of shell commands."""
    lines = [line for _, block in blocks(document, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.split()[:1] == [program]]


def prose(document: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(document), flags=re.MULTILINE | re.DOTALL)


def anchors(document: str) -> set[str]:
    """What links may name behind ``#``: the headings, as code hosts spell them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: str) -> list[tuple[Path, str]]:
    """The file and the anchor, empty without one, of every link that is not an address."""
    found = re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(document))
    here = ROOT / document
    return [((here.parent / file).resolve() if file else here, anchor) for file, anchor in found]


def run_blocks(document: str, patch: pytest.MonkeyPatch, *, only: int | None = None) -> ModuleType:
    """Run the Python blocks of a document one after the other, as one module, or one of them by itself."""
    module = ModuleType(re.sub(r"\W", "_", document))
    patch.setitem(sys.modules, module.__name__, module)
    found = blocks(document, "python")
    for line, source in found if only is None else [found[only]]:
        exec(compile("\n" * line + source, str(ROOT / document), "exec", dont_inherit=True), module.__dict__)
    return module
