"""What ops allocate for themselves while they run: measured, once per op and shapes, on zeros or on what takes most.

Kernels reorder layouts, build masks and keep partial sums; no schema tells how much. Each distinct call of a program is
therefore run once by itself, or smaller ones like it where it is too large, while the allocator is watched. The
random-number generators are left as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.isolated_call import (
    LARGEST_CALL,
    Fill,
    call_bytes,
    call_key,
    call_tensors,
    prepare,
    refusal,
    sizes,
)
from graphopt.analysis.smaller_calls import SmallerCall, extrapolated, smaller_calls
from graphopt.analysis.workspace_formulas import described_call, is_chosen_on_device, temporary_bytes
from graphopt.errors import quoted
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.graphs.graph_copies import kept_key
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.updates.opaque_update import opaque_update_
from graphopt.ir.ops.values import is_dense, storage_bytes, tensors_of
from graphopt.ir.words.written_units import counted

__all__ = ["Usage", "measured_temporaries", "measured_usage"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call allocates.

    Attributes:
        temporary: bytes that it allocates and frees again while it runs, beyond its results.
        results: bytes of the storages of its results, in order; some ops leave theirs larger than the result
            (``mse_loss`` reduces in place); None where they are not measured, and for calls that write in place.
    """

    temporary: int = 0
    results: tuple[int, ...] | None = None


_Call: TypeAlias = "fx.Node | SmallerCall | _There"
"""What can be run by itself: a call of a program, a smaller one like it, or one on another device."""

_MARK = "measured call "
"""How the marks in a profile begin; no op is called so."""

_measured: dict[str, Usage] = {}

_told: set[str] = set()
"""Calls that could not be measured because a profiler was running, as the log has said."""


def measured_usage(nodes: Iterable[fx.Node]) -> list[Usage]:
    """What each call allocates; by formula where it is not run: without data, or on a device that is not here."""
    calls = list(nodes)
    known = dict.fromkeys(each for node in calls for each in (node, *node.all_input_nodes))
    others = (_torch.stand_in_of(tensor) for node in known for tensor in tensors_of(value_of(node)))
    other = next(filter(None, others), None)
    if other is not None:
        return [_by_formula(node, other) for node in calls]
    keys = [call_key(node) or _writing_key(node) for node in calls]
    missing = {key: node for key, node in zip(keys, calls, strict=True) if key and key not in _measured}
    if missing:
        with plain_precision():
            _measure(missing)
    return [_usage(key, node) for key, node in zip(keys, calls, strict=True)]


def _by_formula(node: fx.Node, other: _torch.StandIn) -> Usage:
    if schema.is_collective(node):
        return _of_exchange(node)
    if node.target is opaque_update_:
        return Usage(int(node.args[4]))  # type: ignore[arg-type]
    return Usage(temporary_bytes(node, other.device.name, other.kind, other.device.temporaries))


def measured_temporaries(nodes: Iterable[fx.Node], device: torch.device) -> dict[str, int]:
    """Bytes that calls of a program without data allocate for themselves on a device, where each is run once on zeros.

    Args:
        nodes: of the program; those whose libraries choose what they allocate are run (``is_chosen_on_device``).
        device: cpu or a CUDA device of this machine.

    Returns:
        bytes by ``described_call``. A call that does not run there is left out, which the log says.
    """
    calls = {described_call(n): _There(n, device) for n in nodes if is_chosen_on_device(n) and not refusal(n)}
    if device.type == "cpu":
        return {key: usage.temporary for key, usage in _measure_cpu(calls).items()}
    found: dict[str, int] = {}
    for key, call in calls.items():
        try:
            found[key] = _cuda_temporary(call, device)
        except Exception as error:  # too large for the device, or refused by the library
            logger.warning("what %s allocates for itself on %s could not be measured: %s", key, device, quoted(error))
    return found


