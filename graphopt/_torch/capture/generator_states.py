"""Random ops that hand over a generator's state, and the rules for tracing them that torch lacks.

``torch._prims.rng_prims`` has the ops that replay a random-number generator inside a graph; there is no public one.
Rules go into the ops' own tables and into that of ``torch._higher_order_ops``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._C import DispatchKey
from torch._guards import detect_fake_mode
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree

__all__ = ["run_and_save_rng_state", "run_with_rng_state", "traceable_generator_states"]

_CUDA_STATE_BYTES = 16
"""Bytes of the state of a CUDA generator: its seed and its offset, eight each."""


def _has_functional_rule(op: Any) -> bool:
    """Whether a release of torch has its own rule for an op in a functional graph."""
    by_key = any(getattr(key, "__name__", "") == "Functionalize" for key in op.py_kernels)
    return by_key or FunctionalTensorMode in op.python_key_table


if not _has_functional_rule(run_and_save_rng_state):
    # torch registers this for run_with_rng_state alone; inductor needs both.
    @run_and_save_rng_state.py_functionalize_impl
    def _functional_run_and_save(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        plain_args, plain_kwargs = context.unwrap_tensors((args, kwargs))
        with context.redispatch_to_next():
            return context.wrap_tensors(run_and_save_rng_state(op, *plain_args, **plain_kwargs))


def _drawn_on(args: Any, kwargs: Any) -> torch.device:
    """The device whose generator a random op draws from: that of its ``device``, else of its first tensor."""
    named = kwargs.get("device")
    if named is not None:
        return torch.device(named)
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _on_own_device(kernel: Callable[..., Any], first: int) -> Callable[..., Any]:
    """A kernel that saves or replays a state of the generator that its op draws from.

    torch's kernels for CUDA read and set the generator of the current device, whatever device the tensors are on: a
    program on ``cuda:1`` would recompute another dropout than the one that it ran.

    Args:
        kernel: torch's.
        first: where the arguments of the random op begin, behind the op and, in a replay, the state.
    """

    @wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = _drawn_on(args[first:], kwargs)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return kernel(*args, **kwargs)

    return call


def _guard_devices() -> None:
    for op, first in ((run_and_save_rng_state, 1), (run_with_rng_state, 2)):
        for key in (DispatchKey.CUDA, DispatchKey.BackendSelect):
            op.py_kernels[key] = _on_own_device(op.py_kernels[key], first)
        op._dispatch_cache.clear()


_guard_devices()


@contextlib.contextmanager
def traceable_generator_states() -> Iterator[None]:
    """While inductor traces a program again, let saved generator states be example values.

    torch's own rule for tracing the op returns the machine's real state, which does not mix with example values.
    """
    cache = run_and_save_rng_state._dispatch_cache
    try:
        with (
            _replaced(registered_hop_fake_fns, run_and_save_rng_state, _example_state),
            _replaced(run_and_save_rng_state.python_key_table, ProxyTorchDispatchMode, _trace_example_state),
        ):
            cache.clear()
            yield
    finally:
        cache.clear()


@contextlib.contextmanager
def _replaced(table: Any, key: Any, rule: Any) -> Iterator[None]:
    """While it is active, ``table[key]`` is ``rule``."""
    saved = table.get(key)
    table[key] = rule
    try:
        yield
    finally:
        if saved is None:
            del table[key]
        else:
            table[key] = saved


def _example_state(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A generator state without data, as large as that of the device which ``op`` draws on, and the op's result."""
    size = _CUDA_STATE_BYTES if _drawn_on(args, kwargs).type == "cuda" else torch.get_rng_state().numel()
    return torch.empty(size, dtype=torch.uint8), op(*args, **kwargs)


def _trace_example_state(mode: ProxyTorchDispatchMode, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Record the op as a node whose results are example values."""
    fake = detect_fake_mode((args, kwargs))
    with fake if fake is not None else contextlib.nullcontext():
        result = _example_state(op, *args, **kwargs)
    proxy_args, proxy_kwargs = pytree.tree_map(mode.tracer.unwrap_proxy, ((op, *args), kwargs))
    proxy = mode.tracer.create_proxy("call_function", run_and_save_rng_state, proxy_args, proxy_kwargs)
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)
