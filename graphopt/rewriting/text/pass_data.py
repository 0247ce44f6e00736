"""Passes as plain data: what a configuration file holds, to objects and back.

Names of passes and of options are those of the text form. Nothing is evaluated or imported but what the names of passes
say, which are looked up among the installed ones.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from graphopt.errors import GraphoptError, PipelineError, did_you_mean
from graphopt.ir.files.checked_json import Field
from graphopt.rewriting.text.spec import OptionField, format_pass, option_fields, parse_passes

__all__ = ["passes_from_data", "passes_to_data"]

_MOST_PASSES = 1_000
_MOST_VALUES = 100_000


def passes_from_data(data: Any, find: Callable[[str], type]) -> list[Any]:
    """The passes that a document describes.

    Its only entry is ``passes``: an object with an entry for each pass, whose options are an object again, or nothing;
    or a list whose items are such objects, or text form; or text form alone.

    Args:
        data: as ``json.loads`` gives it.
        find: the class for a pass name; raises for an unknown one.

    Raises:
        PipelineError: listing everything that is wrong, each with its path in the document.
    """
    problems: list[str] = []
    passes: list[Any] = []
    try:
        for name, options in _entries(_passes_of(Field(data), find), find):
            try:
                passes += options if isinstance(options, list) else [_build(name, options, find)]
            except GraphoptError as error:
                problems.append(str(error))
    except GraphoptError as error:
        problems.append(str(error))
    if problems:
        raise PipelineError("\n".join(problems))
    return passes


def _passes_of(document: Field, find: Callable[[str], type]) -> Field:
    """The only entry of a document; where it is missing, and names of passes stand in its place, the error says so."""
    if document.is_object and "passes" not in document:
        for name in document.value:
            try:
                find(str(name))
            except PipelineError:
                continue
            raise document[name].error(f"a pass stands below 'passes': in TOML write [passes.{name}]")
    return document.parts(("passes",))["passes"]


def _entries(passes: Field, find: Callable[[str], type]) -> Iterator[tuple[str, Field | list[Any]]]:
    """The passes by name with their options, or what a text describes."""
    if isinstance(passes.value, str):
        yield "", _parsed(passes, find)
    elif passes.is_object:
        yield from passes.entries(_MOST_PASSES)
    elif isinstance(passes.value, list):
        for item in passes.items(_MOST_PASSES):
            if isinstance(item.value, str):
                yield "", _parsed(item, find)
            elif item.is_object and len(item.value) == 1:
                yield item.only_entry()
            elif item.is_object:
                raise item.error(_ONE_ENTRY.format(found=", ".join(map(repr, list(item.value)[:5])) or "nothing"))
            else:
                raise item.expected("a pass as text, or an object whose one entry is its name")
    else:
        raise passes.expected("an object with an entry for each pass, or a list of passes")


_ONE_ENTRY = (
    "expected an object whose one entry is a pass with its options, found one with {found}; in TOML write a table for "
    "each pass, [passes.recompute], with its options below"
)


def _parsed(text: Field, find: Callable[[str], type]) -> list[Any]:
    try:
        return parse_passes(text.text(), find)
    except PipelineError as error:
        raise text.error(str(error)) from None


def _build(name: str, options: Field, find: Callable[[str], type]) -> Any:
    try:
        cls = find(name)
    except PipelineError as error:
        raise options.error(str(error)) from None
    fields = option_fields(cls)
    values, problems = _values(options, fields)
    missing = [field.name for field in fields if field.required and field.field not in values]
    if not problems:
        problems += [f"{options.path}: needs the option {missed!r}" for missed in missing]
    if problems:
        raise PipelineError("\n".join(problems))
    try:
        return cls(**values)
    except (GraphoptError, TypeError, ValueError, OverflowError) as error:
        raise options.error(str(error)) from error


def _values(options: Field, fields: list[OptionField]) -> tuple[dict[str, Any], list[str]]:
    """The values of options by field, and what is wrong with the others."""
    known = {field.name: field for field in fields} | {field.field: field for field in fields}
    values: dict[str, Any] = {}
    problems: list[str] = []
    if options.value is None:
        return values, problems
    if not options.is_object:
        listed = ", ".join(field.name for field in fields) or "none"
        raise PipelineError(f"{options.expected('an object')}; options stand there by name: {listed}")
    for name, found in options.entries():
        option = known.get(name)
        if option is None:
            names = [field.name for field in fields]
            hint = did_you_mean(name[:100], names) or f"it has the options {', '.join(names) or 'none'}"
            problems.append(f"{found.path}: there is no such option; {hint}")
        elif option.field in values:
            problems.append(f"{found.path}: given twice, with - and with _")
        else:
            try:
                values[option.field] = _convert(found, option.type)
            except GraphoptError as error:
                problems.append(str(error))
    return values, problems


def _convert(found: Field, kind: Any) -> Any:
    """A value of the document as a kind of option."""
    choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for read in (_exactly, _nearly):
        for choice in choices:
            value = read(found, choice)
            if value is not _NOT:
                return value
    several = next((choice for choice in choices if typing.get_origin(choice) is tuple), None)
    if several is not None and isinstance(found.value, list):
        return tuple(_convert(item, typing.get_args(several)[0]) for item in found.items(_MOST_VALUES))
    if found.value is None and not several:
        raise found.error(f"expected {_words(choices)}, found nothing (leave the option out for its default)")
    raise found.expected(_words(choices))


_NOT = object()
"""What a value becomes that is not of a kind."""


def _exactly(found: Field, kind: Any) -> Any:
    """A value of just this type, or ``_NOT``."""
    if typing.get_origin(kind) is typing.Literal:
        return found.value if found.value in typing.get_args(kind) else _NOT
    if kind is str and isinstance(found.value, str):
        return found.text()
    return found.value if kind in _WORDS and type(found.value) is kind else _NOT


def _nearly(found: Field, kind: Any) -> Any:
    """A value that means the same in another type: a whole number for any, or one value for several."""
    value = found.value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise found.expected("a number of 64 bits") from None
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if typing.get_origin(kind) is tuple and isinstance(value, (str, bool, int, float)):
        return (_convert(found, typing.get_args(kind)[0]),)
    return _NOT


_WORDS: dict[Any, str] = {
    types.NoneType: "nothing",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


def _words(kinds: Iterable[Any]) -> str:
    words = []
    for kind in kinds:
        if typing.get_origin(kind) is tuple:
            words.append("a list")
        elif typing.get_origin(kind) is typing.Literal:
            words += [repr(word) for word in typing.get_args(kind)]
        elif kind is not types.NoneType:
            words.append(_WORDS.get(kind, str(kind)))
    return " or ".join(words)


# --- writing ---------------------------------------------------------------------------------------------------------


def passes_to_data(passes: Iterable[Any], find: Callable[[str], type], *, null: bool) -> dict[str, Any]:
    """The document that describes passes; options at their defaults are left out.

    Args:
        passes: in order.
        find: the class for a pass name.
        null: whether the document can hold nothing as a value; where it cannot, a pass with such an option is text.

    Raises:
        PipelineError: for a pass that would not be found by its name.
    """
    found: list[Any] = []
    names = set()
    for item in passes:
        name, options = item.name, _options(item)
        names.add(name)
        if find(name) is not type(item):
            raise PipelineError(
                f"{item} is not the pass that is registered as {name!r}, and a file would not give it back"
            )
        text = not null and any(_holds_nothing(value) for value in options.values())
        found.append(format_pass(item) if text else {name: options})
    if all(isinstance(entry, dict) for entry in found) and len(names) == len(found):
        return {"passes": {name: options for entry in found for name, options in entry.items()}}
    return {"passes": found}


def _options(item: Any) -> dict[str, Any]:
    """The options of a pass that are not at their defaults."""
    values = {}
    for option in option_fields(type(item)):
        value = getattr(item, option.field)
        if option.required or value != option.default or type(value) is not type(option.default):
            values[option.name] = list(value) if isinstance(value, tuple) else value
    return values


def _holds_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, list) and None in value)
