"""Lists, dictionaries, sets and global variables that a model's Python changes while it is captured."""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.errors import GraphBreakError

__all__ = ["containers_noted", "globals_set"]

_KINDS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has, which torch changes itself."""


@contextlib.contextmanager
def containers_noted(model: nn.Module) -> Iterator[list[str]]:
    """Note which containers in modules the user's code changes, as ``path.name``, and leave nothing of the trace there.

    Gives a list that holds them behind the block. A container into which a tensor without data was put has what it had,
    and so have all where the block fails.

    Raises:
        GraphBreakError: behind the block, for tensors that forward keeps in a container.
    """
    before = [
        (f"{path}.{name}".lstrip("."), value, copy.copy(value))
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_MODULES and type(value) in _KINDS
    ]
    names: list[str] = []
    try:
        yield names
    except BaseException:
        for _, value, was in before:
            _restore(value, was)
        raise
    changed = [entry for entry in before if _identities(entry[1]) != _identities(entry[2])]
    for name, value, was in changed:
        if any(isinstance(item, torch.Tensor) and _torch.has_no_data(item) for item in _items(value)):
            _restore(value, was)
            raise GraphBreakError(
                f"forward keeps tensors in {name}, and a program cannot put them there: return them, or register them "
                "as buffers of a fixed shape"
            )
    names += [name for name, _, _ in changed]


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _identities(value: Any) -> Any:
    """What is equal for two containers with the same objects."""
    if isinstance(value, dict):
        return [(id(key), id(item)) for key, item in value.items()]
    return {id(item) for item in value} if isinstance(value, set) else [id(item) for item in value]


def _restore(value: Any, was: Any) -> None:
    if _identities(value) == _identities(was):
        return
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(was)
    else:
        value.extend(was)


def globals_set(model: nn.Module) -> list[str]:
    """The global variables that ``forward`` of a module sets, as its own code says."""
    codes = {getattr(type(module).forward, "__code__", None) for module in model.modules()}
    own = [code for code in codes if code is not None and not code.co_filename.startswith(_torch.FOLDER)]
    return sorted({f"the global variable {name}" for code in own for name in _stored(code)})


def _stored(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_GLOBAL":
            yield str(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _stored(inner)
