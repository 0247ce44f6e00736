"""How far a rewritten program's tensors are from the original's: errors, overflow and underflow, tensor by tensor."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.names import match_names
from graphopt.ir.node import InputSpec
from graphopt.ir.program import Program
from graphopt.rewriting.precision.scaling import SCALE
from graphopt.runtime.comparison.lockstep import Kind, Pair, matched, paired_values

__all__ = ["Comparison", "TensorError", "Wanted", "compare_programs", "tensor_error", "within_tolerance"]

_CHUNK = 1 << 22
"""Elements that are compared at a time, in float64."""


@dataclass(frozen=True, slots=True)
class TensorError:
    """One tensor of two programs.

    Attributes:
        name: what users call it; gradients are called like their tensor, with ``~`` behind.
        kind: loss, output, gradient, parameter or buffer (as the program leaves them), or value (what a call computes).
        shape: sizes, the same in both.
        before: dtype in the original program.
        after: dtype in the rewritten program.
        max_error: the largest ``|after - before|``; infinite where one is finite and the other is not.
        relative_error: ``‖after - before‖ / ‖before‖`` in the 2-norm; 0 where both are zero, infinite where only
            ``before`` is, and where ``max_error`` is. Entries that are not finite in both count in neither norm, or in
            ``max_error`` where they differ.
        overflow: share of the elements that are finite in the original and infinite or not-a-number in the rewritten.
        underflow: share of the elements that are not zero in the original and zero in the rewritten; 0 for integers.
        bitwise: whether both have one dtype and the same bits.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    before: torch.dtype
    after: torch.dtype
    max_error: float
    relative_error: float
    overflow: float
    underflow: float
    bitwise: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two programs on the same batch from the same seed.

    Attributes:
        tensors: worst first: by relative error, then by overflow, underflow and the largest error.
        skipped: a line for each tensor that cannot be compared, since only one program has it or its shape changed.
    """

    tensors: tuple[TensorError, ...]
    skipped: tuple[str, ...] = ()

    @property
    def bitwise(self) -> bool:
        """Whether every tensor is equal to the last bit."""
        return all(tensor.bitwise for tensor in self.tensors)

    @property
    def worst(self) -> TensorError | None:
        """The tensor with the largest relative error; None where nothing was compared."""
        return self.tensors[0] if self.tensors else None

    def exceeding(self, tolerance: float) -> tuple[TensorError, ...]:
        """The tensors whose relative error is larger than ``tolerance``, worst first."""
        return tuple(tensor for tensor in self.tensors if not tensor.relative_error <= tolerance)


def compare_programs(
    before: Program,
    after: Program,
    inputs: Mapping[InputSpec, Any],
    *,
    tensors: Iterable[str] = (),
    kinds: Iterable[Kind] = (),
    seed: int = 0,
) -> Comparison:
    """Run two programs on the same inputs from the same seed, and compare their named tensors.

    Tensors are matched by name and provenance (``graphopt.runtime.comparison.lockstep.matched``): outputs, the loss,
    gradients by parameter, parameters and buffers that the program writes, and forward values under the names of
    modules' outputs and those of ``graphopt.name``. The programs run call by call, in turns; a value is compared when
    both have it, and then dropped, so memory stays that of two runs. Gradients that a joint program leaves multiplied
    by a loss scale are divided by it.

    Args:
        before: the original, of stage joint or step.
        after: the rewritten, of the same stage.
        inputs: the value of each input of both, by its description. Constants are not needed; pass state starts as the
            program says. Nothing given is changed.
        tensors: names or globs of the tensors to compare; these may be of the form ``path::op`` too, which are left out
            without any pattern.
        kinds: compare only tensors of these kinds.
        seed: of the random state that both programs start from.

    Raises:
        GraphoptError: for programs of different stages, a pattern that names nothing (with near names), or an input
            without a value.
    """
    pairs, skipped = _checked(before, after)
    chosen = Wanted(tuple(tensors), frozenset(kinds)).of(pairs)
    with contextlib.closing(_errors(before, after, chosen, inputs, seed)) as errors:
        rows = sorted(errors, key=_badness, reverse=True)
    return Comparison(tuple(rows), tuple(skipped))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which tensors are compared, as ``compare_programs`` has it; all without anything given.

    Attributes:
        tensors: names or globs.
        kinds: only tensors of these kinds.
    """

    tensors: tuple[str, ...] = ()
    kinds: frozenset[Kind] = frozenset()

    def of(self, pairs: Sequence[Pair]) -> list[Pair]:
        """These among ``pairs``; a value with several names comes once, under the first that fits.

        Raises:
            GraphoptError: for a pattern that names nothing (with near names).
        """
        names = self._names(pairs)
        fitting = [pair for pair in pairs if pair.name in names]
        if self.kinds:
            fitting = [pair for pair in fitting if pair.kind in self.kinds]
        results = [pair for pair in fitting if pair.kind != "value"]
        returned = {pair.before for pair in results}
        first_names: dict[fx.Node, Pair] = {}
        for pair in fitting:
            if pair.kind == "value" and pair.before not in returned:
                first_names.setdefault(pair.before, pair)
        return results + list(first_names.values())

    def _names(self, pairs: Sequence[Pair]) -> Container[str]:
        if self.tensors:
            return match_names(self.tensors, {pair.name: pair for pair in pairs}, "tensor that both programs have")
        return {pair.name for pair in pairs if not pair.by_op}


