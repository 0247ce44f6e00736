"""Low-rank exchange in a program: two factors of each gradient travel in place of all of its elements.

Each rank keeps what its factors left out (``error``, as a matrix in float32, or float64 for float64), and the factor
``Q`` of the last step, from which the next one starts. Both factors of all gradients of a bucket travel together. The
first starts beside backward; the second, which is computed from it, in front of the update.

Source: Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019 (arXiv 1905.13727).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.communication.low_rank import cold_basis, orthonormal, remember_, warm_basis
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.distributed.dense.all_reduce import gradient_readers
from graphopt.rewriting.distributed.flat_exchange import behind, flat, memory_strides, read_parts, start_exchange

__all__ = ["Factors", "Settings", "exchange_low_rank", "factors_of"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Settings:
    """How gradients are approximated.

    Attributes:
        rank: of the factors.
        rate: how many times fewer elements the factors must have.
        seed: of the first basis; the same on all ranks.
        error_feedback: whether what is left out is added to the next gradient.
        warm_start: whether a step starts from the factor of the last one.
    """

    rank: int = 1
    rate: float = 2.0
    seed: int = 0
    error_feedback: bool = True
    warm_start: bool = True


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrix that a gradient is, and the factors ``[rows, rank]`` and ``[columns, rank]`` that travel for it.

    Attributes:
        rows: of the matrix: the outermost dimension in memory (the first one of a contiguous tensor).
        columns: of the matrix: all other dimensions, in the order of memory.
        rank: of the factors.
    """

    rows: int
    columns: int
    rank: int

    @property
    def elements(self) -> int:
        """That travel."""
        return (self.rows + self.columns) * self.rank


def factors_of(gradient: torch.Tensor, settings: Settings) -> Factors | None:
    """The factors of a gradient; None where they would not have few enough elements, by torch's rule."""
    if gradient.dim() < 2 or gradient.numel() == 0:
        return None
    strides = memory_strides(gradient)
    outermost = max(range(gradient.dim()), key=lambda place: (gradient.shape[place] > 1, strides[place]))
    rows = gradient.shape[outermost]
    columns = gradient.numel() // rows
    found = Factors(rows, columns, min(rows, columns, settings.rank))
    return found if found.elements * settings.rate < rows * columns else None


@dataclass(slots=True)
class _Member:
    """One gradient on its way: its calls as they are made."""

    name: str
    gradient: fx.Node
    factors: Factors
    readers: list[fx.Node]
    matrix: fx.Node
    error: fx.Node | None
    kept: fx.Node | None
    p: fx.Node
    q: fx.Node | None = None


def exchange_low_rank(
    program: Program,
    buckets: Sequence[Mapping[str, fx.Node]],
    settings: Settings,
    group: Group,
    origin: str,
    skip: fx.Node | None = None,
) -> None:
    """Replace gradients, in what the update reads, by the mean of the ranks' low-rank approximations.

    Nothing that is not finite enters what is kept: where the factors of a bucket are not finite on all ranks, residuals
    and factors stay as they were, and the update gets what is not finite, as from dense exchange.

    Args:
        program: of stage step.
        buckets: gradients of one dtype and device each, by the names of their parameters; all have factors.
        settings: of the approximation.
        group: at least two ranks.
        origin: the pass that asks.
        skip: one element, 1 where all ranks skip the update, behind which gradients are read; None where none does.
    """
    build = _Builder(program, settings, group, origin, skip)
    position = {node: index for index, node in enumerate(program.graph.nodes)}
    started = [build.start(gradients, position) for gradients in buckets]
    readers = [reader for members, _ in started for member in members for reader in member.readers]
    build.place = min(readers, key=position.__getitem__)
    again = [(members, p, build.second(members, p)) for members, p in started]
    for members, p, q in again:
        build.finish(members, p, q)


