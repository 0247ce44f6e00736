"""Checks of what users hand over. Each error names the argument, what it takes and what it got, and what to write."""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Mapping, Sequence

from graphopt.errors import ArgumentError, did_you_mean

__all__ = ["check_type", "choice", "no_such_word", "shown", "whole_number", "wrong_argument"]

_LONGEST = 60
"""Letters of a value that are shown."""


def shown(value: object) -> str:
    """A value in an error: itself where it is short, and what it is."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"the function {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, (tuple, list, set, frozenset, dict)) and len(value) > 1:
        return f"a {kind} of {len(value)} ({', '.join(dict.fromkeys(type(item).__name__ for item in value))})"
    text = repr(value)
    short = len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    return f"{text} ({kind})" if short else f"{article} {kind}"


def wrong_argument(argument: str, value: object, wanted: str, hint: str = "") -> ArgumentError:
    """The error for an argument that is something else than what is wanted.

    Args:
        argument: its name, with its owner where that is not clear.
        value: what it got.
        wanted: what it takes, as the end of a sentence: ``a number of bytes``.
        hint: what to write instead.
    """
    return ArgumentError(f"{argument} is {wanted}, got {shown(value)}{hint and f'; {hint}'}")


def check_type(argument: str, value: object, kinds: type | tuple[type, ...], wanted: str, hint: str = "") -> None:
    """Refuse a value that is of none of the types; True and False count as numbers nowhere.

    Raises:
        ArgumentError: as ``wrong_argument`` says.
    """
    wanted_kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if (isinstance(value, bool) and bool not in wanted_kinds) or not isinstance(value, kinds):
        raise wrong_argument(argument, value, wanted, hint)


def no_such_word(argument: str, word: object, known: Collection[object]) -> ArgumentError:
    """The error for a word that an argument does not know, with the near ones or all that it knows."""
    words = [str(other) for other in known]
    listed = f"it is {', '.join(map(repr, known))}"
    near = did_you_mean(word, words) if isinstance(word, str) else ""
    return ArgumentError(f"{argument}={word!r:.80} is not known; {f'{near} ({listed})' if near else listed}")


def choice(argument: str, value: object, known: Sequence[str], aliases: Mapping[str, str] | None = None) -> str:
    """One of the words that an argument knows, also where it is written in other case or under another name.

    Args:
        argument: its name.
        value: what it got.
        known: the words.
        aliases: other names in lower case, with the words that they stand for.

    Raises:
        ArgumentError: for any other value, with the near words.
    """
    if isinstance(value, str):
        lower = value.strip().lower()
        found = {word.lower(): word for word in known} | dict(aliases or {})
        if lower in found:
            return found[lower]
    raise no_such_word(argument, value, known)


def whole_number(argument: str, value: object, *, least: int = 0, of: str = "") -> int:
    """A whole number, also where it is written as ``8e9``.

    Args:
        argument: its name.
        value: what it got.
        least: the smallest that is allowed.
        of: what is counted.

    Raises:
        ArgumentError: for a fraction, for what is no number, and for a number that is too small.
    """
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong_argument(argument, value, f"a whole number{of and f' of {of}'} of at least {least}")
    return value
