"""Passes as text: ``recompute{checkpoints=blocks.*},offload`` to objects and back."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

from graphopt.errors import GraphoptError, PipelineError, did_you_mean

__all__ = ["format_pass", "option_fields", "parse_passes"]

_NAME = re.compile(r"\s*([a-zA-Z][\w-]*)\s*")
_BARE = re.compile(r"[^\s,{}\"'=]+")


@dataclasses.dataclass(frozen=True)
class OptionField:
    """One option of a pass: its name in text (kebab-case), the dataclass field, its type and default.

    ``writes`` says whether it is a path that the pass writes to: its field has ``metadata={"writes": True}``.
    """

    name: str
    field: str
    type: Any
    default: Any
    required: bool
    writes: bool = False


def option_fields(cls: type) -> list[OptionField]:
    """The options that a pass class declares, in order."""
    hints = _hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = None if required else field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        name, writes = field.name.replace("_", "-"), bool(field.metadata.get("writes"))
        found.append(OptionField(name, field.name, hints[field.name], default, required, writes))
    return found


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a class's fields, which are text in its source."""
    return typing.get_type_hints(cls)


def format_pass(instance: Any) -> str:
    """The text form of a pass; options at their defaults are left out."""
    parts = []
    for option in option_fields(type(instance)):
        value = getattr(instance, option.field)
        if not option.required and value == option.default:
            continue
        values = value if isinstance(value, tuple) else (value,)
        if not values:
            parts.append(f"{option.name}=()")
            continue
        parts.append(f"{option.name}={','.join(_format_value(item) for item in values)}")
    return f"{instance.name}{{{' '.join(parts)}}}" if parts else str(instance.name)


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    if isinstance(value, str):
        plain = _BARE.fullmatch(value) and not value.startswith("()") and not _means_something_else(value)
        return value if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def _means_something_else(text: str) -> bool:
    """Whether a text without quotes would be read as a truth value, nothing or a number."""
    return text.lower() in ("true", "false", "none") or _is_number(text)


def parse_passes(text: str, find: Callable[[str], type]) -> list[Any]:
    """The passes that ``text`` describes: ``name{option=value,value other=value},name``.

    Args:
        text: pass names in kebab-case with options in braces; an option's values are separated by commas, options by
            spaces. Values with spaces, commas, braces or quotes go in quotes.
        find: the class for a pass name; raises for an unknown one.

    Raises:
        PipelineError: listing everything that is wrong, each with its place in the text.
    """
    problems: list[str] = []
    passes: list[Any] = []
    for name, options, place in _split(text):
        try:
            cls = find(name)
            passes.append(_build(cls, options, place))
        except PipelineError as error:
            problems.append(str(error))
    if problems:
        raise PipelineError("\n".join(problems))
    return passes


def _split(text: str) -> Iterator[tuple[str, list[tuple[str, list[Any]]], str]]:
    position, index = 0, 0
    while position < len(text):
        match = _NAME.match(text, position)
        if match is None:
            raise PipelineError(_point(text, position, "expected the name of a pass here"))
        name, position = match[1], match.end()
        options: list[tuple[str, list[Any]]] = []
        if position < len(text) and text[position] == "{":
            options, position = _options(text, position + 1)
        elif position < len(text) and text[position] in "([=:":
            raise PipelineError(
                _point(text, position, f"options go in braces, {name}{{option=value}}, not behind this")
            )
        yield name, options, f"$.passes[{index}] ({name})"
        index += 1
        while position < len(text) and text[position].isspace():
            position += 1
        if position < len(text):
            if text[position] != ",":
                raise PipelineError(_point(text, position, "expected a comma between passes here"))
            position += 1
            if not text[position:].strip():
                raise PipelineError(_point(text, position, "expected another pass after the comma"))


def _options(text: str, position: int) -> tuple[list[tuple[str, list[Any]]], int]:
    options: list[tuple[str, list[Any]]] = []
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position >= len(text):
            raise PipelineError(_point(text, position, "expected } to close the options"))
        if text[position] == "}":
            return options, position + 1
        match = _NAME.match(text, position)
        if match is None or match.end() >= len(text) or text[match.end()] != "=":
            raise PipelineError(
                _point(text, position, "expected option=value here (a value with spaces goes in quotes)")
            )
        name, position = match[1], match.end() + 1
        values: list[Any] = []
        while True:
            value, position = _value(text, position)
            values.append(value)
            if position < len(text) and text[position] == ",":
                position += 1
                continue
            break
        if position < len(text) and text[position] == "=":
            raise PipelineError(_point(text, position, "options are separated by spaces, and values by commas"))
        options.append((name, values))


