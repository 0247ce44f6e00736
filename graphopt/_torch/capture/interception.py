"""What a model's own Python meets while it is traced: checkpointed regions that run once, and no sign of an export.

Replaces two internals of ``torch.utils.checkpoint``, a flag of ``torch.compiler``, the cache of
``torch.nn.utils.parametrize``, and what sets modes aside in ``torch._higher_order_ops.utils``, for as long as a model
runs: none of the modules offers a hook.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from graphopt._torch.private_names import CHECKPOINTS, require
from graphopt._torch.versions import checkpoint_generator, has_flag

__all__ = [
    "as_in_eager",
    "hooks_of_users_modules",
    "intercept_checkpoint",
    "parametrizations_are_cached",
    "parametrized_apart",
    "set_aside_in_bodies",
]


def parametrizations_are_cached() -> bool:
    """Whether ``torch.nn.utils.parametrize.cached()`` is at work: what is parametrized is computed once within it."""
    return parametrize._cache_enabled > 0


@contextlib.contextmanager
def parametrized_apart() -> Iterator[None]:
    """While a model is traced, keep its parametrized tensors, which have no data, out of the caller's cache."""
    saved: Any = parametrize._cache_enabled, parametrize._cache
    parametrize._cache = {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = saved


_TRACERS = ("graphopt.", "torch._dynamo.", "torch._export.", "torch._functorch.", "torch.export.")


@contextlib.contextmanager
def hooks_of_users_modules(apart: torch.nn.Module | None = None) -> Iterator[None]:
    """While a model is traced, hooks of all modules act on the user's modules, and on none that the trace is made of.

    Args:
        apart: a module for which they act around the trace.
    """

    def kept_to_users(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(module: torch.nn.Module, *rest: Any) -> Any:
            of_user = module is not apart and not type(module).__module__.startswith(_TRACERS)
            return hook(module, *rest) if of_user else None

        return call

    modules: Any = importlib.import_module("torch.nn.modules.module")
    tables = modules._global_forward_pre_hooks, modules._global_forward_hooks
    saved = [dict(table) for table in tables]
    for table in tables:
        table.update({number: kept_to_users(hook) for number, hook in table.items()})
    try:
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update({number: hook for number, hook in hooks.items() if number in table})


@contextlib.contextmanager
def set_aside_in_bodies(mode: TorchFunctionMode) -> Iterator[None]:
    """While the block runs, take a mode out of the stack where torch traces the bodies of ``cond`` and its like.

    Torch has Dynamo do that, which knows torch's modes only, and sets those aside that a trace is made with.
    """
    utils: Any = importlib.import_module("torch._higher_order_ops.utils")
    name = "_temp_remove_metadata_torch_function_mode"
    original = getattr(utils, name, None)
    if original is None:  # another torch, whose message then names Dynamo
        yield
        return

    @contextlib.contextmanager
    def removing() -> Iterator[Any]:
        found = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # the innermost first
        for each in reversed([each for each in found if each is not mode]):
            _push_mode(each)
        try:
            with original() as removed:
                yield removed
        finally:
            for _ in range(torch._C._len_torch_function_stack()):
                _pop_mode()
            for each in reversed(found):
                _push_mode(each)

    setattr(utils, name, removing)
    try:
        yield
    finally:
        setattr(utils, name, original)


@contextlib.contextmanager
def as_in_eager(*, compiling: bool) -> Iterator[None]:
    """While a model's Python runs under export, let it see that it is not exported, so that it takes its eager paths.

    Models that ask (``torch.compiler.is_exporting``) often choose other kernels then, with other rounding.

    Args:
        compiling: whether it sees that it is compiled (``torch.compiler.is_compiling``), which keeps it from reading
            values.
    """
    flags = ["_is_exporting_flag"] if compiling else ["_is_exporting_flag", "_is_compiling_flag"]
    saved = {flag: getattr(torch.compiler, flag) for flag in flags if has_flag(flag)}
    for flag in saved:
        setattr(torch.compiler, flag, False)
    try:
        yield
    finally:
        for flag, value in saved.items():
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def as_seen_by_a_trace(*, compiling: bool, exporting: bool) -> Iterator[None]:
    """While a model's Python runs under a trace that is none of ``torch.export``, let it see what it would see there.

    Args:
        compiling: whether it sees that it is compiled.
        exporting: whether it sees that it is exported.
    """
    seen = {"_is_exporting_flag": exporting, "_is_compiling_flag": compiling}
    saved = {flag: getattr(torch.compiler, flag) for flag in seen if has_flag(flag)}
    for flag in saved:
        setattr(torch.compiler, flag, seen[flag])
    try:
        yield
    finally:
        for flag, value in saved.items():
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def intercept_checkpoint(region: Callable[[Any, bool], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """While tracing, run functions given to ``torch.utils.checkpoint`` once, inside ``region(context_fn, preserve)``.

    ``preserve`` says whether eager mode draws the random numbers of the first run in the second one too.

    Patches the two internals that every variant of ``checkpoint`` ends in, so that references to ``checkpoint`` which
    user code bound earlier (``functools.partial``, ``from ... import``) are caught too.
    """
    import torch.utils.checkpoint as module

    class _Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            # Reentrant autograd knows its arguments only: where none of them has a gradient, nothing inside gets one.
            reached = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with contextlib.nullcontext() if reached else torch.no_grad(), region(None, preserve):
                return function(*args)

    require(CHECKPOINTS)
    name = checkpoint_generator(module)
    saved = module.CheckpointFunction, getattr(module, name)
    signature = inspect.signature(saved[1])

    @functools.wraps(saved[1])  # so that an interception inside of this one finds the parameters too
    def non_reentrant(*args: Any, **kwargs: Any) -> Iterator[None]:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        context_fn, preserve = given.arguments["context_fn"], given.arguments["preserve_rng_state"]
        with region(None if context_fn is module.noop_context_fn else context_fn, preserve):
            yield

    module.CheckpointFunction = _Reentrant  # type: ignore[misc,assignment]
    setattr(module, name, non_reentrant)
    try:
        yield
    finally:
        module.CheckpointFunction = saved[0]  # type: ignore[misc]
        setattr(module, name, saved[1])
