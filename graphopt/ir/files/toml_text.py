"""Plain data as TOML: writing it, which Python's library does not, and reading what a stranger may have written."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

__all__ = ["read_toml", "toml_text"]

_MOST_PARTS = 200
"""Of a key; ``tomllib`` takes seconds for one of ten thousand parts, and four times as long for twice as many."""

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')
_BETWEEN_KEYS = re.compile(r"[^\w\-\"'. \t]")

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def read_toml(text: str) -> dict[str, Any]:
    """The document that a text of TOML is.

    Raises:
        ValueError: for other text, and for a key of more than 200 parts. Where strings may span lines, a line of
            as many dots is taken for one.
    """
    one_line_each = "'''" not in text and '"""' not in text
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") >= _MOST_PARTS:
            pieces = _BETWEEN_KEYS.split(_STRING.sub('""', line)) if one_line_each else [line]
            parts = 1 + max(piece.count(".") for piece in pieces)
            if parts > _MOST_PARTS:
                raise ValueError(f"a key in line {number} has {parts} parts, and at most {_MOST_PARTS} are read")
    return tomllib.loads(text)


def toml_text(data: Mapping[str, Any]) -> str:
    """A document of TOML.

    Args:
        data: texts, numbers, truth values, lists, and objects two levels deep, which become tables.
    """
    lines = [f"{_key(name)} = {_value(value)}" for name, value in data.items() if not isinstance(value, Mapping)]
    for name, value in data.items():
        if isinstance(value, Mapping):
            lines += _tables(_key(name), value)
    return "\n".join(lines).strip("\n") + "\n"


def _tables(path: str, table: Mapping[str, Any]) -> list[str]:
    plain = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    nested = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    lines = [f"\n[{path}]"] if plain or not nested else []
    lines += [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, value in nested.items():
        lines += _tables(f"{path}.{_key(name)}", value)
    return lines


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {_value(item)}' for name, item in value.items())} }}"
    return repr(value)


def _text(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(letter) or _letter(letter) for letter in text) + '"'


def _letter(letter: str) -> str:
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x20 or code == 0x7F else letter
