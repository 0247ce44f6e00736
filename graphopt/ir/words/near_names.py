"""What a user may have meant by a name or glob that no tensor has."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection

from graphopt.errors import did_you_mean

__all__ = ["near_names"]

_SHOWN = 5


def near_names(pattern: str, names: Collection[str], fits: Callable[[str], bool]) -> str:
    """A sentence with what was probably meant; empty where nothing is near.

    A glob is compared with the globs that the names themselves suggest, in which the numbers of repeated containers are
    stars: ``layers.*`` gets ``blocks.*`` where the model has ``blocks.0`` to ``blocks.11``.

    Args:
        pattern: what names nothing.
        names: all names of tensors.
        fits: whether a pattern names something.
    """
    close = [guess for guess in _repaired(pattern) if fits(guess)]
    if not close and set(pattern) & set("*?"):
        close = _near_globs(pattern, _repeated(names))
    elif not close and re.search(r"\.\d", pattern):
        close = [
            name for name in map(_numbered(pattern), _near_globs(_starred(pattern), _repeated(names))) if fits(name)
        ]
    if close:
        return f"did you mean {', '.join(map(repr, close[:_SHOWN]))}?"
    return did_you_mean(pattern, [name for name in names if "~" not in name] or names)


def _repaired(pattern: str) -> list[str]:
    """What is easily written for a glob or a name: a container, a wrapper's prefix, a regular expression, brackets."""
    plain = re.sub(r"\[(\d+)\]", r".\1", pattern)
    guesses = [plain, f"{pattern}.*", pattern.replace("\\.", ".").replace("..*", ".*").strip("^$")]
    guesses.append(re.sub(r"\[[^\]]*\]|\\d\+?", "*", pattern.replace("\\.", ".")).strip("^$"))
    _, dot, rest = pattern.partition(".")
    if dot and rest.strip("*?"):
        guesses.append(rest)
    if pattern.endswith((".weight", ".bias")):
        guesses.append(pattern.rpartition(".")[0])
    return [guess for guess in dict.fromkeys(guesses) if guess and guess != pattern]


def _starred(name: str) -> str:
    """A name with stars in place of the numbers of containers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$|:)|^\d+(?=\.|$|:)", "*", name)


def _numbered(name: str) -> Callable[[str], str]:
    """What puts the numbers of a name in place of the stars of a glob, one after the other."""

    def put(glob: str) -> str:
        numbers = iter(re.findall(r"(?<=\.)\d+(?=\.|$|:)|^\d+(?=\.|$|:)", name))
        return re.sub(r"\*", lambda _: next(numbers, "0"), glob)

    return put


def _repeated(names: Collection[str]) -> list[str]:
    """The globs of what is there several times, the shortest first."""
    found = Counter(_starred(name) for name in names if "~" not in name)
    globs = {glob for glob, count in found.items() if count > 1 and "*" in glob}
    return sorted(globs, key=lambda glob: (glob.count("."), len(glob), glob))


def _near_globs(pattern: str, globs: list[str]) -> list[str]:
    """The globs of the same form that are spelled most like a pattern, without its first containers if need be.

    Of those of its form the ones with its last piece come first; where nothing has its form, what is spelled like it,
    or else the shortest globs of all.
    """
    pieces = _pieces(pattern)
    for first in range(len(pieces)):
        rest = pieces[first:]
        alike = [glob for glob in globs if [p == "*" for p in _pieces(glob)] == [p == "*" for p in rest]]
        if not alike or set(rest) == {"*"}:
            continue
        same_end = [glob for glob in alike if rest[-1] != "*" and _pieces(glob)[-1] == rest[-1]]
        near = difflib.get_close_matches(pattern, same_end or alike, n=_SHOWN, cutoff=0.6)
        return near or same_end or alike
    return difflib.get_close_matches(pattern, globs, n=_SHOWN, cutoff=0.5) or globs[:2]


def _pieces(name: str) -> list[str]:
    return re.split(r"\.|::", name)
