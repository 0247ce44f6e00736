"""Python values in a form that is the same in every process: names, numbers and what containers hold, no identities.

What has no such form (a lock, an open file, a generator) raises ``NoStableFormError``: what depends on it is not kept.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import json
import logging
import pathlib
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from graphopt import _torch

__all__ = ["COMPARED_BY", "NoStableFormError", "StableForms", "code_digest", "digest", "qualified_name"]

_DEEPEST = 40
_LARGEST_TENSOR = 16 * 1024 * 1024
"""Bytes of a tensor that counts by its values."""

_PRINTED = (
    types.GenericAlias,
    types.UnionType,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
    torch.finfo,
    torch.iinfo,
    np.dtype,
    np.generic,
    pathlib.PurePath,
    range,
    slice,
    types.EllipsisType,
    _torch.OpOverload,
    _torch.OpOverloadPacket,
)
"""Values that are told apart by what they print as."""

Form = Any
"""What JSON can hold."""


class NoStableFormError(Exception):
    """A value that cannot be compared with one of another process."""


def digest(form: Form) -> str:
    """64 letters that stand for a form."""
    text = json.dumps(form, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def qualified_name(value: Any) -> str:
    """``module.name`` of a class or a function."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def code_digest(code: types.CodeType) -> str:
    """What a piece of Python does, whatever file and lines it stands in."""
    constants = [code_digest(item) if isinstance(item, types.CodeType) else _constant(item) for item in code.co_consts]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    counts = [code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags]
    return digest([code.co_name, code.co_code.hex(), constants, names, counts])


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else f"{type(value).__name__} {value!r}"


COMPARED_BY = "_graphopt_compared_by"
"""A method of objects much of which a capture does not depend on: it gives what it does depend on, or None for all."""


_HASH = "_original_object_hash"
"""Where configurations of ``transformers`` note what ``hash`` gave of their text: another number in each process."""


