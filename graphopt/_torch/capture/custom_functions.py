"""Custom autograd functions, kept as one call so that their own backward is what gets differentiated.

``torch.autograd.Function.apply`` is replaced while a model is traced. A model may have taken the method before
(``relu = MyReLU.apply``), so what it goes on to is replaced too: ``apply`` of its base class up to torch 2.13; from
2.14 on, where ``apply`` is one of torch's C++, the ``forward`` of each class. A ``torch._ops.HigherOrderOperator``
stands for the call in the graph. torch has no public hook for any of these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree

from graphopt._torch.capture.traced_tensors import traced_node, tracing_graph
from graphopt.errors import GraphoptError

__all__ = ["apply_function", "custom_function", "intercept_custom_functions", "region_of", "traced_as_one"]

_OF_GRAPHS = "AutogradFunctionApply."
"""Part of the name of the functions that stand for a user's in the graphs of Dynamo."""

_ORIGINAL_APPLY = torch.autograd.Function.__dict__["apply"]
_BASE: Any = torch.autograd.function._SingleLevelFunction
"""The class in which ``apply`` goes on; it inherits that from torch's C++."""

_IN_PYTHON = isinstance(_ORIGINAL_APPLY, classmethod)
"""Whether ``apply`` goes on in its base class."""

_passing: list[type] = []
"""Classes whose ``apply`` is on its way to the base class, or to ``forward``, where it is not to be recorded."""

_begun: list[Callable[..., Any]] = []
"""``forward`` of a call that C++ has begun: with the context whose gradient function its results get."""


def _plainly(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``cls.apply`` as torch has it."""
    depth = len(_passing)
    _passing.append(cls)
    try:
        return _ORIGINAL_APPLY.__get__(None, cls)(*args, **kwargs)
    finally:
        del _passing[depth:]


class _CustomFunction(HigherOrderOperator):
    """A call of a user's ``torch.autograd.Function`` in a forward program; the first argument is its registry key.

    So is one of Python code whose ops a forward program cannot have (``traced_as_one``).
    """

    def __init__(self) -> None:
        super().__init__("graphopt_custom_function")
        self.registry: dict[str, type[torch.autograd.Function]] = {}
        self.regions: weakref.WeakValueDictionary[str, Callable[..., Any]] = weakref.WeakValueDictionary()

    def __call__(self, key: str, *args: Any) -> Any:
        return self.original(key, *args) if tracing_graph() is None else super().__call__(key, *args)

    def original(self, key: str, *args: Any) -> Any:
        """Run the user's function as autograd would, with its own forward and backward."""
        if _begun:
            return _begun.pop()(*args)
        region = self.regions.get(key)
        if region is not None:
            return region(*args)
        if key not in self.registry:
            raise GraphoptError(
                f"the autograd function {key!r:.100} is not known in this process: capture the program here"
            )
        return _plainly(self.registry[key], args, {})


def apply_function(cls: type[torch.autograd.Function], *args: Any) -> Any:
    """``cls.apply(*args)``, which torch leaves untyped."""
    return cls.apply(*args)


custom_function = _CustomFunction()
_numbers = itertools.count()


def traced_as_one(region: Callable[..., Any], name: str, *tensors: torch.Tensor) -> Any:
    """Call Python code as one node of the forward program under trace, without one as it is.

    Autograd goes through what it does where the program is differentiated; nothing else sees that before.

    Args:
        region: called with tensors; as long as something else holds it, programs can call it.
        name: of the node, for people.
        tensors: all that it reads.
    """
    known = custom_function.regions
    key = next((key for key, found in known.items() if found is region), None) or f"{name}#{next(_numbers)}"
    known[key] = region
    return custom_function(key, *tensors)


def region_of(key: str) -> Callable[..., Any] | None:
    """The code that ``traced_as_one`` has put under a key; None for an autograd function."""
    return custom_function.regions.get(key)


@custom_function.py_impl(ProxyTorchDispatchMode)
def _trace_custom_function(mode: ProxyTorchDispatchMode, key: str, *args: Any) -> Any:
    """Record the call as one node, and compute its result outside of the graph."""
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)
    name = key.split("#")[0].rsplit(".", 1)[-1].lower()
    proxy = mode.tracer.create_proxy("call_function", custom_function, (key, *proxies), {}, name=name)
    with disable_proxy_modes_tracing():
        result = custom_function.original(key, *args)
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


