"""What a model's own Python meets while it is traced: checkpointed regions that run once, and no sign of an export.

Replaces two internals of ``torch.utils.checkpoint``, and a flag of ``torch.compiler``, for as long as a model runs:
neither module offers a hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphopt._torch.versions import has_exporting_flag

__all__ = ["as_in_eager", "intercept_checkpoint"]


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    """While a model's Python runs under export, let it see that it is not compiled, so that it takes its eager paths.

    Models that ask (``torch.compiler.is_exporting``) often choose other kernels then, with other rounding.
    """
    if not has_exporting_flag():
        yield
        return
    saved = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = False
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = saved


@contextlib.contextmanager
def intercept_checkpoint(region: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """While tracing, run functions given to ``torch.utils.checkpoint`` once, inside ``region(context_fn)``.

    Patches the two internals that every variant of ``checkpoint`` ends in, so that references to ``checkpoint`` which
    user code bound earlier (``functools.partial``, ``from ... import``) are caught too.
    """
    import torch.utils.checkpoint as module

    class _Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region(None):
                return function(*args)

    def non_reentrant(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Any = module.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        with region(None if context_fn is module.noop_context_fn else context_fn):
            yield

    saved = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction = _Reentrant  # type: ignore[misc,assignment]
    module._checkpoint_without_reentrant_generator = non_reentrant  # type: ignore[assignment]
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = saved  # type: ignore[misc]
