"""How bytes, seconds and numbers of things are written, and bytes read; nothing here needs torch."""

from __future__ import annotations

import re

__all__ = ["counted", "format_bytes", "format_seconds", "parse_bytes"]

_DECIMAL_UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {"": 1, "b": 1, **_DECIMAL_UNITS, **_BINARY_UNITS}


def parse_bytes(text: str) -> int:
    """Bytes from text such as ``8GB`` (powers of ten), ``512 MiB`` (powers of two), ``1000000`` or ``8e9``.

    Raises:
        ValueError: for anything else.
    """
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+]?\d{1,3})?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r:.60} is not a number of bytes: {_meant(match)}write 8GB, 512MiB or 1000000")
    count = float(match[1]) * _UNITS[match[2].lower()]
    if count >= 2**63:
        raise ValueError(f"{text!r:.60} is more than any memory has")
    return int(count)


def _meant(match: re.Match[str] | None) -> str:
    """What a number with an unknown unit probably means: ``8G`` is ``8GB`` to many."""
    letters = match[2].lower().removesuffix("yte").removesuffix("ytes") if match is not None else ""
    unit = next((known for known in (f"{letters}b", letters) if known in _UNITS and len(known) > 1), "")
    return f"did you mean {match[1]}{unit[:-1].upper().replace('I', 'i')}B? " if match is not None and unit else ""


_NO_PLURAL = frozenset({"as", "bias", "is", "its", "this"})


def counted(count: int, what: str) -> str:
    """A number of things: ``3 calls``, ``1 call``, ``1 copy held``.

    Args:
        count: how many.
        what: the things in the plural, before or behind the words that say more of them.
    """
    if count != 1:
        return f"{count} {what}"
    words = what.split(" ")
    for place, word in enumerate(words):
        if word.endswith("s") and word not in _NO_PLURAL and not word.endswith("ss"):
            words[place] = _one(word)
            break
    return f"1 {' '.join(words)}"


def _one(word: str) -> str:
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-2] if word.endswith(("sses", "xes", "ches", "shes")) else word[:-1]


def format_bytes(count: float) -> str:
    """Bytes as people read them, in powers of ten: ``67.1 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds as people read them, to three figures: ``1.41 s``, ``23.6 ms``, ``8.39 µs``."""
    rounded = float(f"{seconds:.3g}")
    if not rounded:
        return "0 s"
    units = (("s", 1), ("ms", 10**3), ("µs", 10**6))
    unit, factor = next((pair for pair in units if abs(rounded) * pair[1] >= 1), units[-1])
    number = rounded * factor
    return f"{number:.0f} {unit}" if abs(number) >= 100 else f"{number:#.3g} {unit}"