@contextlib.contextmanager
def intercept_custom_functions(check: Callable[[type, tuple[Any, ...]], None]) -> Iterator[None]:
    """While tracing, record each ``torch.autograd.Function`` a model applies as one node instead of its forward's ops.

    ``check`` sees the class and the arguments first and may raise.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if kwargs and not _is_own(cls):  # recorded where it goes on, and all arguments are positional
            return _ORIGINAL_APPLY.__get__(None, cls)(*args, **kwargs)
        if _is_own(cls) or not _any_traced(args):
            return _plainly(cls, args, kwargs)
        check(cls, args)
        return custom_function(_registered(cls), *args)

    def apply_in_base(cls: type, *args: Any) -> Any:
        if _passing and _passing[-1] is cls:
            _passing[-1] = object  # what its forward applies is not on its way
        elif not _is_own(cls) and _any_traced(args):
            check(cls, args)
            return custom_function(_registered(cls), *args)
        return super(_BASE, cls).apply(*args)  # type: ignore[misc]

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        if _IN_PYTHON:
            _BASE.apply = classmethod(apply_in_base)
            yield
        else:
            with _forwards_recorded(check):
                yield
    finally:
        torch.autograd.Function.apply = _ORIGINAL_APPLY  # type: ignore[method-assign]
        if _IN_PYTHON:
            del _BASE.apply


def _is_own(cls: type) -> bool:
    """Whether a class is torch's, and none of those that Dynamo makes of a user's."""
    return cls.__module__.split(".")[0] == "torch" and _OF_GRAPHS not in cls.__qualname__


@contextlib.contextmanager
def _forwards_recorded(check: Callable[[type, tuple[Any, ...]], None]) -> Iterator[None]:
    """Record calls of ``apply`` of C++ where they come to the ``forward`` of their class."""
    classes = [cls for cls in _subclasses(torch.autograd.Function) if not _is_own(cls)]
    before = [(cls, vars(cls).get("forward"), cls.forward) for cls in classes]
    try:
        for cls, _, forward in before:
            cls.forward = staticmethod(_recording(cls, forward, check))
        yield
    finally:
        for cls, own, _ in before:
            if own is not None:
                cls.forward = own
            elif "forward" in vars(cls):
                del cls.forward


def _subclasses(cls: Any) -> list[Any]:
    """Every class below one, each once."""
    found: dict[Any, None] = {}
    waiting = list(cls.__subclasses__())
    while waiting:
        current = waiting.pop()
        if current not in found:
            found[current] = None
            waiting += current.__subclasses__()
    return list(found)


def _recording(cls: Any, forward: Any, check: Callable[[type, tuple[Any, ...]], None]) -> Callable[..., Any]:
    """``forward`` of a class for the time of a trace.

    Not recorded is a call of ``apply`` that came by ``_plainly``, and one of ``forward`` itself, which eager mode
    differentiates like other code.
    """
    contexts = 1 if cls.setup_context == _BASE.setup_context else 0

    @functools.wraps(forward)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        context, given = args[:contexts], args[contexts:]
        if _passing and _passing[-1] is cls:
            _passing[-1] = object
            return forward(*args, **kwargs)
        direct = torch.is_grad_enabled() or not all(isinstance(each, cls._backward_cls) for each in context)
        if direct or not _any_traced((*given, *kwargs.values())):
            return forward(*args, **kwargs)
        if kwargs:
            given = inspect.signature(forward).bind(*args, **kwargs).args[contexts:]
        check(cls, given)
        depth = len(_begun)
        _begun.append(lambda *values: _apart(forward(*context, *values), values, context))
        try:
            return custom_function(_registered(cls), *given)
        finally:
            del _begun[depth:]  # where it failed before it came to that

    return recorded


def _apart(results: Any, given: tuple[Any, ...], context: tuple[Any, ...]) -> Any:
    """Results of ``forward``; arguments among them as views, which autograd would make behind the recorded call."""
    written = {id(tensor) for each in context for tensor in each.dirty_tensors or ()}
    returned = {id(value) for value in given if isinstance(value, torch.Tensor)} - written
    return pytree.tree_map(lambda result: result.view_as(result) if id(result) in returned else result, results)


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