@dataclass(frozen=True, slots=True)
class _There:
    """A call that is run on another device than its example values are on."""

    node: fx.Node
    device: torch.device

    def prepare(self, fill: Fill) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The op with arguments on the device; see ``isolated_call.prepare``."""
        return prepare(self.node, lambda count, dtype, _: fill(count, dtype, self.device))


def _writing_key(node: fx.Node) -> str:
    """Equal for in-place calls that allocate alike; empty for other calls.

    Such a call writes to the zeros that it is measured on. It allocates where it wraps a number in a tensor
    (``_foreach_add_(steps, 1)``), converts an argument, or falls back to ops that are not in place.
    """
    key = kept_key(node, _writing_key_of)
    return key and f"{key}{torch.get_num_threads()}"


def _writing_key_of(node: fx.Node) -> str:
    if not schema.mutated_inputs(node) or schema.is_collective(node) or node.target is opaque_update_:
        return ""
    described = _torch.map_aggregate(
        (node.args, node.kwargs), lambda a: _described(value_of(a)) if isinstance(a, fx.Node) else a
    )
    return f"{node.target}{described}"


def _described(value: Any) -> Any:
    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return str(leaf)
        return sizes(leaf.shape), sizes(leaf.stride()), leaf.dtype, str(leaf.device)

    return _torch.pytree.tree_map(tensor, value)


def _of_exchange(node: fx.Node) -> Usage:
    """What gloo allocates for an exchange: it scatters by reducing a copy, and divides means by numbers of its own.

    Other backends have buffers outside of torch's allocator. Measured with torch 2.13.
    """
    given = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(given, torch.Tensor) or given.device.type != "cpu" or schema.hands_on(node):
        return Usage()
    copy = storage_bytes(given) if schema.op_name(node) == "reduce_scatter_tensor" else 0
    return Usage(copy + (8 + given.element_size() if "avg" in node.args else 0))


def _usage(key: str, node: fx.Node) -> Usage:
    if schema.is_collective(node):
        return _of_exchange(node)
    if node.target is opaque_update_:
        return Usage(int(node.args[4]))  # type: ignore[arg-type]
    found = _measured.get(key, Usage())
    if schema.mutated_inputs(node):
        return replace(found, results=None)
    if node.target is _torch.run_with_rng_state:
        return replace(found, temporary=found.temporary + _generator_state(node))
    if node.target is _torch.run_and_save_rng_state:
        return replace(found, results=None)
    return found


def _generator_state(node: fx.Node) -> int:
    """A replayed random op puts the present generator state aside while it runs."""
    state: Any = node.args[0]
    return storage_bytes(value_of(state))


def _measure(missing: dict[str, fx.Node]) -> None:
    if _torch.profiler_is_running():
        if not _told.issuperset(missing):
            logger.warning(
                "a profiler of torch is running, and there is one at a time: what is allocated during %s is not "
                "measured now, and predicted peaks can be too low; capture before it starts (step.prepare(*batch))",
                counted(len(missing), "calls"),
            )
        _told.update(missing)
        return
    cpu: dict[str, fx.Node] = {}
    for key, node in missing.items():
        _measured[key] = Usage()
        size = call_bytes(node)
        devices = {t.device for t in call_tensors(node)} - {torch.device("cpu")}
        cuda = {device for device in devices if device.type == "cuda"}
        if not _fused_lists_fit(node):  # such kernels read and write by the sizes of the first list
            logger.info("not measuring the temporaries of %s: its lists of tensors do not fit each other", node.name)
        elif size > LARGEST_CALL:
            _measured[key] = _by_smaller(node, cuda) if devices == cuda else _bound(node, cuda)
        elif not devices:
            cpu[key] = node
        elif devices == cuda:
            _measured[key] = _measure_cuda(node, cuda)
    if cpu:
        _measured.update(_measure_cpu(cpu))


def _fused_lists_fit(node: fx.Node) -> bool:
    """Whether the tensors of a fused update are alike, which its kernel does not check; True for other calls.

    In a program from a file they need not be.
    """
    if not isinstance(node.target, _torch.OpOverload) or not schema.op_name(node).startswith("_fused_"):
        return True
    lists = [[_example(item) for item in argument] for argument in node.args if isinstance(argument, (list, tuple))]
    lists = [tensors for tensors in lists if tensors]
    single = [_example(item) for item in node.kwargs.values() if isinstance(item, fx.Node)]
    if not all(isinstance(value, torch.Tensor) and value.numel() == 1 for value in single if not _is_number(value)):
        return False
    if not all(isinstance(tensor, torch.Tensor) for tensors in lists for tensor in tensors):
        return False
    return len({len(tensors) for tensors in lists}) <= 1 and all(map(_alike, zip(*lists, strict=True)))


def _example(argument: Any) -> Any:
    """The example value of an argument; what is no value of the program stands for itself."""
    return value_of(argument) if isinstance(argument, fx.Node) else argument


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))


def _alike(tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether tensors are of one shape and device and dense, but for counts of one element behind the first two."""
    first, *others = tensors
    return is_dense(first) and all(
        other.device == first.device
        and ((other.shape == first.shape and is_dense(other)) or (place > 0 and other.numel() == 1))
        for place, other in enumerate(others)
    )


def _rows_of_groups(node: fx.Node) -> int:
    """How many rows, or columns, a product of matrices group by group divides into groups."""
    given = schema.named_arguments(node)
    one, other = value_of(given["self"]).shape, value_of(given["mat2"]).shape
    return _torch.size_hint(other[-1] if len(one) == 3 else one[-1] if len(other) == 2 else one[0])


