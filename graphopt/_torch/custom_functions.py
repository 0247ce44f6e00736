"""Custom autograd functions, kept as one call so that their own backward is what gets differentiated.

``torch.autograd.Function.apply`` is replaced while a model is traced, and so is what it calls in its base class, since
a model may have taken the method before (``relu = MyReLU.apply``). A ``torch._ops.HigherOrderOperator`` stands for the
call in the graph. torch has no public hook for any of these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree

from graphopt._torch.traced_tensors import traced_node, tracing_graph
from graphopt.errors import GraphoptError

__all__ = ["apply_function", "custom_function", "intercept_custom_functions"]

_OF_GRAPHS = "AutogradFunctionApply."
"""Part of the name of the functions that stand for a user's in the graphs of Dynamo."""

_ORIGINAL_APPLY = torch.autograd.Function.__dict__["apply"]
_BASE: Any = torch.autograd.function._SingleLevelFunction
"""The class in which ``apply`` goes on; it inherits that from torch's C++."""

_passing: list[type] = []
"""Classes whose ``apply`` is on its way to the base class, where it is not to be recorded."""


def _plainly(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``cls.apply`` as torch has it."""
    depth = len(_passing)
    _passing.append(cls)
    try:
        return _ORIGINAL_APPLY.__get__(None, cls)(*args, **kwargs)
    finally:
        del _passing[depth:]


class _CustomFunction(HigherOrderOperator):
    """A call of a user's ``torch.autograd.Function`` in a forward program; the first argument is its registry key."""

    def __init__(self) -> None:
        super().__init__("graphopt_custom_function")
        self.registry: dict[str, type[torch.autograd.Function]] = {}

    def __call__(self, key: str, *args: Any) -> Any:
        return self.original(key, *args) if tracing_graph() is None else super().__call__(key, *args)

    def original(self, key: str, *args: Any) -> Any:
        """Run the user's function as autograd would, with its own forward and backward."""
        if key not in self.registry:
            raise GraphoptError(
                f"the autograd function {key!r:.100} is not known in this process: capture the program here"
            )
        return _plainly(self.registry[key], args, {})


def apply_function(cls: type[torch.autograd.Function], *args: Any) -> Any:
    """``cls.apply(*args)``, which torch leaves untyped."""
    return cls.apply(*args)


custom_function = _CustomFunction()


@custom_function.py_impl(ProxyTorchDispatchMode)
def _trace_custom_function(mode: ProxyTorchDispatchMode, key: str, *args: Any) -> Any:
    """Record the call as one node, and compute its result outside of the graph."""
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)
    name = key.rsplit(".", 1)[-1].lower()
    proxy = mode.tracer.create_proxy("call_function", custom_function, (key, *proxies), {}, name=name)
    with disable_proxy_modes_tracing():
        result = custom_function.original(key, *args)
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


@contextlib.contextmanager
def intercept_custom_functions(check: Callable[[type, tuple[Any, ...]], None]) -> Iterator[None]:
    """While tracing, record each ``torch.autograd.Function`` a model applies as one node instead of its forward's ops.

    ``check`` sees the class and the arguments first and may raise.
    """

    def is_own(cls: type) -> bool:
        return cls.__module__.split(".")[0] == "torch" and _OF_GRAPHS not in cls.__qualname__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if kwargs and not is_own(cls):  # recorded in the base class, where all arguments are positional
            return _ORIGINAL_APPLY.__get__(None, cls)(*args, **kwargs)
        if is_own(cls) or not _any_traced(args):
            return _plainly(cls, args, kwargs)
        check(cls, args)
        return custom_function(_registered(cls), *args)

    def apply_in_base(cls: type, *args: Any) -> Any:
        if _passing and _passing[-1] is cls:
            _passing[-1] = object  # what its forward applies is not on its way
        elif not is_own(cls) and _any_traced(args):
            check(cls, args)
            return custom_function(_registered(cls), *args)
        return super(_BASE, cls).apply(*args)  # type: ignore[misc]

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    _BASE.apply = classmethod(apply_in_base)
    try:
        yield
    finally:
        torch.autograd.Function.apply = _ORIGINAL_APPLY  # type: ignore[method-assign]
        del _BASE.apply


def _any_traced(args: tuple[Any, ...]) -> bool:
    """Whether a node of the graph under construction stands for one of the arguments."""
    return any(isinstance(arg, torch.Tensor) and traced_node(arg) is not None for arg in args)


def _registered(cls: type[torch.autograd.Function]) -> str:
    """The key under which a class is in the registry, where it is put; other classes of its name get numbers."""
    registry = custom_function.registry
    key = f"{cls.__module__}.{cls.__qualname__}"
    known = registry.get(key)
    if known is not None and known is not cls:
        same = [name for name in registry if name.split("#")[0] == key]
        key = next((name for name in same if registry[name] is cls), f"{key}#{len(same)}")
    registry[key] = cls
    return key
