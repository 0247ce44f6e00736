"""What a capture reads from a model beside the values of its tensors, as a key that can be compared.

Two calls whose keys are equal can share one program: module tree and classes, training flags, plain Python attributes
by value, parameters and buffers (presence, dtype, device, shape, strides, ``requires_grad``, sharing), hooks.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import marshal
import types
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphopt import _torch
from graphopt.capture.guards.contents import (
    DEEPEST,
    MOST_ITEMS,
    PLAIN,
    Contents,
    attributes_of,
    deeper,
    is_container,
    items_of,
    raw_bytes,
    users,
)
from graphopt.errors import CaptureError

__all__ = [
    "ModelFingerprint",
    "ModuleParts",
    "Same",
    "by_value",
    "global_flags",
    "has_hooks",
    "metadata",
    "module_parts",
    "refuse_lazy",
]

logger = logging.getLogger("graphopt")

_OF_MODULES = frozenset(vars(nn.Module()))
"""What every module has: read apart from its plain attributes."""

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)

_BY_IDENTITY = (types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.Generator, nn.Module)


def global_flags() -> tuple[Hashable, ...]:
    """The settings of torch, beside autocast, that decide which ops a call consists of and what they compute."""
    return (
        torch.get_default_dtype(),
        _torch.default_device(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        _torch.parametrizations_are_cached(),
        _torch.global_module_hooks(),
        *_torch.kernel_choices(),
    )


class Same:
    """An object by its identity, which lives as long as a key with it: another one at its address is not equal."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


def by_value(value: Any) -> Hashable:
    """A key that is equal for equal values: numbers with their type and the sign of zero, containers by what they hold.

    Functions, classes and modules count by identity, other objects and arrays by their class, identity and what they
    hold (attributes, those of a class of the user's among them, and numbers), tensors by identity and metadata.
    """
    return _Keys().of(value)


class _Keys:
    """Keys of values that belong together, each of which is read once.

    Attributes:
        modules: the modules of torch met so far.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self._known: dict[int, Hashable] = {}
        self._kept: list[Any] = []  # ids are those of living objects

    def of(self, value: Any, depth: float = 0) -> Hashable:
        """The key of a value.

        Args:
            value: anything.
            depth: of ``value`` in what the first call was given.
        """
        if isinstance(value, (float, complex)) and not isinstance(value, np.generic):
            return type(value), repr(value)
        if isinstance(value, PLAIN):
            return type(value), value.tobytes() if isinstance(value, np.generic) else value
        if isinstance(value, torch.Tensor):
            return Same(value), metadata(value)
        if isinstance(value, nn.Module):
            self.modules.append(value)
        if isinstance(value, _BY_IDENTITY) or depth >= DEEPEST:
            return type(value), Same(value)
        if id(value) not in self._known:
            self._kept.append(value)
            self._known[id(value)] = (type(value), Same(value))  # for what refers to itself
            self._known[id(value)] = self._whole(value, depth)
        return self._known[id(value)]

    def _whole(self, value: Any, depth: float) -> Hashable:
        cls: Any = type(value)
        if isinstance(value, weakref.ReferenceType):  # of which a key keeps nothing
            referent = value()
            return cls, Same(value), referent is None, hash(self._attributes(referent, depth))
        attributes = self._attributes(value, depth)
        raw = raw_bytes(value)
        if raw is not None:
            shape, dtype = getattr(value, "shape", None), str(getattr(value, "dtype", ""))
            return cls, Same(value), shape, dtype, _digest(raw), attributes
        if is_container(value) or isinstance(value, functools.partial):
            return cls, self._items(value, depth), *attributes
        items = tuple(self.of(item, depth + 1) for item in items_of(value))
        of_class = tuple(self.of(base, depth + 1) for base in users(cls))
        bases = tuple(map(Same, value.__mro__)) if isinstance(value, type) else ()
        return cls, Same(value), items, attributes, of_class, bases

    def _attributes(self, value: Any, depth: float) -> tuple[Hashable, ...]:
        return tuple((name, self.of(item, depth + 1)) for name, item in attributes_of(value).items())

    def _items(self, value: Any, depth: float) -> Hashable:
        items = items_of(value)
        if len(items) > 2 * MOST_ITEMS:
            return len(items), _digest_of_all(items)
        keys = tuple(self.of(item, deeper(depth, value, item)) for item in items)
        return frozenset(keys) if isinstance(value, (set, frozenset)) else keys


def _digest(raw: bytes) -> bytes:
    return raw if len(raw) <= 32 else hashlib.sha256(raw).digest()


def _digest_of_all(items: tuple[Any, ...]) -> Hashable:
    """One for numbers, texts and containers of these; for anything else, the identity of each."""
    try:
        return hashlib.sha256(marshal.dumps(items, 2)).digest()
    except ValueError:
        return tuple(map(Same, items))


def metadata(tensor: torch.Tensor) -> Hashable:
    """What ops may depend on of a tensor, beside its values, and whether it has hooks."""
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return tensor.dtype, tensor.device, tuple(tensor.shape), strides, tensor.requires_grad, has_hooks(tensor)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether there is a hook on the gradient of a tensor, before or behind its accumulation."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


class _Key:
    """A key that is hashed once, and equal to itself without a look at what is in it."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Hashable) -> None:
        self.value = value
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Key) and self._hash == other._hash and self.value == other.value)


