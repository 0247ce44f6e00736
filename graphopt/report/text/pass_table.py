"""The installed passes as text and as data: options, stage, numerics, order and documentation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

from graphopt.ir.words.columns import width_of_tables
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.text.spec import OptionField, option_fields

__all__ = ["passes_json", "passes_list", "passes_text"]


def passes_list(passes: Iterable[type[Pass]]) -> str:
    """A line for each pass: its name and what it does, cut where the terminal ends."""
    width = width_of_tables() or _WIDTH
    rows = [(cls.name, (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "")) for cls in passes]
    names = max((len(name) for name, _ in rows), default=0)
    lines = [f"{name:{names}}  {summary}" for name, summary in rows]
    return "\n".join([*(line if len(line) <= width else f"{line[: width - 1]}…" for line in lines), "", _MORE])


_WIDTH = 80
"""Columns of the list where nothing says how many there are."""

_MORE = "graphopt passes NAME explains one with its options, --long lists all options"


def passes_text(passes: Iterable[type[Pass]], *, whole: bool = False) -> str:
    """A block for each pass: summary, stage and numerics, options with types and defaults, order constraints.

    Args:
        passes: pass classes.
        whole: the whole docstring in place of its first line.
    """
    return "\n\n".join("\n".join(_block(cls, whole)) for cls in passes)


def _block(cls: type[Pass], whole: bool) -> list[str]:
    doc = inspect.getdoc(cls) or ""
    shown = _paragraphs(doc) if whole else doc.splitlines()[:1]
    options = option_fields(cls)
    return [
        cls.name,
        *(f"  {line}".rstrip() for line in shown),
        *([""] if whole else []),
        f"  stage: {cls.stage}; numerics: {cls.numerics}",
        *(f"  option {_option(option)}" for option in options),
        *([] if options else ["  no options"]),
        *(f"  {constraint}" for constraint in _constraints(cls)),
        f"  from {cls.__module__}.{cls.__qualname__}",
    ]


def _paragraphs(doc: str) -> list[str]:
    """The lines of a docstring, each paragraph and each entry of a list filled to the terminal's width."""
    width = width_of_tables()
    if width is None:
        return doc.splitlines()
    found: list[str] = []
    for line in doc.splitlines():
        text = line.strip()
        if _goes_on(found[-1] if found else "", line):
            found[-1] = f"{found[-1]} {text}"
        else:
            found.append(line.rstrip())
    return found


def _goes_on(before: str, line: str) -> bool:
    """Whether a line goes on with the sentence of the one before it."""
    last, text = before.strip(), line.strip()
    if not last or not text or _BEGINS.match(text) or _EXAMPLE.match(last) or last.endswith(":"):
        return False
    return len(line) - len(line.lstrip()) >= len(before) - len(before.lstrip())


_EXAMPLE = re.compile(r">>>|\.\.\.")
_BEGINS = re.compile(r">>>|\.\.\. |[-*] |[\w-]+: ")
"""How entries of lists and examples begin, which are lines of their own."""


def _option(option: OptionField) -> str:
    default = "required" if option.required else f"default {_default_text(option.default)}"
    return f"{option.name}: {_type_text(option.type)}, {default}"


def _type_text(kind: Any) -> str:
    """``int``, ``tuple[str, ...]``, ``int | None``, ``Literal['a', 'b']``."""
    if isinstance(kind, type) and not hasattr(kind, "__origin__"):
        return kind.__name__
    return str(kind).replace("typing.", "")


def _default_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_default_text, value)) or "empty"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else '""'


def _constraints(cls: type[Pass]) -> list[str]:
    words = {"after": "runs after", "requires": "requires", "conflicts": "conflicts with"}
    found = [f"{text} {', '.join(getattr(cls, key))}" for key, text in words.items() if getattr(cls, key)]
    found += ["changes inputs or outputs of the program"] if cls.changes_signature else []
    return [*found, "draws random numbers of its own"] if cls.draws else found


def passes_json(passes: Iterable[type[Pass]]) -> list[dict[str, Any]]:
    """The same as plain data, with whole docstrings."""
    return [
        {
            "name": cls.name,
            "summary": (inspect.getdoc(cls) or "").partition("\n")[0],
            "doc": inspect.getdoc(cls) or "",
            "stage": cls.stage,
            "numerics": cls.numerics,
            "options": [
                {
                    "name": option.name,
                    "type": _type_text(option.type),
                    "required": option.required,
                    "default": option.default,
                }
                for option in option_fields(cls)
            ],
            "after": list(cls.after),
            "requires": list(cls.requires),
            "conflicts": list(cls.conflicts),
            "changes_signature": cls.changes_signature,
            "draws": cls.draws,
            "class": f"{cls.__module__}.{cls.__qualname__}",
        }
        for cls in passes
    ]
