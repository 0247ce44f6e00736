"""Running generated Python without data: what code allocates and frees, by running it on example values.

Generated code, FX's and inductor's alike, is straight-line Python whose names stand for ops, kernels and allocations.
Here these names stand for their counterparts on example values, so that no kernel runs, while Python's own references
decide when memory is freed, as they do in earnest.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.workspace import measured_usage
from graphopt.ir.node import value_of
from graphopt.ir.ops.values import tensors_of

__all__ = ["Ledger", "Temporaries", "dry_generated", "dry_inductor"]

_BLOCK = {"cuda": 512}
"""Allocation granularity in bytes, by device type."""


class Temporaries:
    """Bytes that ops take for themselves while they run, as measured for the calls of a program.

    Args:
        nodes: calls; others are left out.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._known: dict[tuple[str, int], int] = {}
        self._most: dict[str, int] = {}
        calls = [node for node in nodes if node.op == "call_function"]
        for node, usage in zip(calls, measured_usage(calls), strict=True):
            op, size = _random_op(node), _size(value_of(node))
            self._known[op, size] = max(self._known.get((op, size), 0), usage.temporary)
            self._most[op] = max(self._most.get(op, 0), usage.temporary)

    def of(self, op: str, result: Any) -> int:
        """For a call with a result of this size; where no such call is known, the most that the op takes."""
        return self._known.get((op, _size(result)), self._most.get(op, 0)) if op in self._most else 0


def _size(result: Any) -> int:
    """Elements of what a call returns; a generator state that comes with it is left out."""
    return sum(_torch.size_hint(t.numel()) for t in tensors_of(result) if t.dtype is not torch.uint8)


class Ledger:
    """Counts the bytes of the storages of example values while these live.

    Attributes:
        alive: bytes at the moment; negative where more was freed of what was there before.
        peak: the most bytes alive since it was last set.

    Args:
        temporaries: what ops take for themselves while they run.
    """

    def __init__(self, temporaries: Temporaries) -> None:
        self.alive = 0
        self.peak = 0
        self._temporaries = temporaries
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def account(self, op: str, result: Any) -> Any:
        """Count what an op returned, and what it took while it ran; returns the result."""
        self.hold(result)
        self.peak = max(self.peak, self.alive + self._temporaries.of(op, result))
        return result

    def hold(self, values: Any, *, counted: bool = True) -> None:
        """Follow the storages of tensors until the last tensor of each is gone.

        Args:
            values: a tensor, or tensors and other things in lists and tuples.
            counted: whether they add to ``alive``; what was there before does not.
        """
        for tensor in tensors_of(values):
            key = _torch.storage_key(tensor)
            if key not in self._users:
                self._users[key] = 0
                self._sizes[key] = _bytes(tensor)
                self.alive += self._sizes[key] if counted else 0
            self._users[key] += 1
            weakref.finalize(tensor, self._drop, key)

    def _drop(self, key: int) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self.alive -= self._sizes.pop(key)


def _bytes(tensor: torch.Tensor) -> int:
    size = _torch.size_hint(tensor.untyped_storage().nbytes())
    block = _BLOCK.get(tensor.device.type)
    return -(-size // block) * block if block else size


def _random_op(node: fx.Node) -> str:
    """The name of a call's op; of the op inside where its generator's state is saved or replayed."""
    if node.target is _torch.run_and_save_rng_state:
        return str(node.args[0])
    return str(node.args[1] if node.target is _torch.run_with_rng_state else node.target)


class _Ops:
    """Stands for ``torch.ops`` and what is below it: ops compute on example values and are accounted for."""

    def __init__(self, target: Any, ledger: Ledger) -> None:
        self._target = target
        self._ledger = ledger

    def __getattr__(self, name: str) -> Any:
        return _Ops(getattr(self._target, name), self._ledger)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        op = self._target
        args = tuple(leaf._target if isinstance(leaf, _Ops) else leaf for leaf in args)
        if op is _torch.run_and_save_rng_state:
            state = torch.empty(torch.get_rng_state().shape, dtype=torch.uint8)
            return self._ledger.account("", state), self._ledger.account(str(args[0]), args[0](*args[1:], **kwargs))
        if op is _torch.run_with_rng_state:
            op, args = args[1], args[2:]
        return self._ledger.account(str(op), op(*args, **kwargs))


class _Torch:
    """Stands for the module ``torch``."""

    def __init__(self, ledger: Ledger) -> None:
        self.ops = _Ops(torch.ops, ledger)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Kernel:
    """Stands for a kernel that inductor generated: it writes into what it is given."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    run = __call__


class _Library:
    """Stands for inductor's table of ready-made kernels, which write to ``out`` or allocate their result."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def kernel(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return _Ops(getattr(torch.ops.aten, name), self._ledger)(*args, **kwargs)
            return self._ledger.account(f"aten.{name}.default", out)

        return kernel


def dry_generated(module: fx.GraphModule, args: list[Any], ledger: Ledger) -> Any:
    """Run the generated code of a module of the boxed convention on example values; the list is emptied.

    To be called, as ``dry_inductor``, in the mode of the example values.

    Returns:
        What the module returns, as example values.
    """
    names = [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    attributes = _torch.example_twins([getattr(module, name) for name in names], contextlib.nullcontext())
    ledger.hold(attributes, counted=False)
    owner = types.SimpleNamespace(**dict(zip(names, attributes, strict=True)))
    return _call(types.MethodType(type(module).forward, owner), args, {}, ledger)


def dry_inductor(code: _torch.InductorCode, args: list[Any], ledger: Ledger) -> Any:
    """Run the code that inductor generated on example values; the list is emptied.

    Raises:
        Exception: of any kind, where the code holds what has no meaning without data.
    """
    function = _torch.generated_function(code)
    names = _globals(function)
    replaced: dict[str, Any] = {}
    for name in names:
        if name.startswith("empty_strided_"):
            replaced[name] = functools.partial(_allocate, name.rpartition("_")[2], ledger)
        elif name.startswith(("cpp_", "triton_")):
            replaced[name] = _Kernel()
        elif name in ("aten", "inductor_ops", "_quantized"):
            replaced[name] = _Ops(names[name], ledger)
        elif name in ("assert_size_stride", "assert_alignment"):
            replaced[name] = _Kernel()
    replaced["reinterpret_tensor"] = lambda tensor, *place: ledger.account("", tensor.as_strided(*place))
    replaced["extern_kernels"] = _Library(ledger)
    extra = _torch.example_twins(code.extra, contextlib.nullcontext())
    ledger.hold(extra, counted=False)
    given = [*extra, *args]
    args.clear()
    return _call(function, given, replaced, ledger)


def _allocate(device: str, ledger: Ledger, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    where = "cpu" if device == "pinned" else device
    made: torch.Tensor = ledger.account("", torch.empty_strided(size, stride, dtype=dtype, device=where))
    return made


def _globals(function: Any) -> dict[str, Any]:
    plain: Any = getattr(function, "__func__", function)
    return plain.__globals__  # type: ignore[no-any-return]


def _call(function: Any, args: list[Any], replaced: Mapping[str, Any], ledger: Ledger) -> Any:
    """Call a Python function, some of its global names standing for other things."""
    plain: Any = getattr(function, "__func__", function)
    names = {**_globals(function), **replaced, "torch": _Torch(ledger)}
    twin = types.FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    bound = [function.__self__] if hasattr(function, "__self__") else []
    return twin(*bound, args)
