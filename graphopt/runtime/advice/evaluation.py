"""One pipeline on one machine, as predicted: whether it fits, its peak, its seconds. Nothing of the model is run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.capture import CaptureSession
from graphopt.capture.joint.differentiation import JointCapture
from graphopt.errors import CaptureError, GraphoptError
from graphopt.ir.context import Context, PlanStore, StepContext
from graphopt.ir.node import Phase, Stage
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.prediction.predicted_step import (
    PredictedStep,
    mean_step,
    predicted_step,
    update_of_calls,
)
from graphopt.rewriting.memory.fit.budget import BudgetError, within_already
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.shards import Shards
from graphopt.rewriting.training_pass import Clock
from graphopt.runtime.advice.candidate_pipelines import Candidate
from graphopt.runtime.programs.rewrite import Rewritten, rewrite

__all__ = ["Evaluated", "Evaluator", "SharedCapture", "step_of_long_run"]

_STEPS = range(10_000, 11_000)
"""Steps of a long run, over which programs that alternate are averaged: warm-ups are over, and usual intervals fit."""


class SharedCapture(CaptureSession):
    """A capture that several pipelines rewrite one after the other: what two of them lower alike is lowered once.

    Attributes:
        lowered: the programs that were lowered, by what from, each with what the session knew of it then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As the base class."""
        super().__init__(*args, **kwargs)
        self.lowered: dict[object, tuple[Program, JointCapture | None]] = {}

    def forward(self, autocast: torch.dtype | None = None) -> Program:
        """See the base class."""
        self._precision = autocast
        return super().forward(autocast)

    def lower_forward(self, program: Program) -> Program:
        """See the base class."""
        return self._once(program, super().lower_forward)

    def lower_joint(self, program: Program, *, first: bool = False, shards: Shards | None = None) -> Program:
        """See the base class."""
        lower = super().lower_joint
        if first or shards is not None:
            return lower(program, first=first, shards=shards)
        return self._once(program, lower)

    def _once(self, program: Program, lower: Callable[[Program], Program]) -> Program:
        """The program that comes of one with these passes, and what this session knows of it."""
        key = (program.stage, self._precision, program.history)
        if key not in self.lowered:
            self.lowered[key] = lower(program), self.joint
        lowered, self.joint = self.lowered[key]
        lowered = lowered.copy()
        lowered.context = program.context
        return lowered


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What is predicted of a pipeline.

    Attributes:
        candidate: the pipeline.
        fits: whether it stays within the budget.
        taken: bytes at its peak; where the device's allocator keeps freed blocks, what it reserves; where no plan
            fits, the least that was found.
        step: how it runs; None where it does not.
        recomputed: ops that are recomputed.
        problem: why it is not possible, apart from memory; empty where it is.
    """

    candidate: Candidate
    fits: bool = False
    taken: int = 0
    step: PredictedStep | None = None
    recomputed: int = 0
    problem: str = ""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return math.inf if self.step is None else self.step.seconds

    @property
    def least_seconds(self) -> float:
        """What no plan within a budget goes below: its seconds, or those of its ops where parameters may stay gathered.

        What takes less memory takes no less time.
        """
        return self.step.compute if self.step is not None and self.candidate.gathers else self.seconds


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Predicts pipelines for one capture.

    Attributes:
        session: the capture.
        stage: the last one of its programs.
        context: of its programs.
        cost: where seconds come from.
        ranks: how many train together.
        budget: bytes that each has.
        calls: how many calls' gradients are added up for an update.
    """

    session: SharedCapture
    stage: Stage
    context: Context
    cost: str
    ranks: int
    budget: int
    calls: int = 1

    def __call__(self, candidate: Candidate) -> Evaluated:
        """What is predicted of a pipeline; a pass that refuses the program, or its machine, is a problem of it."""
        try:
            return self._evaluated(candidate)
        except GraphoptError as error:
            if isinstance(error, CaptureError) and not self.session.lowered:
                raise  # that of the model, whatever the passes
            cause = error if error.__cause__ is None else error.__cause__  # what the pass itself says
            if isinstance(cause, BudgetError):
                return Evaluated(candidate, taken=cause.smallest_bytes)
            return Evaluated(candidate, problem=str(cause).splitlines()[0])

    def _evaluated(self, candidate: Candidate) -> Evaluated:
        pipeline = Pipeline(candidate.pipeline)
        context = replace(self.context, plans=PlanStore(), step=StepContext())  # of this machine and pipeline alone
        rewritten = rewrite(self.session, pipeline, until=self.stage, context=context, divisor=self.calls, log=False)
        program, step = rewritten.program, step_of_long_run(rewritten, self.cost, self.ranks)
        fits, taken = self._fits(program)
        if self.calls > 1:
            before = rewritten.accumulating_call()
            others = self._fits(before)
            fits, taken = fits and others[0], max(taken, others[1])
            step = update_of_calls(step, predicted_step(before, self.cost, self.ranks), self.calls)
        recomputed = len(list(program.phase_nodes(Phase.RECOMPUTE)))
        return Evaluated(candidate, fits=fits, taken=taken, step=step, recomputed=recomputed)

    def _fits(self, program: Program) -> tuple[bool, int]:
        """Whether a program stays within the budget, and what it takes."""
        memory = program.memory()
        reserved = reserved_where_cached(program, memory)
        taken = memory.peak_bytes if reserved is None else reserved.reserved_peak_bytes
        return bool(within_already(memory, self.budget, reserved)), taken


def step_of_long_run(rewritten: Rewritten, cost: str, ranks: int) -> PredictedStep:
    """The mean step of a long run, in which several programs may alternate.

    Args:
        rewritten: a capture.
        cost: where the seconds of ops come from.
        ranks: how many train together.
    """
    passes = rewritten.pipeline.training
    forms = Counter(tuple((p.name, p.form(Clock(steps))) for p in passes) for steps in _STEPS)
    if len(forms) < 2:
        return predicted_step(rewritten.program, cost, ranks)
    joint = rewritten.updating(rewritten.stages["joint"])
    programs = [(rewritten.lower_joint(joint, forms=dict(form)), count) for form, count in forms.items()]
    return mean_step([(predicted_step(program, cost, ranks), count) for program, count in programs])
