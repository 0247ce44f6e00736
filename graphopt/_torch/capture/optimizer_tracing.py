"""An optimizer's update: traced, without what torch wraps around ``step``, and reported to its schedulers.

``make_fx`` is public, but the switch that turns off ``__torch_function__`` under it is in ``torch._C``; the wrappers
of ``optimizer.step`` and the mark that schedulers look for are attributes without a public accessor.

Kernels for values without data that torch lacks: those of the fused updates, which write and return nothing.

Without one, torch runs the real kernel on zeros of the parameters' sizes: four times a model's memory, for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import Library
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["has_global_step_hooks", "mark_optimizer_called", "trace_update", "unwrapped_step", "without_zeros"]


def trace_update(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """Trace ``function(inputs)``, in-place ops and all, on fake tensors."""
    without_zeros()

    def quiet(flat: list[Any]) -> Any:
        with torch._C.DisableTorchFunction():  # what it would record of every attribute access is half of the time
            return function(flat)

    return make_fx(quiet, tracing_mode="fake", _allow_non_fake_inputs=False)(list(inputs))


def mark_optimizer_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that this optimizer has stepped, as ``optimizer.step()`` itself does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def unwrapped_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """``optimizer.step`` without profiler hooks and without what a scheduler wrapped around it."""
    without_zeros()
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__") and getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)


def has_global_step_hooks() -> bool:
    """Whether hooks are registered for the steps of all optimizers."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


_UPDATES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")

_library: list[Library] = []
"""The registrations, which end with this object."""


def _writes(*_: Any, **__: Any) -> None:
    """Sizes, dtypes and places of what an update writes stay as they are."""


def without_zeros() -> None:
    """Register the kernels that the installed torch lacks; once in a process."""
    if _library:
        return
    library = Library("aten", "IMPL", "Meta")
    for name in _UPDATES:
        packet = getattr(torch.ops.aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            full = name if overload == "default" else f"{name}.{overload}"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", "Meta"):
                library.impl(full, _writes)
    _library.append(library)
