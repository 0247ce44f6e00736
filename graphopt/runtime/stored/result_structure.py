"""The structure of what a model returns as plain data, and back.

Containers are written as what they are; classes by their names, which are looked up among those that the live model's
code refers to, or that ``transformers`` has for results. Nothing is imported for it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch

from graphopt.capture.call.flatten import Structure, flatten
from graphopt.errors import quoted
from graphopt.ir.files.checked_json import Field
from graphopt.runtime.stored.stable_form import NoStableFormError, qualified_name

__all__ = ["read_structure", "write_structure"]

_DEEPEST = 30
_CONTAINERS: dict[str, Any] = {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}


def write_structure(structure: Structure) -> Any:
    """A structure as plain data.

    Raises:
        NoStableFormError: for what is no container of the usual kinds, and for values that are no numbers or text.
    """
    return _write(structure.restore([torch.empty(0) for known in structure.is_tensor if known]))


def _write(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": True}
    if value is None or type(value) in (bool, int, str):
        return {"value": value}
    if type(value) is float:
        return {"float": repr(value)}
    name = type(value).__name__
    if _CONTAINERS.get(name) is type(value):
        if isinstance(value, dict):
            return {name: [[_key(key), _write(item)] for key, item in value.items()]}
        return {name: [_write(item) for item in value]}
    if isinstance(value, OrderedDict) and _is_result(type(value)):
        return {"class": qualified_name(type(value)), "fields": {key: _write(item) for key, item in value.items()}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _write(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"class": qualified_name(type(value)), "fields": fields}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: Any = getattr(value, "_fields")  # noqa: B009
        fields = {key: _write(getattr(value, key)) for key in names}
        return {"class": qualified_name(type(value)), "fields": fields}
    raise NoStableFormError(f"a result of the class {qualified_name(type(value))}")


def _key(key: Any) -> Any:
    if type(key) not in (str, int):
        raise NoStableFormError(f"a key of the class {qualified_name(type(key))} in a result")
    return key


def _is_result(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "transformers" and any(b.__name__ == "ModelOutput" for b in cls.__mro__)


def read_structure(field: Field, known: Collection[str]) -> Structure:
    """The structure that ``write_structure`` described.

    Args:
        field: the data.
        known: the qualified names of the classes that the live model's code refers to.

    Raises:
        GraphoptError: for anything else, with its place.
    """
    try:
        return flatten(_read(field, known, 0))[1]
    except (TypeError, ValueError, AttributeError) as error:
        raise field.error(f"no result of a model: {quoted(error, 200)}") from error


def _read(field: Field, known: Collection[str], depth: int) -> Any:
    if depth > _DEEPEST:
        raise field.error(f"results inside of results, deeper than {_DEEPEST}")
    if "class" in field:
        cls = _class(field["class"], known)
        return cls(**{name: _read(item, known, depth + 1) for name, item in field["fields"].entries()})
    kind, value = field.only_entry()
    if kind == "tensor":
        return torch.empty(0)
    if kind == "value":
        return value.value if value.value is None or isinstance(value.value, (bool, int)) else value.text()
    if kind == "float":
        return float(value.text(longest=40))
    make = Field(kind, field.path).one_of(_CONTAINERS)
    if issubclass(make, dict):
        pairs = [list(item.items(most=2)) for item in value.items()]
        if any(len(pair) != 2 for pair in pairs):
            raise value.expected("pairs of a key and a result")
        return make((_read_key(pair[0]), _read(pair[1], known, depth + 1)) for pair in pairs)
    return make(_read(item, known, depth + 1) for item in value.items())


def _read_key(field: Field) -> str | int:
    return field.whole() if isinstance(field.value, int) else field.text()


def _class(field: Field, known: Collection[str]) -> Any:
    name = field.text(longest=400)
    module, _, own = name.rpartition(".")
    found = getattr(sys.modules.get(module), own, None)
    if not isinstance(found, type) or qualified_name(found) != name or not (name in known or _is_result(found)):
        raise field.error(f"{name!r:.120} is no class that this model's code refers to")
    if not (
        _is_result(found) or dataclasses.is_dataclass(found) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    ):
        raise field.error(f"{name!r:.120} is no class of results")
    return found