class StableForms:
    """Makes forms of values that belong together; containers and objects stand as digests of what they hold.

    Args:
        modules: the modules of the model by their ids, as paths: they count by these.
        meet: is told of every function and class on the way, whose code decides what they do.
    """

    def __init__(self, modules: Mapping[int, str], meet: Callable[[Any], None] = lambda met: None) -> None:
        self._modules = modules
        self._meet = meet
        self._known: dict[int, str] = {}
        self._kept: list[Any] = []  # ids are those of living objects

    def form(self, value: Any, depth: int = 0) -> Form:
        """The form of a value.

        Raises:
            NoStableFormError: where it has none, or holds what has none.
        """
        if value is None or (isinstance(value, (bool, int, str)) and type(value) in (bool, int, str)):
            return value if not isinstance(value, int) or isinstance(value, bool) else ["int", str(value)]
        if type(value) in (float, complex, bytes, bytearray):
            return [type(value).__name__, repr(value)]
        if isinstance(value, _PRINTED) or type(value).__module__ == "typing":
            return [qualified_name(type(value)), str(value)]
        if isinstance(value, enum.Enum):
            return ["enum", qualified_name(type(value)), value.name]
        if depth > _DEEPEST:
            raise NoStableFormError("something nested too deeply")
        if id(value) not in self._known:
            self._known[id(value)] = "circle"  # for what refers to itself
            self._kept.append(value)
            self._known[id(value)] = digest(self._whole(value, depth + 1))
        return ["digest", self._known[id(value)]]

    def _whole(self, value: Any, depth: int) -> Form:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return ["module", self._modules[id(value)]]
        parts = self._parts_of_optimized(value)
        if parts:
            return ["optimized", parts]
        callable_form = self._callable(value, depth)
        if callable_form is not None:
            return callable_form
        if isinstance(value, (list, tuple, set, frozenset, Mapping, collections.deque)):
            return [qualified_name(type(value)), *self._items(value, depth)]
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ["array", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, re.Pattern):
            return ["pattern", value.pattern, value.flags]
        return self._object(value, depth)

    def _parts_of_optimized(self, value: Any) -> list[Form]:
        """The paths of the parts of the model as it runs for its user (``optimize``); none for another model."""
        if not isinstance(value, nn.Module) or not hasattr(type(value), "_graphopt"):
            return []
        parts = {name: self._modules.get(id(part)) for name, part in value.named_children()}
        return [] if None in parts.values() else [[name, path] for name, path in parts.items()]

    def _items(self, value: Any, depth: int) -> list[Form]:
        if isinstance(value, Mapping):
            return [[self.form(key, depth), self.form(item, depth)] for key, item in value.items()]
        items = [self.form(item, depth) for item in value]
        return sorted(items, key=digest) if isinstance(value, (set, frozenset)) else items

    def _tensor(self, value: torch.Tensor) -> Form:
        if isinstance(value, nn.Parameter) or value.layout is not torch.strided or value.device.type == "meta":
            raise NoStableFormError("a parameter, or a tensor without data, that is kept outside of the model")
        if value.numel() * value.element_size() > _LARGEST_TENSOR:
            raise NoStableFormError("a tensor above 16 MB that is kept outside of the model's buffers")
        raw = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        known = [str(value.dtype), str(value.device), list(value.shape), list(value.stride()), value.requires_grad]
        return ["tensor", *known, hashlib.sha256(raw).hexdigest()]

    def _callable(self, value: Any, depth: int) -> Form | None:
        """The form of a function, a class or a module of Python; None for anything else."""
        if isinstance(value, types.ModuleType):
            return ["python module", value.__name__]
        if isinstance(value, type):
            self._meet(value)
            return ["class", qualified_name(value)]
        if isinstance(value, types.FunctionType):
            return self._function(value, depth)
        if isinstance(value, types.MethodType):
            return ["method", self.form(value.__func__, depth), self.form(value.__self__, depth)]
        if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
            owner = getattr(value, "__self__", None)
            of = None if owner is None or isinstance(owner, types.ModuleType) else self.form(owner, depth)
            return ["built in", qualified_name(value), of]
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return ["partial", *(self.form(part, depth) for part in parts)]
        return None

    def _function(self, value: types.FunctionType, depth: int) -> Form:
        self._meet(value)
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                cells.append([name])
                continue
            cells.append([name, self._named(content, depth, f"{name!r}, which {value.__qualname__} uses")])
        defaults = self._named([value.__defaults__, value.__kwdefaults__], depth, f"a default of {value.__qualname__}")
        return ["function", qualified_name(value), code_digest(value.__code__), defaults, cells]

    def _object(self, value: Any, depth: int) -> Form:
        """An object by its class and its attributes.

        Raises:
            NoStableFormError: for one that keeps its state elsewhere.
        """
        cls = type(value)
        parts = getattr(cls, COMPARED_BY, lambda _: None)(value)
        if parts is not None:
            self._meet(cls)
            return ["object", qualified_name(cls), self._named(parts, depth, f".{COMPARED_BY}")]
        slots = [name for base in cls.__mro__ for name in _slots(base) if hasattr(value, name)]
        attributes = getattr(value, "__dict__", None)
        if (attributes is None and not slots) or isinstance(value, (torch.Generator, BaseException)):
            raise NoStableFormError(f"an object of the class {qualified_name(cls)}, which cannot be compared")
        self._meet(cls)
        contents = {**(attributes or {}), **{name: getattr(value, name) for name in slots}}
        return [
            "object",
            qualified_name(cls),
            [[str(name), self._named(item, depth, f".{name}")] for name, item in contents.items() if name != _HASH],
        ]

    def _named(self, value: Any, depth: int, name: str) -> Form:
        try:
            return self.form(value, depth)
        except NoStableFormError as error:
            raise NoStableFormError(f"{error}, in {name}" if len(str(error)) < 300 else str(error)) from None


def _slots(cls: type) -> list[str]:
    slots = cast(Any, vars(cls).get("__slots__", ()))
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