class ModelFingerprint:
    """The key of a model, computed again only where something that it consists of has changed.

    A call costs a version number for each dictionary of each module, and one comparison of all tensors' metadata.

    Args:
        lasting: see ``model_key``.

    Attributes:
        changes: how often something had changed, the first call among them. As long as it stays, each parameter and
            buffer is the same object.
    """

    def __init__(self, *, lasting: bool = False) -> None:
        self._unchanged: Callable[[nn.Module], bool] = lambda model: False
        self._key: Hashable = None
        self._lasting = lasting
        self._told: set[str] = set()
        self.changes = 0

    def __call__(self, model: nn.Module) -> Hashable:
        """The key of ``model`` as it is now."""
        if not self._unchanged(model):
            self.changes += 1
            key = _Key(model_key(model, lasting=self._lasting))
            if key != self._key:  # else the same object stays, which is equal to itself at once
                self._key = key
            self._unchanged, too_large = _watch(model)
            self._tell([name for name in too_large if name not in self._told])
        return self._key

    def _tell(self, names: list[str]) -> None:
        self._told.update(names)
        if names:
            logger.warning(
                "%s: what is changed inside of %s later on is not noticed, since it is too large to be looked at on "
                "each call; a program has what is there at its capture. Set another object in its place, or register a "
                "tensor as a buffer",
                names[0].partition(".")[0],
                ", ".join(names),
            )


def model_key(model: nn.Module, *, lasting: bool = False) -> Hashable:
    """The key of a model as it is now, with the modules that it keeps in plain containers and objects.

    Args:
        model: any module.
        lasting: whether programs hold its tensors, and do not get them at each call; so they do those of modules in
            plain containers.
    """
    seen: dict[int, int] = {}
    keys = _Keys()
    found = [_module_key(module, None if lasting else seen, keys) for module in model.modules()]
    known = {id(module) for module in model.modules()}
    for kept in keys.modules:  # grows meanwhile
        for module in kept.modules():
            if id(module) not in known:
                known.add(id(module))
                found.append(_module_key(module, None, keys))
    return tuple(found)


def _module_key(module: nn.Module, seen: dict[int, int] | None, keys: _Keys) -> Hashable:
    """The key of one module; without ``seen``, which numbers tensors, these count by identity."""
    attributes = vars(module)
    refuse_lazy(module)
    plain = tuple((name, keys.of(value)) for name, value in attributes.items() if _is_plain(name))
    tensors = tuple(
        (name, None if tensor is None else (_number(tensor, seen), metadata(tensor)))
        for kind in ("_parameters", "_buffers")
        for name, tensor in attributes[kind].items()
    )
    hooks = tuple((kind, tuple(map(Same, attributes[kind].values()))) for kind in _HOOKS if attributes.get(kind))
    children = tuple((name, id(child)) for name, child in attributes["_modules"].items())
    return type(module), module.training, plain, tensors, hooks, children