_ALL = Wanted()


def within_tolerance(
    before: Program,
    after: Program,
    inputs: Mapping[InputSpec, Any],
    tolerance: float,
    *,
    wanted: Wanted = _ALL,
    seed: int = 0,
) -> bool:
    """Whether no tensor has a larger relative error than ``tolerance``; the runs end at the first that has.

    Arguments and errors are those of ``compare_programs``.
    """
    pairs, _ = _checked(before, after)
    with contextlib.closing(_errors(before, after, wanted.of(pairs), inputs, seed)) as errors:
        return all(row.relative_error <= tolerance for row in errors)


def _checked(before: Program, after: Program) -> tuple[list[Pair], list[str]]:
    if before.stage != after.stage:
        raise GraphoptError(
            f"a {before.stage} program and a {after.stage} program cannot be compared: lower both to one stage"
        )
    return matched(before, after)


def _errors(
    before: Program, after: Program, pairs: list[Pair], inputs: Mapping[InputSpec, Any], seed: int
) -> Generator[TensorError]:
    scales = _loss_scale(before), _loss_scale(after)
    with contextlib.closing(paired_values(before, after, pairs, inputs, seed=seed)) as values:
        for pair, old, new in values:
            if pair.kind == "gradient":
                old, new = (
                    value if scale == 1 else value / scale for value, scale in zip((old, new), scales, strict=True)
                )
            yield tensor_error(pair, old, new)


def _loss_scale(program: Program) -> float:
    """What the gradients of a joint program are multiplied by: they are unscaled in front of the update."""
    state = program.pass_state.get(SCALE)
    inside = program.stage == "joint" and not program.inputs_of("tangent")
    return state.fill if state is not None and inside else 1.0


def _badness(row: TensorError) -> tuple[float, float, float, float]:
    return row.relative_error, row.overflow, row.underflow, row.max_error


def tensor_error(pair: Pair, before: torch.Tensor, after: torch.Tensor) -> TensorError:
    """Compare one tensor, in float64 (complex128 for complex numbers)."""
    largest = squares = norm = 0.0
    overflow = underflow = 0
    parts = zip(*(torch.split(tensor.reshape(-1), _CHUNK) for tensor in (before, after)), strict=True)
    for old, new in ((_wide(one), _wide(other)) for one, other in parts if one.numel()):
        finite, good = old.isfinite(), new.isfinite()
        same = (old == new) | (old.isnan() & new.isnan())
        error = torch.where(same, 0.0, (new - old).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        largest = max(largest, error.max().item())
        squares += error.square().sum().item()
        norm += torch.where(finite, old.abs(), 0.0).square().sum().item()
        overflow += int((finite & ~good).sum())
        underflow += int((finite & (old != 0) & (new == 0)).sum()) if _has_exponent(after) else 0
    relative = math.sqrt(squares) / math.sqrt(norm) if norm else math.inf if squares else 0.0
    count = max(before.numel(), 1)
    return TensorError(
        name=pair.name,
        kind=pair.kind,
        shape=tuple(before.shape),
        before=before.dtype,
        after=after.dtype,
        max_error=largest,
        relative_error=relative,
        overflow=overflow / count,
        underflow=underflow / count,
        bitwise=_same_bits(before, after),
    )


def _has_exponent(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _same_bits(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.dtype != after.dtype:
        return False
    bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (before, after))
    return torch.equal(*bits)
