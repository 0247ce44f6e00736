"""Optimizers that cannot be traced: their update as one call of a program, with the bytes that it takes."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import quoted
from graphopt.ir.node import InputSpec, set_value
from graphopt.ir.ops.updates.opaque_update import opaque_update_, stands_for
from graphopt.ir.ops.values import cuda_indices, storage_bytes
from graphopt.ir.words.written_units import format_bytes

__all__ = ["OpaqueUpdate", "measure_update", "stand_in", "trace_opaque"]

logger = logging.getLogger(__name__)

LARGEST = 1024**3
"""Bytes of a parameter beyond which its update is not tried."""

LARGEST_TOGETHER = 64 * 1024**2
"""Bytes of all parameters up to which their updates are tried at once."""


@dataclass(frozen=True)
class OpaqueUpdate:
    """What is known of an update that runs in eager mode.

    Attributes:
        reason: why it does.
        state: the tensors that the optimizer keeps, as ``(parameter, key)`` with an example without data.
        created: bytes of those that the first call makes.
        temporaries: bytes that a call allocates and frees again; None where it could not be measured.
    """

    reason: str
    state: tuple[tuple[str, str, torch.Tensor], ...]
    created: int
    temporaries: int | None

    def __str__(self) -> str:
        held = sum(storage_bytes(value) for _, _, value in self.state)
        known = "what it keeps and allocates for itself could not be measured and is not counted"
        if self.temporaries is not None:
            known = f"{format_bytes(held)} of state and {format_bytes(self.temporaries)} for the update are counted"
        return f"{self.reason}; all gradients live together until then, and {known}"


def trace_opaque(
    optimizer: torch.optim.Optimizer,
    order: Sequence[str],
    examples: Mapping[str, torch.Tensor],
    known: OpaqueUpdate,
    *,
    first: bool,
    loss: torch.Tensor | None = None,
) -> tuple[fx.Graph, list[InputSpec]]:
    """A graph that calls the optimizer, and what its inputs are.

    Args:
        optimizer: whose update it is.
        order: the names of the parameters that it updates.
        examples: tensors without data like these parameters.
        known: of this update.
        first: for the call that creates the state.
        loss: an example of the loss, for an optimizer that evaluates the model again.
    """
    graph = fx.Graph()
    state = [] if first and known.created else list(known.state)
    specs = [
        *(InputSpec("parameter", name) for name in order),
        *(InputSpec("gradient", name) for name in order),
        *(InputSpec("state", f"{name}/{key}") for name, key, _ in state),
    ]
    values = [*(examples[name] for name in order)] * 2 + [value for _, _, value in state]
    if loss is not None:
        specs.append(InputSpec("loss", "loss"))
        values.append(loss)
    inputs = []
    for number, value in enumerate(values):
        node = graph.placeholder(f"x{number}")
        set_value(node, value)
        inputs.append(node)
    count = len(order)
    workspace = (known.temporaries or 0) + (known.created if first else 0)
    given = (inputs[:count], inputs[count : 2 * count], inputs[2 * count : 2 * count + len(state)])
    more: dict[str, Any] = {} if loss is None else {"loss": inputs[-1]}
    call = graph.call_function(opaque_update_, (*given, stands_for(optimizer), workspace), more)
    set_value(call, None)
    graph.output(())
    return graph, specs


def measure_update(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.Tensor], reason: str, mode: Any
) -> OpaqueUpdate:
    """What an optimizer keeps and allocates: found on a copy of it that updates zeros.

    Large parameters are tried one by one, so that little memory is needed. What single ones take is then added up where
    the optimizer updates lists of them, and otherwise taken for the two largest, since the variables of a loop live on
    while its next round begins.

    Args:
        optimizer: is not touched.
        trained: the parameters that it updates, by name.
        reason: why it runs in eager mode.
        mode: the fake mode in which examples are made.
    """
    whole = sum(map(storage_bytes, trained.values())) <= LARGEST_TOGETHER
    parts = [trained] if whole else [{name: parameter} for name, parameter in trained.items()]
    state: list[tuple[str, str, torch.Tensor]] = []
    created, temporaries, unknown = 0, [], False
    with torch.random.fork_rng(devices=cuda_indices(trained.values())):
        for part in parts:
            found = _try(optimizer, part, mode)
            unknown = unknown or found is None
            temporaries.append(found.temporaries if found is not None else 0)
            for name, parameter in part.items():
                kept = _examples(optimizer.state.get(parameter, {}), mode)
                if not kept and found is not None:
                    kept = found.state[name]
                    created += sum(map(storage_bytes, kept.values()))
                state += [(name, key, value) for key, value in kept.items()]
    at_once = any(_updates_lists(group) for group in optimizer.param_groups)
    total = sum(temporaries) if at_once else sum(sorted(temporaries)[-2:])
    return OpaqueUpdate(reason, tuple(state), created, None if unknown else total)


@dataclass(frozen=True)
class _Tried:
    state: dict[str, dict[str, torch.Tensor]]
    temporaries: int


def _updates_lists(group: Mapping[str, Any]) -> bool:
    """Whether a group may be updated by list ops; some optimizers of torch choose these on GPUs by themselves."""
    on_gpu = any(_torch.device_kind(parameter) == "cuda" for parameter in group["params"])
    return bool(group.get("foreach", True) or (group.get("foreach") is None and on_gpu))


def _try(optimizer: torch.optim.Optimizer, part: Mapping[str, torch.Tensor], mode: Any) -> _Tried | None:
    """Some updates of zeros by a copy of an optimizer; None where that fails, or would take much."""
    if sum(map(storage_bytes, part.values())) > LARGEST:
        return None
    try:
        zeros = {name: torch.nn.Parameter(torch.zeros_like(parameter)) for name, parameter in part.items()}
        twin = stand_in(optimizer, {part[name]: zero for name, zero in zeros.items()})
        for zero in zeros.values():
            zero.grad = torch.zeros_like(zero)
        twin.step()
        state = {name: _examples(twin.state[zero], mode) for name, zero in zeros.items()}
        return _Tried(state, _measured(twin, next(iter(zeros.values())).device))
    except Exception as error:  # a user's class may need what the copy lacks: what it takes stays unknown
        logger.info("an update by a copy of %s failed: %s", type(optimizer).__name__, quoted(error))
        return None


def _measured(twin: torch.optim.Optimizer, device: torch.device) -> int:
    """The most bytes that later updates add at a time; some optimizers need more from their sixth one on."""

    def update() -> None:
        for _ in range(8):
            twin.step()

    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        update()
        return int(torch.cuda.max_memory_allocated(device) - before)
    if _torch.profiler_is_running():
        logger.warning(
            "a profiler of torch is running: what an update of %s allocates is not measured in this capture; capture "
            "before the profiler starts",
            type(twin).__name__,
        )
        return 0
    with _torch.profile_memory() as profile:
        update()
    alive = peak = 0
    for _, where, count in _torch.allocator_events(profile):
        alive += count if where == "cpu" else 0
        peak = max(peak, alive)
    return peak


def stand_in(
    optimizer: torch.optim.Optimizer, parameters: Mapping[torch.Tensor, torch.Tensor]
) -> torch.optim.Optimizer:
    """An optimizer like this one, of other parameters, without state, and without hooks and wrappers of its step.

    Args:
        optimizer: is not touched, whatever the other one does.
        parameters: what takes the place of each; parameters that are not named are left out.
    """
    twin = object.__new__(type(optimizer))  # copy.copy would leave out attributes
    known: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    known |= {id(old): new for old, new in parameters.items()}
    for name, value in optimizer.__dict__.items():
        if name.endswith("_hooks"):
            twin.__dict__[name] = type(value)()
        elif name not in _REPLACED:
            twin.__dict__[name] = _copied(value, known)
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        members = [parameters[p] for p in group["params"] if p in parameters]
        others = {key: value for key, value in group.items() if key != "params"}
        twin.param_groups.append({**_copied(others, known), "params": members})
    return twin


def _copied(value: Any, known: Mapping[int, Any]) -> Any:
    """A deep copy with the known objects as they are; of tensors (a learning rate) with data, also while tracing."""
    with _torch.without_dispatch_modes():
        return copy.deepcopy(value, dict(known))


_REPLACED = ("state", "param_groups", "step", "zero_grad")


def _examples(state: Mapping[str, Any], mode: Any) -> dict[str, torch.Tensor]:
    """Tensors like those of a state, without data."""
    with mode:
        return {
            key: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
