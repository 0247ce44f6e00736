"""What is recommended for a model on a machine: a pipeline, what is predicted of it, and why it is that one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphopt.ir.words.written_units import counted, format_bytes, format_seconds
from graphopt.rewriting.distributed.prediction.predicted_step import PredictedStep
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.advice.evaluation import Evaluated

__all__ = ["Advice"]

_WAITS = 0.05
"""The share of a step from which on waiting is said to be what limits it."""

_FASTER = 1.01
"""How many times as long a step has to take as without its budget for this to be what limits it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A pipeline for a model on a machine; ``print`` shows it, and ``to_json`` has the same as data.

    Attributes:
        chosen: the pipeline, and what is predicted of it.
        evaluated: every pipeline that was looked at, the best first; those that do not fit or are not possible last.
        budget: bytes that a device has for the program.
        beside: bytes of a device's memory that its driver takes.
        machine: what it is for, for people.
        unconsidered: what was not looked at, and why.
        rows: of the batch of one device's call, where they were chosen; 0 where the batch was given.
        calls: over how many calls gradients are accumulated for an update.
        batches: the other sizes of a call that were weighed, each in words.

    Example:
        >>> advice = graphopt.advise(
        ...     model, optimizer, (x,), loss=loss, memory="1GB", devices=2, device="a100-80gb", network="10Gbit"
        ... )
        >>> advice.pipeline
        'data-parallel'
    """

    chosen: Evaluated
    evaluated: Sequence[Evaluated]
    budget: int
    beside: int
    machine: str
    unconsidered: Sequence[str]
    rows: int = 0
    calls: int = 1
    batches: Sequence[str] = ()

    @property
    def pipeline(self) -> str:
        """The text that ``passes=`` and ``--passes`` take."""
        return self.chosen.candidate.pipeline

    @property
    def passes(self) -> Pipeline:
        """The same as passes."""
        return Pipeline(self.pipeline)

    @property
    def step(self) -> PredictedStep:
        """How it runs."""
        assert self.chosen.step is not None
        return self.chosen.step

    @property
    def runner_up(self) -> Evaluated | None:
        """The best of the others that fit; None where no other one does."""
        others = (one for one in self.evaluated if one.fits and one.candidate != self.chosen.candidate)
        return next(others, None)

    @property
    def limit(self) -> str:
        """What keeps the step from being faster: ``memory``, ``communication``, ``copies`` or ``compute``."""
        step = self.step
        if self._larger:
            return "memory"
        if step.waited > _WAITS * step.seconds:
            return "communication" if step.exchanges >= step.copies else "copies"
        return "compute"

    @property
    def changes(self) -> list[str]:
        """What would change the choice."""
        found = []
        if self._larger:
            one = min(self._larger, key=lambda other: (other.taken, other.seconds))
            gain = self.step.seconds / one.seconds - 1
            memory = format_bytes(one.taken + self.beside)
            found.append(f"with {memory} on each device: {one.candidate}, {gain:.1%} faster")
        if self.limit == "communication":
            gain = self.step.seconds / (self.step.seconds - self.step.waited) - 1
            found.append(f"with a network that is never waited for: {gain:.1%} faster")
        return found

    @property
    def _larger(self) -> list[Evaluated]:
        """What would be faster, and does not fit."""
        large = [one for one in self.evaluated if not one.fits and not one.problem]
        return [one for one in large if self.step.seconds > _FASTER * one.seconds]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        runner_up = self.runner_up
        return {
            "pipeline": self.pipeline,
            "machine": self.machine,
            "budget_bytes": self.budget,
            "beside_bytes": self.beside,
            "limit": self.limit,
            "rows": self.rows or None,
            "accumulation": self.calls,
            "batches": list(self.batches),
            **_evaluated_json(self.chosen),
            "runner_up": None if runner_up is None else _evaluated_json(runner_up),
            "changes": self.changes,
            "candidates": [_evaluated_json(one) for one in self.evaluated],
            "not_considered": list(self.unconsidered),
        }

    def __str__(self) -> str:
        lines = [*self.summary(), "", *self._table(), ""]
        lines += [f"not considered       {text}" for text in self.unconsidered]
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """The choice, what is predicted of it, and why it is that one, line by line."""
        chosen, step = self.chosen, self.step
        lines = [
            f"passes               {self.pipeline or 'none'}",
            f"for                  {self.machine}, {format_bytes(self.budget)} for the program on each device",
            *self._batch(),
            f"at the peak          {format_bytes(chosen.taken)}{self._again()}",
            *step.lines(),
            f"limited by           {self.limit}",
        ]
        if step.arithmetic:
            least = step.utilization * step.seconds / step.at_most
            range_ = (
                f"{step.utilization:.0%}" if least == step.utilization else f"{least:.0%} to {step.utilization:.0%}"
            )
            behind = lines.index(step.lines()[0]) + 1
            lines.insert(behind, f"utilization          {range_} of the device's published peak (MFU)")
        if (other := self.runner_up) is not None:
            slower = other.seconds / step.seconds - 1
            told = f"{abs(slower):.1%} {'slower' if slower >= 0 else 'faster, and further from the baseline'}"
            lines.append(f"runner-up            {other.candidate}: {told}, {format_bytes(other.taken)}")
        lines += [f"other batches        {text}" for text in self.batches]
        return lines + [f"would change it      {text}" for text in self.changes]

    def _batch(self) -> list[str]:
        """What a call takes, where that was chosen."""
        if not self.rows:
            return []
        several = f"{self.calls} calls: step.accumulate({self.calls})" if self.calls > 1 else "one call"
        return [f"batch                {counted(self.rows, 'rows')} on each device, an update in {several}"]

    def _again(self) -> str:
        return f", {self.chosen.recomputed} ops recomputed" if self.chosen.recomputed else ""

    def _table(self) -> list[str]:
        rows = [_row(one, self.step.seconds) for one in self.evaluated]
        width = max(len(str(one.candidate)) for one in self.evaluated)
        return [f"{one.candidate!s:{width}}  {row}" for one, row in zip(self.evaluated, rows, strict=True)]


def _row(one: Evaluated, best: float) -> str:
    if one.problem:
        return f"not possible: {one.problem}"
    if one.fits:
        return f"{format_bytes(one.taken)}, {format_seconds(one.seconds)}, x{one.seconds / best:.2f}"
    least = "" if one.step is not None else " at least"
    return f"does not fit: {format_bytes(one.taken)}{least}"


def _evaluated_json(one: Evaluated) -> Mapping[str, Any]:
    return {
        "passes": one.candidate.pipeline,
        "fits": one.fits,
        "bytes": one.taken,
        "recomputed_ops": one.recomputed,
        "problem": one.problem,
        "step": None if one.step is None else one.step.to_json(),
    }