class _Builder:
    """Inserts the calls, all in front of ``place``."""

    def __init__(self, program: Program, settings: Settings, group: Group, origin: str, skip: fx.Node | None) -> None:
        self.place: fx.Node = program.output_node
        self._program = program
        self._settings = settings
        self._group = group
        self._origin = origin
        self._skip = skip
        self._numbered = 0
        self._step: fx.Node | None = None

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **more: Any) -> fx.Node:
        return self._program.insert(
            target, args, kwargs, before=self.place, phase=Phase.SYNC, origin=self._origin, **more
        )

    # --- the first factor --------------------------------------------------------------------------------------------

    def start(self, gradients: Mapping[str, fx.Node], position: Mapping[fx.Node, int]) -> tuple[list[_Member], fx.Node]:
        """Compute and send the first factors of one bucket, as soon as its gradients are there."""
        needed = list(gradients.values()) if self._skip is None else [*gradients.values(), self._skip]
        latest = max(needed, key=position.__getitem__)
        self.place = behind(self._program, latest)
        members = []
        for name, node in gradients.items():
            readers = [user for user in gradient_readers(node) if position[user] > position[latest]]
            members.append(self._member(name, node, readers))
        origin = f"{self._origin}: first factors"
        return members, start_exchange(
            self._program, [member.p for member in members], self.place, self._group, "mean", origin
        )

    def _member(self, name: str, gradient: fx.Node, readers: list[fx.Node]) -> _Member:
        value = value_of(gradient)
        factors = factors_of(value, self._settings)
        assert factors is not None
        dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
        shape = (factors.rows, factors.columns)
        elements = flat(self._program, gradient, self.place, {"phase": Phase.SYNC, "origin": self._origin})
        matrix = self._call(aten.view.default, (elements, list(shape)), like=gradient)
        error = None
        if self._settings.error_feedback:
            error = self._state("error", name, PassState(shape, dtype, value.device, local=True))
            matrix = self._call(aten.add.Tensor, (error, matrix), like=gradient)
        elif value.dtype is not dtype:
            matrix = self._call(aten._to_copy.default, (matrix,), {"dtype": dtype}, like=gradient)
        kept, basis = self._basis(name, matrix, factors)
        p = self._call(aten.mm.default, (matrix, basis), like=gradient, hint="p")
        return _Member(name, gradient, factors, readers, matrix, error, kept, p)

    def _state(self, what: str, name: str, state: PassState) -> fx.Node:
        return self._program.add_state(f"{self._origin}/{what}/{name}", state)

    def _basis(self, name: str, matrix: fx.Node, factors: Factors) -> tuple[fx.Node | None, fx.Node]:
        """What is kept of the last step, if anything, and the basis of this one."""
        key = (self._settings.seed << 20) + self._numbered
        self._numbered += 1
        value = value_of(matrix)
        if self._settings.warm_start:
            shape = (factors.columns, factors.rank)
            kept = self._state("q", name, PassState(shape, value.dtype, value.device))
            return kept, self._call(warm_basis, (kept, key), hint="basis")
        if self._step is None:
            self._step = self._program.add_state(f"{self._origin}/step", PassState((), torch.int64, value.device))
            end = self._program.output_node
            count = (self._step, 1)
            self._program.insert(aten.add_.Tensor, count, before=end, phase=Phase.SYNC, origin=self._origin)
        return None, self._call(cold_basis, (matrix, factors.rank, key, self._step), hint="basis")

    # --- the second factor, and the result ---------------------------------------------------------------------------

    def second(self, members: Sequence[_Member], start: fx.Node) -> fx.Node:
        """Wait for the first factors of one bucket; compute and send the second ones."""
        sums = read_parts(self._program, start, [member.p for member in members], self.place, self._origin)
        for member, total in zip(members, sums, strict=True):
            member.p = self._call(orthonormal, (total,), like=member.gradient)
            turned = self._call(aten.t.default, (member.matrix,))
            member.q = self._call(aten.mm.default, (turned, member.p), like=member.gradient, hint="q")
        factors = [member.q for member in members if member.q is not None]
        origin = f"{self._origin}: second factors"
        return start_exchange(self._program, factors, self.place, self._group, "mean", origin)

    def finish(self, members: Sequence[_Member], first: fx.Node, second: fx.Node) -> None:
        """Wait for the second factors of one bucket; what they make is what the update reads."""
        factors = [member.q for member in members if member.q is not None]
        means = read_parts(self._program, second, factors, self.place, self._origin)
        keep = self._keep(first, second)
        for member, q in zip(members, means, strict=True):
            turned = self._call(aten.t.default, (q,))
            sent = self._call(aten.mm.default, (member.p, turned), like=member.gradient, hint="sent")
            value = value_of(member.gradient)
            if value_of(sent).dtype is not value.dtype:
                sent = self._call(aten._to_copy.default, (sent,), {"dtype": value.dtype}, like=member.gradient)
            if member.error is not None:
                self._call(remember_, (member.error, member.matrix, sent, keep), like=member.gradient)
            if member.kept is not None:
                renewed = self._call(aten.where.self, (keep, q, member.kept))
                self._call(aten.copy_.default, (member.kept, renewed))
            layout = (sent, list(value.shape), list(memory_strides(value)))
            mean = self._call(aten.as_strided.default, layout, like=member.gradient)
            self._program.hand_over_name(f"{member.name}~", member.gradient, mean)
            for reader in member.readers:
                reader.replace_input_with(member.gradient, mean)

    def _keep(self, *starts: fx.Node) -> fx.Node:
        """Whether what ranks have exchanged is finite, and the update is not skipped: the same on all ranks."""
        arrived = [done for start in starts for done in start.users]
        finite = [self._call(aten.all.default, (self._call(aten.isfinite.default, (done,)),)) for done in arrived]
        if self._skip is not None:
            finite.append(self._call(aten.all.default, (self._call(aten.eq.Scalar, (self._skip, 0)),)))
        keep = finite[0]
        for other in finite[1:]:
            keep = self._call(aten.logical_and.default, (keep, other))
        return keep
