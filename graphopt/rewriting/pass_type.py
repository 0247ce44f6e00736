"""The type of pass classes, which checks options where an object is made, so that every pass says the same of them."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from graphopt.errors import ArgumentError, GraphoptError, did_you_mean, shown, wrong_argument
from graphopt.ir.words.written_units import parse_bytes

__all__ = ["PassType"]

T = TypeVar("T")

_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
}


class PassType(abc.ABCMeta):
    """Compares what a pass is made from with the types of its fields, before its own checks.

    What means the same in other words is put right: lists and single texts where a tuple is wanted, ``8e9`` for a whole
    number, a dtype or a process group where a name is.
    """

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        """An object of the pass class.

        Raises:
            ArgumentError: for an option that it does not have, one that is missing, and a value of another type.
            GraphoptError: for what the pass itself refuses.
        """
        values, wrong = _checked(cls, args, kwargs)
        try:
            made: T = super().__call__(*values.args, **values.kwargs)  # type: ignore[misc]
        except GraphoptError:  # in the words of the pass
            raise
        except Exception as error:
            if wrong is None:
                raise
            raise wrong from error
        if wrong is not None:
            raise wrong
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """The options, for help and tooltips."""
        initialiser = next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))
        return inspect.Signature(list(inspect.signature(initialiser).parameters.values())[1:])


def _checked(
    cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[inspect.BoundArguments, Exception | None]:
    """What to make an object with, and what is wrong with it, which the pass itself may know better words for."""
    signature = inspect.signature(cls)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        raise ArgumentError(_misuse(cls.__name__, signature, args, kwargs)) from None
    hints = _hints(cls)
    wrong: Exception | None = None
    for name, value in bound.arguments.items():
        kind = hints.get(name)
        if kind is None:
            continue
        found = _read(value, kind)
        if found is _NOT:
            wrong = wrong or wrong_argument(f"{cls.__name__}: {name}", value, _words(kind), _as_number(value))
        else:
            bound.arguments[name] = found
    return bound, wrong


def _misuse(owner: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why arguments do not fit a signature: an option that there is not, one that is missing, too many values."""
    names = list(signature.parameters)
    listed = f"its options are {', '.join(names)}" if names else "it has no options"
    unknown = [name for name in kwargs if name not in names]
    if unknown:
        return f"{owner} has no option {unknown[0]!r}; {did_you_mean(unknown[0], names) or listed}"
    positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    if len(args) > len(positional):
        return f"{owner} takes {len(positional)} values without a name, got {len(args)}; {listed}"
    twice = [p.name for p, _ in zip(positional, args, strict=False) if p.name in kwargs]
    if twice:
        return f"{owner}: {twice[0]} is given twice, as {shown(args[names.index(twice[0])])} and by name"
    given = {p.name for p, _ in zip(positional, args, strict=False)} | set(kwargs)
    missing = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name not in given]
    return f"{owner} needs {' and '.join(missing)}: write {owner}({', '.join(f'{name}=...' for name in missing)})"


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of the options, by name, where they are known."""
    found: dict[str, Any] = {}
    for owner in (cls, vars(cls).get("__init__", cls)):
        try:
            found |= typing.get_type_hints(owner)
        except (NameError, TypeError):  # names that are there for type checkers only
            continue
    found.pop("return", None)
    return found


_NOT = object()
"""What a value becomes that is not of a kind."""


def _read(value: Any, kind: Any) -> Any:
    """A value as a kind of option, or ``_NOT``; kinds that options do not have are not looked at."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        read = [_read(value, choice) for choice in typing.get_args(kind)]
        same = [found for found in read if found is value]
        return (same or [found for found in read if found is not _NOT] or [_NOT])[0]
    if typing.get_origin(kind) in (tuple, list):
        return _read_several(value, typing.get_args(kind)[0])
    if kind in _WORDS:
        return _read_one(value, kind)
    return value


def _read_several(value: Any, kind: Any) -> Any:
    if isinstance(value, str) and kind is str:
        return (value,)
    if not isinstance(value, (tuple, list)):
        return _NOT
    items = [_read(item, kind) for item in value]
    return _NOT if any(item is _NOT for item in items) else tuple(items)


def _read_one(value: Any, kind: Any) -> Any:
    if kind is types.NoneType or kind is bool:
        return value if isinstance(value, kind) else _NOT
    if isinstance(value, bool):
        return _NOT
    if kind is str:
        return _read_text(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (int, kind)) else _NOT


def _read_text(value: Any) -> Any:
    """Text, also of what has a name that options are given by: a dtype, a process group."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if not isinstance(value, str) and isinstance(getattr(value, "group_name", None), str):
        return value.group_name
    return value if isinstance(value, str) else _NOT


def _as_number(value: Any) -> str:
    """How a number is written that was given as text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return f"write {float(value):g}"
        with contextlib.suppress(ValueError):
            return f"write {parse_bytes(value)}"
    return ""


def _words(kind: Any) -> str:
    """A kind of option in words."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(choice) for choice in typing.get_args(kind)))
    if typing.get_origin(kind) in (tuple, list):
        return f"a tuple of values that are each {_words(typing.get_args(kind)[0])}"
    return _WORDS.get(kind) or str(kind)