def _number(tensor: torch.Tensor, seen: dict[int, int] | None) -> Hashable:
    return Same(tensor) if seen is None else seen.setdefault(id(tensor), len(seen))


def refuse_lazy(module: nn.Module) -> None:
    """Refuse parameters and buffers that get their sizes from the first batch.

    Raises:
        CaptureError: with their names, and what to do.
    """
    own = vars(module)
    lazy = [name for kind in ("_parameters", "_buffers") for name, tensor in own[kind].items() if is_lazy(tensor)]
    if lazy:
        raise CaptureError(
            f"{type(module).__name__} has no sizes yet ({', '.join(lazy)}): it gets them from the first batch\n"
            "  what to do: call the model on one, under torch.no_grad(), before graphopt gets it"
        )


@dataclass(frozen=True)
class ModuleParts:
    """What a capture reads of one module beside its class, its training flag and its children.

    Attributes:
        attributes: plain ones, by name.
        tensors: parameters and buffers by name; None for one that is not there.
        hooks: by where torch keeps them.
    """

    attributes: dict[str, Any]
    tensors: dict[str, torch.Tensor | None]
    hooks: dict[str, list[Any]]


def module_parts(module: nn.Module) -> ModuleParts:
    """The parts of a module that its key is made of, as they are."""
    own = vars(module)
    return ModuleParts(
        {name: value for name, value in own.items() if _is_plain(name)},
        {**own["_parameters"], **own["_buffers"]},
        {kind: list(own[kind].values()) for kind in _HOOKS if own.get(kind)},
    )


def _is_plain(name: str) -> bool:
    return name not in _OF_MODULES and not name.startswith("_graphopt")


def _watch(model: nn.Module) -> tuple[Callable[[nn.Module], bool], list[str]]:
    """A function that says, at little cost, whether everything that the key was made of is as it is now.

    With the names of what it does not look at, since that is too large.
    """
    modules, tensors, contents = list(model.modules()), list[torch.Tensor](), Contents()
    known = set(map(id, modules))
    for module in modules:  # grows meanwhile
        tensors += _watch_module(module, contents)
        new = [inner for kept in contents.modules for inner in kept.modules() if id(inner) not in known]
        modules += {id(inner): inner for inner in new}.values()
        known.update(map(id, new))
        contents.modules.clear()
    same_tensors = _torch.TensorsUnchanged(tensors)
    classes, same_hooks = list(map(type, modules)), _watch_hooks(modules, tensors)

    def unchanged(current: nn.Module) -> bool:
        return (
            current is model
            and same_hooks()
            and list(map(type, modules)) == classes
            and same_tensors()
            and contents.unchanged()
        )

    return unchanged, list(contents.too_large)


def _watch_hooks(modules: list[nn.Module], tensors: list[torch.Tensor]) -> Callable[[], bool]:
    """A function that says whether modules without hooks have none still, and which tensors have some."""
    added = _torch.hooks_added()
    empty = [each for module in modules for kind in _HOOKS if not (each := vars(module).get(kind))]
    with_hooks = [tensor for tensor in tensors if has_hooks(tensor)]
    without_hooks = [tensor for tensor in tensors if not has_hooks(tensor)]

    def same() -> bool:
        nonlocal added
        if (now := _torch.hooks_added()) != added:  # a call of a model with several results registers some on these
            if any(empty) or any(map(has_hooks, without_hooks)):
                return False
            added = now
        return all(map(has_hooks, with_hooks))  # no number says that one was removed

    return same


def _watch_module(module: nn.Module, contents: Contents) -> list[torch.Tensor]:
    """Note everything of one module but its children; gives its tensors."""
    attributes = vars(module)
    for entries in (attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"]):
        contents.dictionary(entries)
    for kind in _HOOKS:
        if attributes.get(kind):
            contents.dictionary(attributes[kind])
    for name, value in attributes.items():
        if _is_plain(name):
            contents.add(value, f"{type(module).__name__}.{name}")
    tensors = chain(attributes["_parameters"].values(), attributes["_buffers"].values())
    return [tensor for tensor in tensors if tensor is not None]
