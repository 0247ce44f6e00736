"""What a capture reads from a model beside the values of its tensors, as a key that can be compared.

Two calls whose keys are equal can share one program: module tree and classes, training flags, plain Python attributes
by value, parameters and buffers (presence, dtype, device, shape, strides, ``requires_grad``, sharing), hooks.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from graphopt import _torch
from graphopt.errors import CaptureError

__all__ = [
    "DEEPEST",
    "MOST_ITEMS",
    "ModelFingerprint",
    "ModuleParts",
    "Same",
    "by_value",
    "global_flags",
    "metadata",
    "module_parts",
    "refuse_lazy",
]

DEEPEST = 6
"""How deep containers in containers are compared."""

MOST_ITEMS = 2_000
"""Items of a container that are compared one by one; a larger one counts by its identity and length."""

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

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_BY_IDENTITY = (*_FUNCTIONS, types.ModuleType, type, torch.Generator)


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


def by_value(value: Any, known: dict[int, Hashable] | None = None, depth: int = 0) -> Hashable:
    """A key that is equal for equal values: numbers with their type and the sign of zero, containers by what they hold.

    Functions, classes and modules count by identity, other objects by their class, identity and attributes, tensors by
    identity and metadata.

    Args:
        value: anything.
        known: the keys of objects and containers met before, by their ids, so that a shared one is read once.
        depth: of ``value`` in what the first call was given.
    """
    if value is None or isinstance(value, (bool, int, str, bytes, torch.dtype, torch.device, torch.Size)):
        return type(value), value
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, torch.Tensor):
        return Same(value), metadata(value)
    if isinstance(value, (*_BY_IDENTITY, nn.Module)) or depth >= DEEPEST:
        return type(value), Same(value)
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = (type(value), Same(value))  # for what refers to itself
        known[id(value)] = _container(value, known, depth)
    return known[id(value)]


def _container(value: Any, known: dict[int, Hashable], depth: int) -> Hashable:
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        if len(value) > MOST_ITEMS:
            return type(value), Same(value), len(value)
        if isinstance(value, Mapping):
            pairs = ((by_value(key, known, depth + 1), by_value(item, known, depth + 1)) for key, item in value.items())
            return type(value), tuple(pairs)
        items = (by_value(item, known, depth + 1) for item in value)
        return type(value), frozenset(items) if isinstance(value, (set, frozenset)) else tuple(items)
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return type(value), Same(value)
    return type(value), Same(value), _container(attributes, known, depth + 1)


def metadata(tensor: torch.Tensor) -> Hashable:
    """What ops may depend on of a tensor, beside its values, and whether it has hooks."""
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    hooked = bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
    return tensor.dtype, tensor.device, tuple(tensor.shape), strides, tensor.requires_grad, hooked


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

    Attributes:
        changes: how often something had changed, the first call among them. As long as it stays, each parameter and
            buffer is the same object.
    """

    def __init__(self) -> None:
        self._unchanged: Callable[[nn.Module], bool] = lambda model: False
        self._key: Hashable = None
        self.changes = 0

    def __call__(self, model: nn.Module) -> Hashable:
        """The key of ``model`` as it is now."""
        if not self._unchanged(model):
            self.changes += 1
            key = _Key(model_key(model))
            if key != self._key:  # else the same object stays, which is equal to itself at once
                self._key = key
            self._unchanged = _watch(model)
        return self._key


def model_key(model: nn.Module) -> Hashable:
    """The key of a model as it is now."""
    seen: dict[int, int] = {}
    known: dict[int, Hashable] = {}
    return tuple(_module_key(module, seen, known) for module in model.modules())


def _module_key(module: nn.Module, seen: dict[int, int], known: dict[int, Hashable]) -> Hashable:
    attributes = vars(module)
    refuse_lazy(module)
    plain = tuple((name, by_value(value, known)) for name, value in attributes.items() if _is_plain(name))
    tensors = tuple(
        (name, None if tensor is None else (seen.setdefault(id(tensor), len(seen)), metadata(tensor)))
        for kind in ("_parameters", "_buffers")
        for name, tensor in attributes[kind].items()
    )
    hooks = tuple((kind, tuple(map(Same, attributes[kind].values()))) for kind in _HOOKS if attributes.get(kind))
    children = tuple((name, id(child)) for name, child in attributes["_modules"].items())
    return type(module), module.training, plain, tensors, hooks, children


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


def _watch(model: nn.Module) -> Callable[[nn.Module], bool]:
    """A function that says, at little cost, whether everything that the key was made of is as it is now."""
    found = _Watched()
    for module in model.modules():
        found.add(module)
    same_tensors = _torch.TensorsUnchanged(found.tensors)
    versions, contents = list(map(_torch.dict_version, found.dictionaries)), [by_value(item) for item in found.others]
    hooks = _torch.hooks_added()

    def unchanged(current: nn.Module) -> bool:
        return (
            current is model
            and _torch.hooks_added() == hooks
            and list(map(_torch.dict_version, found.dictionaries)) == versions
            and same_tensors()
            and (not contents or [by_value(item) for item in found.others] == contents)
        )

    return unchanged


class _Watched:
    """What a model consists of: its dictionaries, tensors, and the lists and sets in plain attributes."""

    def __init__(self) -> None:
        self.dictionaries: list[dict[Any, Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._seen: set[int] = set()

    def add(self, module: nn.Module) -> None:
        """Everything of one module but its children."""
        attributes = vars(module)
        self.dictionaries += [attributes, attributes["_parameters"], attributes["_buffers"], attributes["_modules"]]
        self.dictionaries += [attributes[kind] for kind in _HOOKS if attributes.get(kind)]
        tensors = chain(attributes["_parameters"].values(), attributes["_buffers"].values())
        self.tensors += [tensor for tensor in tensors if tensor is not None]
        for name, value in attributes.items():
            if _is_plain(name):
                self._attribute(value, 0)

    def _attribute(self, value: Any, depth: int) -> None:
        plain = (*_BY_IDENTITY, nn.Module, torch.Tensor, str, bytes, int, float, bool, type(None))
        if depth >= DEEPEST or isinstance(value, plain) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (list, set)):
            self.others.append(value)
            return
        content: Any = value if isinstance(value, (dict, tuple, frozenset)) else getattr(value, "__dict__", None)
        if isinstance(content, dict):
            self.dictionaries.append(content)
            content = list(content.values())
        for item in content or ():
            self._attribute(item, depth + 1)
