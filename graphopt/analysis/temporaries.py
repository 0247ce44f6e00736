"""What ops allocate for themselves while they run: measured, once per op and shapes, on inputs of zeros.

Kernels reorder layouts, build masks and keep partial sums; no schema tells how much. Each distinct call of a program is
therefore run once by itself, within limits, while the allocator is watched. The random-number generators are left as
they were.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.precision import plain_precision
from graphopt.ops import schema
from graphopt.values import storage_bytes, tensors_of

__all__ = ["Usage", "measured_usage"]

logger = logging.getLogger("graphopt")

LARGEST_CALL = 2 * 1024**3
"""Calls whose arguments and results take more bytes are not run; their temporaries count as 0, with a log line."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call allocates.

    Attributes:
        temporary: bytes that it allocates and frees again while it runs, beyond its results.
        results: bytes of the storages of its results, in order; some ops leave theirs larger than the result
            (``mse_loss`` reduces in place); None where they are not measured.
    """

    temporary: int = 0
    results: tuple[int, ...] | None = None


_measured: dict[str, Usage] = {}


def measured_usage(nodes: Iterable[fx.Node]) -> list[Usage]:
    """What each call allocates; 0 for calls on a device that is not here, collectives and in-place writes."""
    calls = list(nodes)
    keys = [_key(node) for node in calls]
    missing = {key: node for key, node in zip(keys, calls, strict=True) if key and key not in _measured}
    if missing:
        with plain_precision():
            _measure(missing)
    return [_usage(key, node) for key, node in zip(keys, calls, strict=True)]


def _usage(key: str, node: fx.Node) -> Usage:
    found = _measured.get(key, Usage())
    if node.target is _torch.run_with_rng_state:
        return replace(found, temporary=found.temporary + _generator_state(node))
    if node.target is _torch.run_and_save_rng_state:
        return replace(found, results=None)
    return found


def _generator_state(node: fx.Node) -> int:
    """A replayed random op puts the present generator state aside while it runs."""
    state: Any = node.args[0]
    return storage_bytes(state.meta["val"])


def _call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that really runs, with its arguments."""
    if node.target is _torch.run_and_save_rng_state:
        return node.args[0], tuple(node.args[1:]), dict(node.kwargs)
    if node.target is _torch.run_with_rng_state:
        return node.args[1], tuple(node.args[2:]), dict(node.kwargs)
    return node.target, tuple(node.args), dict(node.kwargs)


def _key(node: fx.Node) -> str:
    """Equal for calls that allocate alike; empty for calls that are not measured."""
    target, args, kwargs = _call(node)
    if not isinstance(target, _torch.OpOverload) or node.target is operator.getitem:
        return ""
    if schema.is_view(node) or schema.is_collective(node) or schema.mutated_inputs(node):
        return ""
    described = _torch.map_aggregate(
        (args, kwargs), lambda a: _describe(a.meta.get("val")) if isinstance(a, fx.Node) else a
    )
    return f"{target}{described}{torch.get_num_threads()}"


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"<{_sizes(value.shape)} {_sizes(value.stride())} {value.dtype} {value.device}>"


def _sizes(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(_torch.size_hint(value) for value in values)


def _measure(missing: dict[str, fx.Node]) -> None:
    cpu: dict[str, fx.Node] = {}
    for key, node in missing.items():
        _measured[key] = Usage()
        tensors = [t for n in (node, *node.all_input_nodes) for t in tensors_of(n.meta.get("val"))]
        size = sum(storage_bytes(t) for t in tensors)
        devices = {t.device.type for t in tensors}
        if size > LARGEST_CALL:
            logger.info("not measuring the temporaries of %s: the call takes %d bytes", node.name, size)
        elif devices == {"cpu"}:
            cpu[key] = node
        elif devices == {"cuda"} and torch.cuda.is_available():
            _measured[key] = _measure_cuda(node)
    if cpu:
        _measured.update(_measure_cpu(cpu))


def _real(node: fx.Node) -> Any:
    """Zeros with the shape, strides, dtype and device of a node's value."""
    return _torch.pytree.tree_map(_zeros, node.meta["val"])


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        count = storage_bytes(value) // value.element_size()
        flat = torch.zeros(count, dtype=value.dtype, device=value.device)
        return flat.as_strided(_sizes(value.shape), _sizes(value.stride()))
    if isinstance(value, torch.SymInt):
        return _torch.size_hint(value)
    return value


def _prepare(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    target, args, kwargs = _call(node)
    real: dict[fx.Node, Any] = {}
    for source in node.all_input_nodes:
        real[source] = _real(source)
    args, kwargs = _torch.map_aggregate((args, kwargs), lambda a: real[a] if isinstance(a, fx.Node) else a)
    return target, args, kwargs


def _measure_cpu(nodes: dict[str, fx.Node]) -> dict[str, Usage]:
    """Run every call in one profile, and read the allocator's events between its marks."""
    done: list[str] = []
    results: list[tuple[int, ...]] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _torch.profile_memory() as profile:
        for key, node in nodes.items():
            try:
                target, args, kwargs = _prepare(node)
                with torch.profiler.record_function(f"graphopt:{len(done)}"):
                    result = target(*args, **kwargs)
                results.append(tuple(t.untyped_storage().nbytes() for t in tensors_of(result)))
                del result, args, kwargs
                done.append(key)
            except Exception as error:  # data-dependent checks refuse zeros; what the op needs stays unknown
                logger.info("the temporaries of %s are not known: %s", node.name, error)
    peaks = _torch.peaks_between_marks(profile, "graphopt:")
    return {key: Usage(peaks.get(index, 0), results[index]) for index, key in enumerate(done)}


def _measure_cuda(node: fx.Node) -> Usage:
    try:
        with torch.random.fork_rng(), torch.no_grad():
            target, args, kwargs = _prepare(node)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            result = target(*args, **kwargs)
            torch.cuda.synchronize()
            peak, end = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
            del result
    except Exception as error:
        logger.info("the temporaries of %s are not known: %s", node.name, error)
        return Usage()
    return Usage(peak - end)