@dataclasses.dataclass(frozen=True)
class _Quoted:
    text: str


_EMPTY = object()
"""What ``()`` stands for: no values."""


def _value(text: str, position: int) -> tuple[Any, int]:
    if position < len(text) and text[position] in "\"'":
        quote, start = text[position], position
        characters = []
        position += 1
        while position < len(text) and text[position] != quote:
            if text[position] == "\\":
                position += 1
            characters.append(text[position : position + 1])
            position += 1
        if position >= len(text):
            raise PipelineError(_point(text, start, "this quote is not closed"))
        return _Quoted("".join(characters)), position + 1
    if text.startswith("()", position):
        return _EMPTY, position + 2
    match = _BARE.match(text, position)
    if match is None:
        raise PipelineError(_point(text, position, "expected a value here"))
    return match[0], match.end()


def _point(text: str, position: int, message: str) -> str:
    return f"{message}:\n  {text}\n  {' ' * position}^"


def _build(cls: type, options: list[tuple[str, list[Any]]], place: str) -> Any:
    fields = option_fields(cls)
    known = {option.name: option for option in fields} | {option.field: option for option in fields}
    values, problems = _read_options(known, options, place)
    given = {known[name].field for name, _ in options if name in known}
    missing = [option for option in fields if option.required and option.field not in given]
    problems += [f"{place}: needs the option {option.name}: write {_with(cls, option)}" for option in missing]
    if problems:
        raise PipelineError("\n".join(problems))
    try:
        return cls(**values)
    except (GraphoptError, TypeError, ValueError, OverflowError) as error:
        raise PipelineError(f"{place}: {error}") from error


def _with(cls: type, option: OptionField) -> str:
    """How an option is given in text."""
    return f"{getattr(cls, 'name', cls.__name__)}{{{option.name}=...}}"


def _read_options(
    known: dict[str, OptionField], options: list[tuple[str, list[Any]]], place: str
) -> tuple[dict[str, Any], list[str]]:
    """The values of options by field, and what is wrong with the others."""
    values: dict[str, Any] = {}
    problems = []
    for name, raw in options:
        option = known.get(name)
        if option is None:
            names = list(dict.fromkeys(field.name for field in known.values()))
            hint = did_you_mean(name, names) or f"it has the options {', '.join(names) or 'none'}"
            problems.append(f"{place}: no option {name!r}; {hint}")
        elif option.field in values:
            problems.append(f"{place}.{name}: given twice")
        else:
            try:
                values[option.field] = _convert(raw, option.type)
            except ValueError as error:
                problems.append(f"{place}.{name}: {error}")
    return values, problems


def _convert(raw: list[Any], kind: Any) -> Any:
    choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    errors = []
    for choice in sorted(choices, key=_strictness):
        try:
            return _convert_one(raw, choice)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError("; nor ".join(dict.fromkeys(errors)))


def _strictness(kind: Any) -> int:
    """Try the choices of a union from the strictest to the one that takes any text."""
    order: list[Any] = [types.NoneType, bool, int, float]
    if kind in order:
        return order.index(kind)
    return 6 if kind is str else 5


def _convert_one(raw: list[Any], kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        (inner, *_) = typing.get_args(kind)
        if raw == [_EMPTY]:
            return ()
        return tuple(_convert([item], inner) for item in raw)
    if len(raw) != 1:
        raise ValueError(f"takes one value, got {len(raw)}")
    (item,) = raw
    if item is _EMPTY:
        raise ValueError("() is not one value")
    quoted = isinstance(item, _Quoted)
    text = item.text if quoted else item
    if typing.get_origin(kind) is typing.Literal:
        if text in typing.get_args(kind):
            return text
        words = [str(word) for word in typing.get_args(kind)]
        raise ValueError(f"{text!r} is not one of {', '.join(words)}; {did_you_mean(text, words)}".rstrip("; "))
    if kind is str:
        return text
    read = _READERS.get(kind)
    value = read(text.lower()) if read is not None and not quoted else _NOT
    if value is _NOT:
        raise ValueError(f"{text!r} is not {_ARTICLES.get(kind, kind)}")
    return value


_NOT = object()
"""What a reader returns for text that is not a value of its type."""

_READERS: dict[Any, Callable[[str], Any]] = {
    types.NoneType: lambda text: None if text == "none" else _NOT,
    bool: lambda text: {"true": True, "false": False}.get(text, _NOT),
    int: lambda text: int(text) if re.fullmatch(r"[+-]?[0-9]{1,1000}", text) else _NOT,
    float: lambda text: float(text) if _is_number(text) else _NOT,
}

_ARTICLES = {
    types.NoneType: "none",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
