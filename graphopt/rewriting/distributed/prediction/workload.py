"""What a step computes and what it has to exchange, read from a program: the input of every prediction."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from graphopt.analysis.costs.cost import DeviceProfile, Method, check_cost, cost_report, profile_of, profile_of_cost
from graphopt.analysis.costs.figures import Figure, figures_of
from graphopt.analysis.costs.isolated_call import sizes
from graphopt.analysis.costs.timing import shortest_seconds
from graphopt.errors import GraphoptError
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.residual import accumulate_
from graphopt.ir.ops.communication.selection import select
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_seconds
from graphopt.rewriting.distributed.dense.all_reduce import buffer_writes, final_gradients
from graphopt.rewriting.distributed.flat_exchange import memory_strides
from graphopt.rewriting.distributed.prediction.volume import Gradient
from graphopt.rewriting.distributed.sparse.sparse_exchange import entries
from graphopt.rewriting.distributed.sparse.sparse_update import adds_gradients

__all__ = ["Rates", "Workload", "rates_of", "workload_of"]

_SELECTED_FROM = 2**22
"""Elements of the tensor on which selection is measured."""

_SPARSITY = 0.999
"""Share of them that is not selected."""

_PASSES = 7
"""How often sparse exchange reads or writes each element where its cost is not measured.

Momentum correction reads the gradient, the momentum and the residual and writes the last two; selection reads the
residual twice, for a threshold and for what is above it.
"""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the work around exchanges costs on the computing lane.

    Attributes:
        copy: seconds for each byte that is read or written.
        select: seconds for each element of a gradient that is exchanged sparsely: momentum correction and selection.
    """

    copy: float
    select: float


@dataclass(frozen=True, slots=True)
class Workload:
    """One step of one rank.

    Attributes:
        title: of the program.
        stage: ``joint`` (no update) or ``step``.
        forward: seconds until the end of forward.
        backward: seconds until the end of backward.
        update: seconds of the optimizer's update; 0 in a joint program.
        gradients: in the order in which they become final.
        buffers: bytes of the buffers that forward updates, by dtype and device.
        rates: of the work around exchanges.
        cost: the name of the cost model.
        costs: how the seconds are known, in words.
        adds: whether the update only adds gradients to parameters, with momentum or without, so that sparse exchange
            can update the entries that arrive in place of whole tensors.
    """

    title: str
    stage: str
    forward: float
    backward: float
    update: float
    gradients: tuple[Gradient, ...]
    buffers: tuple[int, ...]
    rates: Rates
    cost: str = ""
    costs: str = ""
    adds: bool = False

    @property
    def compute(self) -> float:
        """Seconds of the step without any exchange."""
        return self.backward + self.update

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients."""
        return sum(gradient.bytes for gradient in self.gradients)

    def taking(self, seconds: float) -> Workload:
        """The same step where it takes so long without any exchange: on another machine, or on shared cores.

        All that is computed is slower or faster by one factor, the work around exchanges included.

        Raises:
            GraphoptError: for anything but a number above 0.
        """
        if not 0 < seconds < math.inf:
            raise GraphoptError(f"a step takes a number of seconds above 0, not {seconds!r}")
        factor = seconds / self.compute
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            update=self.update * factor,
            gradients=tuple(
                replace(found, ready=found.ready * factor, reads=tuple(read * factor for read in found.reads))
                for found in self.gradients
            ),
            rates=Rates(self.rates.copy * factor, self.rates.select * factor),
            costs=f"{self.costs}\nscaled from {format_seconds(self.compute)} a step to {format_seconds(seconds)}",
        )


def workload_of(
    program: Program, cost: str = "measured", *, progress: Callable[[int, int], None] | None = None
) -> Workload:
    """What a step of a program computes and has to exchange.

    A gradient is ready when all calls up to the one that makes it have run, the update's left out. Selection is
    measured once on this device and kept; with another cost model than ``measured`` it takes the time of the bytes that
    it reads and writes.

    Args:
        program: of stage joint or step, whose gradients are not exchanged yet; no process group is needed.
        cost: ``measured``, ``roofline``, or the name of a device (``graphopt.analysis.costs.cost.COSTS``).
        progress: called with (distinct calls measured, distinct calls to measure) after each of them.

    Raises:
        GraphoptError: for a forward program, for one without gradients of parameters or whose gradients are exchanged
            already, for an unknown cost model.
    """
    check_cost(cost)
    found = _gradients_to_exchange(program)
    calls = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    profile = profile_of_cost(cost, program.context.device)
    method: Method = "measured" if cost == "measured" and profile is None else "roofline"
    report = cost_report(calls, method=method, profile=profile, progress=progress)
    lane = _Lane(calls, report.seconds)
    gradients = _gradients(program, found, lane)
    return Workload(
        title=program.title,
        stage=program.stage,
        forward=lane.forward,
        backward=lane.backward,
        update=lane.update,
        gradients=gradients,
        buffers=_buffers(program),
        rates=rates_of(gradients[0].device, cost, profile),
        cost=cost,
        costs=str(report),
        adds=adds_gradients(program, momentum=True),
    )


def _gradients_to_exchange(program: Program) -> Mapping[str, fx.Node]:
    if program.stage == "forward":
        raise GraphoptError("a forward program has no gradients to exchange: capture the stage joint or step")
    found = final_gradients(program)
    if not found:
        raise GraphoptError(
            f"no parameter of {program.title or 'the program'} gets a gradient, so there is nothing to exchange"
        )
    done = [name for name, node in found.items() if node.op == "call_function" and info(node).phase is Phase.SYNC]
    if done:
        raise GraphoptError(
            f"the gradients of {program.title or 'the program'} are exchanged already ({done[0]!r} by "
            f"{info(found[done[0]]).origin}): plan the program without that pass"
        )
    return found


class _Lane:
    """When the calls of a program end on the computing lane, with the update after everything else.

    Attributes:
        starts: of each call but the update's, in seconds.
        ends: of the same calls.
        forward: the end of forward.
        backward: the end of backward.
        update: seconds of the update.
    """

    def __init__(self, calls: Sequence[fx.Node], seconds: Sequence[float]) -> None:
        self.starts: dict[fx.Node, float] = {}
        self.ends: dict[fx.Node, float] = {}
        self.update = now = 0.0
        forward: float | None = None
        for node, taken in zip(calls, seconds, strict=True):
            phase = info(node).phase
            if forward is None and phase is not Phase.FORWARD:
                forward = now
            if phase is Phase.UPDATE:
                self.update += taken
            else:
                self.starts[node] = now
                now += taken
                self.ends[node] = now
        self.forward = now if forward is None else forward
        self.backward = now

    def reads(self, parameter: fx.Node) -> tuple[float, ...]:
        """When forward first reads a parameter, and when backward does."""
        starts = [self.starts[call] for call in schema.readers(parameter) if call in self.starts]
        in_forward = [start for start in starts if start < self.forward]
        in_backward = [start for start in starts if start >= self.forward]
        return tuple(min(part) for part in (in_forward, in_backward) if part)


def _gradients(program: Program, found: Mapping[str, fx.Node], lane: _Lane) -> tuple[Gradient, ...]:
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    parameters = {spec.target: node for node, spec in program.inputs_of("parameter")}
    gradients = []
    for name, node in found.items():
        value, parameter = value_of(node), parameters[name]
        gradient = Gradient(
            name=name,
            shape=_memory_shape(value),
            dtype=value.dtype,
            device=value.device,
            place=places[node],
            ready=lane.ends.get(node, 0.0),
            parameter_bytes=storage_bytes(value_of(parameter)),
            order=places[parameter],
            reads=lane.reads(parameter),
        )
        gradients.append(gradient)
    return tuple(sorted(gradients, key=lambda gradient: gradient.place))


def _memory_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Sizes from the outermost dimension in memory to the innermost; those of 1 come last."""
    extents = zip(sizes(value.shape), memory_strides(value), strict=True)
    return tuple(size for size, _ in sorted(extents, key=lambda pair: (pair[0] > 1, pair[1]), reverse=True))


