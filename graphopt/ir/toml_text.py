"""Writing plain data as TOML, which Python's library only reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["toml_text"]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


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
