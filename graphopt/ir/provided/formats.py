"""The formats that programs can be written in, by name: those of graphopt, and those of installed packages.

A package adds one under the entry point group ``graphopt.formats``::

    [project.entry-points."graphopt.formats"]
    mermaid = "my_package.mermaid:MERMAID"

where ``MERMAID = Format("mermaid", ".mmd", to_mermaid, "a flowchart in Mermaid's language")``. It is then offered by
``Program.to``, by ``graphopt dump --format`` and by the page.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from graphopt.errors import GraphoptError, check_type, did_you_mean, quoted, wrong_argument
from graphopt.ir.provided import handed_down

__all__ = ["GROUP", "OWN", "Format", "available_formats", "find_format", "format_names", "register_format"]

GROUP = "graphopt.formats"
"""The entry point group of formats."""

OWN = ("text", "python", "dot", "svg", "json", "html", "perfetto", "ranks", "model-explorer")
"""The formats that graphopt brings along (``graphopt.report.register`` has them)."""

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a program.

    Attributes:
        name: kebab-case, unique among all installed formats.
        suffix: of its files, with the dot.
        write: ``write(program, **options)`` gives text, or data for JSON.
        help: what it is, in a few words.
        comment: how a line of comment begins, where several programs can stand in one file; "" where they cannot.

    Raises:
        ArgumentError: where one of them is of another type.
        GraphoptError: for a name or a suffix of another form.

    Example:
        >>> titles = graphopt.Format("title", ".txt", lambda program: program.title, "the model's class")
        >>> titles.text(graphopt.capture(model, (x,)))
        '_Net'
    """

    name: str
    suffix: str
    write: Callable[..., str | Mapping[str, Any]]
    help: str
    comment: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "suffix", "help", "comment"):
            check_type(f"Format's {field}", getattr(self, field), str, "text")
        if not callable(self.write):
            raise wrong_argument("Format's write", self.write, "a function, write(program, **options)")
        if not _NAME.fullmatch(self.name):
            raise GraphoptError(f"the name of a format is lower-case words joined by hyphens, got {self.name!r}")
        if not re.fullmatch(r"\.\w[\w.-]*", self.suffix):
            raise GraphoptError(f"the suffix of the format {self.name!r} is a dot and letters, got {self.suffix!r}")

    def text(self, program: Any, **options: Any) -> str:
        """A program as the text of a file: data as JSON."""
        written = self.write(program, **options)
        return written if isinstance(written, str) else json.dumps(written, separators=(",", ":"))


_registered: dict[str, Format] = {}


def register_format(form: Format) -> None:
    """Offer a format in this process, before an installed one of the same name; packages use the entry point group.

    Raises:
        ArgumentError: for what is no format.
        GraphoptError: where another format has the name.

    Example:
        >>> count = graphopt.Format("count", ".txt", lambda program: str(len(program.tensors)), "how many tensors")
        >>> graphopt.register_format(count)
        >>> graphopt.capture(model, (x,)).to("count") > "0"
        True
    """
    check_type("register_format's argument", form, Format, "a graphopt.Format", 'Format("name", ".suffix", write, "…")')
    if _registered.get(form.name, form) != form:
        raise GraphoptError(f"there is a format called {form.name!r} already: choose another name")
    _registered[form.name] = form


@cache
def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def find_format(name: str) -> Format:
    """The format of a name.

    Raises:
        GraphoptError: for an unknown name, with the nearest ones; where what is registered is not a ``Format``.
    """
    handed_down.complete()
    check_type("a format", name, str, "the name of one", f"known formats: {', '.join(_registered)}")
    if name in _registered:
        return _registered[name]
    entry = _entries().get(name)
    if entry is None:
        known = sorted({*_registered, *_entries()})
        hint = did_you_mean(name, known) or f"known formats: {', '.join(known)}"
        raise GraphoptError(f"there is no format called {name!r}; {hint}")
    return _loaded(entry)


@cache
def _loaded(entry: EntryPoint) -> Format:
    owner = entry.dist.name if entry.dist else "an unknown package"
    try:
        form = entry.load()
    except Exception as error:
        where = f"the format {entry.name!r} ({entry.value}, from {owner})"
        raise GraphoptError(f"{where} cannot be imported: {quoted(error)}") from error
    if not isinstance(form, Format):
        raise GraphoptError(f"the entry point {entry.value} for {entry.name!r} (from {owner}) is not a graphopt.Format")
    if form.name != entry.name:
        raise GraphoptError(f"{entry.value} is registered as {entry.name!r} but calls itself {form.name!r}")
    return form


def format_names() -> tuple[str, ...]:
    """The names of all formats, without importing what is behind them."""
    return tuple(dict.fromkeys((*OWN, *_registered, *sorted(_entries()))))


def available_formats() -> dict[str, Format]:
    """Every format by name: graphopt's own, then installed ones; what cannot be imported is left out, and logged.

    Example:
        >>> "svg" in graphopt.available_formats()
        True
    """
    handed_down.complete()
    found = dict(_registered)
    for name in sorted(_entries()):
        if name in _registered:
            logger.error("an installed package registers a format called %r, which graphopt has: it is left out", name)
            continue
        try:
            found[name] = find_format(name)
        except GraphoptError as error:
            logger.error("%s", error)
    return found
