"""Reading plain data that a stranger may have written: every value is checked, and every error names its place.

Nothing is looked up, evaluated, imported or called here. A ``Field`` is a value together with its path in the document
(``$.nodes[3].args[0]``); its methods give what the reader expects there, or a ``GraphoptError`` that says what is.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from graphopt.errors import GraphoptError, did_you_mean

__all__ = ["LONGEST_TEXT", "Field"]

T = TypeVar("T")

LONGEST_TEXT = 10_000
"""Characters of a text; names, source lines and passes are shorter by far."""

_MOST_ITEMS = 1_000_000
_LARGEST = 2**63 - 1
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")


class Field:
    """A value in a document.

    Args:
        value: as ``json.loads`` gives it.
        above: where it stands: ``$`` is the document; or the field that holds it.
        step: which of that field's items or entries it is; None for something about the field itself.

    Attributes:
        value: the same.
    """

    # A program has a hundred thousand of them, and few of their paths are ever shown: these are put together then.
    __slots__ = ("_above", "_step", "value")

    def __init__(self, value: Any, above: str | Field = "$", step: str | int | None = None) -> None:
        self.value = value
        self._above = above
        self._step = step

    @property
    def path(self) -> str:
        """Where it stands: ``$`` is the document."""
        steps, field = [], self
        while True:
            if field._step is not None:
                steps.append(f"[{field._step}]" if isinstance(field._step, int) else _entry(field._step))
            if isinstance(field._above, str):
                return field._above + "".join(reversed(steps))
            field = field._above

    def error(self, problem: str) -> GraphoptError:
        """The error for this place."""
        return GraphoptError(f"{self.path}: {problem}")

    def expected(self, what: str) -> GraphoptError:
        """The error where ``what`` should stand."""
        return self.error(f"expected {what}, found {_shown(self.value)}")

    # --- single values -----------------------------------------------------------------------------------------------

    def text(self, longest: int = LONGEST_TEXT) -> str:
        """Text that can be written to a file: no lone surrogates."""
        if not isinstance(self.value, str):
            raise self.expected("text")
        if len(self.value) > longest:
            raise self.error(f"a text of {len(self.value)} characters; at most {longest} are read")
        if not self.value.isascii():
            try:
                self.value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise self.error("a text with half of a character (a lone surrogate)") from error
        return self.value

    def identifier(self) -> str:
        """A Python identifier in ASCII."""
        if not (isinstance(self.value, str) and _IDENTIFIER.fullmatch(self.value)):
            raise self.expected("a name of letters, digits and underscores")
        return self.value

    def whole(self, smallest: int = -_LARGEST - 1, largest: int = _LARGEST) -> int:
        """A whole number in a range; by default one of 64 bits."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or not smallest <= self.value <= largest:
            raise self.expected(f"a whole number from {smallest} to {largest}")
        return self.value

    def number(self) -> float:
        """A finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.expected("a number")
        try:
            found = float(self.value)
        except OverflowError:
            raise self.expected("a number of 64 bits") from None
        if not math.isfinite(found):
            raise self.expected("a finite number")
        return found

    def truth(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.expected("true or false")
        return self.value

    def one_of(self, known: Mapping[str, T]) -> T:
        """The value that a name stands for in a fixed table."""
        if not isinstance(self.value, str) or self.value not in known:
            named = self.value if isinstance(self.value, str) else ""
            hint = did_you_mean(named[:100], known) or f"known are {', '.join(list(known)[:20])}"
            raise self.error(f"{_shown(self.value)} is not known here; {hint}")
        return known[self.value]

    # --- values that hold others -------------------------------------------------------------------------------------

    def items(self, most: int = _MOST_ITEMS) -> Iterator[Field]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self.expected("a list")
        if len(self.value) > most:
            raise self.error(f"a list of {len(self.value)} items; at most {most} are read")
        for index, item in enumerate(self.value):
            yield Field(item, self, index)

    def entries(self, most: int = _MOST_ITEMS) -> Iterator[tuple[str, Field]]:
        """The names and values of an object; a name is text."""
        if not isinstance(self.value, dict):
            raise self.expected("an object")
        if len(self.value) > most:
            raise self.error(f"an object of {len(self.value)} entries; at most {most} are read")
        for name, item in self.value.items():
            if isinstance(name, str) and len(name) < 200 and name.isascii() and name.isidentifier():
                yield name, Field(item, self, name)
            else:
                yield Field(name, f"{self.path} (a name)").text(), Field(item, self, name)

    def only_entry(self) -> tuple[str, Field]:
        """The name and the value of an object with a single entry."""
        if not isinstance(self.value, dict) or len(self.value) != 1:
            raise self.expected("an object with one entry")
        return next(self.entries())

    def parts(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Field]:
        """The entries of an object whose names are fixed.

        Raises:
            GraphoptError: for a name that is missing, and for one that means nothing here, with the near ones.
        """
        needed, known_names = _names(required, optional)
        if isinstance(self.value, dict) and needed <= self.value.keys() <= known_names:
            return {name: Field(item, self, name) for name, item in self.value.items()}
        found = dict(self.entries())
        missing = [name for name in required if name not in found]
        if missing:
            near = did_you_mean(missing[0], [name[:100] for name in found if name not in (*required, *optional)], 1)
            instead = near.replace("did you mean ", "").rstrip("?")
            raise self.error(f"{missing[0]!r} is missing{instead and f'; {instead} stands there in its place'}")
        for name in found:
            if name not in required and name not in optional:
                known = (*required, *optional)
                hint = did_you_mean(name[:100], known) or f"known are {', '.join(map(repr, known))}"
                raise self.error(f"{_shown(name)} means nothing here; {hint}")
        return found

    @property
    def is_object(self) -> bool:
        """Whether it is an object, and not a plain value or a list."""
        return isinstance(self.value, dict)

    def __contains__(self, name: str) -> bool:
        return isinstance(self.value, dict) and name in self.value

    def __getitem__(self, name: str) -> Field:
        if name not in self:
            raise self.error(f"{name!r} is missing")
        return Field(self.value[name], self, name)


@functools.cache
def _names(required: tuple[str, ...], optional: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that an object has to have, and those that it may have."""
    return frozenset(required), frozenset((*required, *optional))


def _entry(name: str) -> str:
    """The last step of the path of an entry."""
    return f".{name}" if _IDENTIFIER.fullmatch(name) else f"[{_shown(name, 60)}]"


def _shown(value: Any, longest: int = 80) -> str:
    """A value for an error message: short, on one line, and without walking through what is large or deep."""
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return f"a number of {value.bit_length()} bits"
    shown = ascii(value if not isinstance(value, str) else value[: longest + 1])
    return shown if len(shown) <= longest else f"{shown[:longest]}…"
