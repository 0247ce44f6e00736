"""Text from users' code made safe to show: for XML and HTML, and for terminals."""

from __future__ import annotations

import re

__all__ = ["printable", "safe", "visible"]

_TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Marks that turn the order of writing around: a name must not rearrange what stands beside it."""

_BIDI = {ord(mark): f"\\u{ord(mark):04x}" for mark in _TURNING}
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: object) -> str:
    r"""Text with what XML cannot hold at all (control characters, lone surrogates) as U+FFFD.

    Marks that turn the order of writing around are written out (``\u202e``).
    """
    return _NOT_XML.sub("\ufffd", str(text)).translate(_BIDI)


def safe(text: object) -> str:
    """Text for XML and HTML, as content or attribute."""
    clean = printable(text)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        clean = clean.replace(character, entity)
    return clean


def visible(text: str) -> str:
    r"""Text for a terminal: what would steer it (escape sequences and so on) is written out, as ``\x1b``.

    Line breaks and tabs stay.
    """
    return text.translate(_CONTROLS | _BIDI)