_MOST: dict[str, Callable[[fx.Node], float]] = {
    "linalg_matrix_exp": lambda node: 1e3,
    "_grouped_mm": _rows_of_groups,
}
"""Ops that allocate by values, and the number in all places of their arguments with which they allocate most.

A matrix exponential takes the longer series for large norms, and squares behind it. Of a product by groups, zeros would
leave all groups empty; where each group ends with the last row, the first one has all rows, and no group takes more.
"""


def _filled(node: fx.Node) -> Fill:
    """What makes the arguments that a call is measured on: zeros, but for ops that allocate more for others."""
    name = schema.op_name(node) if isinstance(node.target, _torch.OpOverload) else ""
    if name not in _MOST:
        return _zeros
    number = _MOST[name](node)
    return lambda count, dtype, device: torch.full((count,), number, dtype=dtype, device=device)


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def _measure_cpu(calls: Mapping[str, _Call]) -> dict[str, Usage]:
    """Run every call in one profile, and read the allocator's events between its marks."""
    done: list[str] = []
    results: list[tuple[int, ...]] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _torch.profile_memory() as profile:
        for key, call in calls.items():
            try:
                target, args, kwargs = _prepared(call)
                with torch.profiler.record_function(f"{_MARK}{len(done)}"):
                    result = target(*args, **kwargs)
                results.append(tuple(t.untyped_storage().nbytes() for t in tensors_of(result)))
                del result, args, kwargs
                done.append(key)
            except Exception as error:  # data-dependent checks refuse zeros; what the op needs stays unknown
                logger.info("the temporaries of %s are not known: %s", _node(call).name, quoted(error))
    peaks = _torch.peaks_between_marks(profile, _MARK)
    return {key: Usage(peaks.get(index, 0), results[index]) for index, key in enumerate(done)}


def _node(call: _Call) -> fx.Node:
    return call if isinstance(call, fx.Node) else call.node


def _prepared(call: _Call) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    filled = _filled(_node(call))
    return prepare(call, filled) if isinstance(call, fx.Node) else call.prepare(filled)


def _measure_cuda(node: fx.Node, devices: set[torch.device]) -> Usage:
    """What a call takes on its device; by formula where it cannot be run on one, which is said."""
    if len(devices) > 1 or not torch.cuda.is_available():
        return _bound(node, devices)
    (device,) = devices
    try:
        return Usage(_cuda_temporary(node, device))
    except Exception as error:
        found = _bound(node, devices)
        logger.warning(
            "what %s allocates for itself on %s could not be measured, and is taken as %d bytes by formula: %s",
            node.name,
            device,
            found.temporary,
            quoted(error).partition("\n")[0],
        )
        return found


def _cuda_temporary(call: _Call, device: torch.device) -> int:
    """Bytes of a device's peak while a call runs there, above what is allocated when it has run."""
    with torch.cuda.device(device), torch.random.fork_rng(devices=[device]), torch.no_grad():
        target, args, kwargs = _prepared(call)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = target(*args, **kwargs)
        torch.cuda.synchronize(device)
        peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result, args, kwargs
    return max(peak - end, 0)


_SMALLER = 32
"""Calls that are too large are run this many times smaller than the largest that may be run."""


def _by_smaller(node: fx.Node, devices: set[torch.device]) -> Usage:
    """What a call that is too large to be run takes, by smaller ones, but no less than by formula."""
    found = _bound(node, devices)
    if len(devices) > 1 or (devices and not torch.cuda.is_available()):
        return found
    for call, half in smaller_calls(node, LARGEST_CALL // _SMALLER):
        both = _temporaries((call, half), next(iter(devices), None))
        if both is not None:
            return Usage(max(extrapolated(call, half, *both), found.temporary))
    logger.warning(
        "%s takes %d bytes, is too large to be run by itself, and no smaller call like it runs: what it allocates for "
        "itself is taken as %d bytes by formula, and predicted peaks can be too low",
        node.name,
        call_bytes(node),
        found.temporary,
    )
    return found


def _temporaries(calls: tuple[SmallerCall, SmallerCall], device: torch.device | None) -> tuple[int, int] | None:
    """What two calls take, on a CUDA device or (None) on the CPU; None where one of them cannot be run."""
    if device is None:
        usages = _measure_cpu({str(call.new): call for call in calls})
        return (usages[str(calls[0].new)].temporary, usages[str(calls[1].new)].temporary) if len(usages) == 2 else None
    try:
        return _cuda_temporary(calls[0], device), _cuda_temporary(calls[1], device)
    except Exception as error:  # another size may do
        logger.info("a smaller call like %s does not run: %s", calls[0].node.name, quoted(error))
        return None


def _bound(node: fx.Node, devices: set[torch.device]) -> Usage:
    """What a call that is not run takes at most, by formula: on the CUDA devices given, else on a CPU."""
    where = min(map(str, devices), default="cpu")
    return Usage(temporary_bytes(node, where, "cuda" if devices else "cpu"))