def _buffers(program: Program) -> tuple[int, ...]:
    """Bytes of the floating-point buffers that forward updates, which data parallelism exchanges in one piece each."""
    totals: dict[tuple[torch.dtype, torch.device], int] = {}
    for _, _, value in buffer_writes(program):
        kept = value_of(value)
        if kept.is_floating_point():
            key = (kept.dtype, kept.device)
            totals[key] = totals.get(key, 0) + storage_bytes(kept)
    return tuple(totals.values())


# --- the work around exchanges ---------------------------------------------------------------------------------------


def rates_of(device: torch.device, cost: str = "measured", profile: DeviceProfile | None = None) -> Rates:
    """What the work around exchanges costs on a device.

    Args:
        device: of the gradients.
        cost: ``measured`` (once on this device, and kept), ``roofline``, or the name of a device
            (``graphopt.analysis.costs.cost.COSTS``); with these two, selection takes the time of the bytes that it
            reads and writes.
        profile: of another device, whose figures are taken; by default that of the cost model, if it is one's.

    Raises:
        GraphoptError: for a device that is not here and whose figures are asked for.
    """
    other = profile or profile_of_cost(cost)
    copy = 1.0 / (other or profile_of(device)).memory_bandwidth
    if cost != "measured" or other is not None:
        return Rates(copy, _PASSES * torch.float32.itemsize * copy)
    figures = figures_of(device)
    taken = figures.once("profile", "sparse selection of an element", lambda: _selection_seconds(device))
    figures.save()
    return Rates(copy, taken)


def _selection_seconds(device: torch.device) -> Figure:
    """Seconds per element of momentum correction and selection, on numbers that are normally distributed."""
    drawn = torch.randn(_SELECTED_FROM, generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    u, v = torch.zeros_like(drawn), drawn.clone()

    def once() -> object:
        accumulate_(drawn, u, v, 0.9, False)
        return select(v, entries(_SELECTED_FROM, _SPARSITY))

    with plain_precision(), torch.no_grad():
        found = shortest_seconds(once, device)
    return Figure(found.value / _SELECTED_FROM, found.doubtful)
