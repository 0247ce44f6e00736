"""A target's original program beside what passes make of it, with the inputs to run both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.errors import GraphoptError
from graphopt.ir.node import InputSpec, value_of
from graphopt.ir.program import Program
from graphopt.rewriting.instruments import Instrument
from graphopt.rewriting.pass_ import PassRecord
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.precision.scaling import SCALE
from graphopt.runtime.comparison.lockstep import Kind
from graphopt.runtime.comparison.tensor_errors import Comparison, Wanted, compare_programs, within_tolerance
from graphopt.runtime.programs.binding import Binding

__all__ = ["Outcome", "Trial"]

_SUPPLIED = ("tangent", "pass_state", "constant")
"""Roles of inputs that a binding to the model and the optimizer does not give."""


_LOWER = 16
"""How much lower each further loss scale is that is tried."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What passes made of a program.

    Attributes:
        forward: the forward program after its passes.
        program: the program that runs: forward and backward, or with the update.
        records: what each pass did.
    """

    forward: Program
    program: Program
    records: tuple[PassRecord, ...]


@dataclass
class Trial:
    """One capture, to try passes on: the original program, and how far rewritten ones are from it.

    Args:
        session: the capture, with the example inputs, which are the batch.
        stage: ``joint``, or ``step`` where there is an optimizer. A step is any but the first, which creates the
            optimizer's state; state that is not there yet is 0, which is what most optimizers create.
        seed: of the random state that every run starts from.
    """

    session: CaptureSession
    stage: Literal["joint", "step"]
    seed: int = 0
    original: Outcome = field(init=False)

    def __post_init__(self) -> None:
        if self.stage == "step" and self.session.optimizer is None:
            raise GraphoptError("the step stage holds the optimizer's update: give an optimizer, or compare at joint")
        self.original = self.rewrite(Pipeline(), verify=False)

    def rewrite(self, pipeline: Pipeline, *, verify: bool = True, instruments: Sequence[Instrument] = ()) -> Outcome:
        """Run passes over the capture, up to this trial's stage.

        Raises:
            PassError: where a pass fails.
            VerifyError: where it leaves a program that is not valid.
        """
        forward = self.session.forward(pipeline.autocast)
        records = pipeline.run(forward, last=False, verify=verify, instruments=instruments)
        program = self.session.lower_forward(forward)
        records += pipeline.run(program, last=self.stage == "joint", verify=verify, instruments=instruments)
        if self.stage == "step":
            program = self.session.lower_joint(program)
            records += pipeline.run(program, verify=verify, instruments=instruments)
        return Outcome(forward, program, tuple(records))

    def compare(self, program: Program, *, tensors: Iterable[str] = (), kinds: Iterable[Kind] = ()) -> Comparison:
        """How far a rewritten program of this trial's stage is from the original on the example inputs.

        Args:
            program: what ``rewrite`` gave.
            tensors: names or globs, as for ``compare_programs``.
            kinds: compare only tensors of these kinds.

        Raises:
            GraphoptError: for a pattern that names nothing.
        """
        before, inputs = self.original.program, self._both(program)
        return compare_programs(before, program, inputs, tensors=tensors, kinds=kinds, seed=self.seed)

    def within(
        self,
        program: Program,
        tolerance: float,
        *,
        tensors: Iterable[str] = (),
        kinds: Iterable[Kind] = (),
        settle: bool = False,
    ) -> bool:
        """Whether no tensor's relative error is larger than ``tolerance``; see ``compare``.

        Args:
            program: what ``rewrite`` gave.
            tolerance: relative, in the 2-norm.
            tensors: as for ``compare``.
            kinds: as for ``compare``.
            settle: where the loss is scaled, also try lower scales, as training finds them after skipped steps.
        """
        before, inputs = self.original.program, self._both(program)
        wanted = Wanted(tuple(tensors), frozenset(kinds))
        for scaled in _settling(program) if settle else (program,):
            if within_tolerance(before, scaled, inputs, tolerance, wanted=wanted, seed=self.seed):
                return True
        return False

    def _both(self, program: Program) -> dict[InputSpec, Any]:
        return {**self._inputs(self.original.program), **self._inputs(program)}

    def _inputs(self, program: Program) -> dict[InputSpec, Any]:
        """What the model, the optimizer and the batch give, zeros for missing state, tangents of a loss outside."""
        described = list(zip(program.placeholders, program.inputs, strict=True))
        bound = [(node, spec) for node, spec in described if spec.role not in _SUPPLIED and self._exists(spec)]
        graph = fx.Graph()
        for node, _ in bound:
            graph.placeholder(node.name).meta = dict(node.meta)
        graph.output(())
        bare = Program(graph, program.stage, [spec for _, spec in bound], [])
        values = Binding(bare, self.session.model, self.session.optimizer).gather(self.session.captured.example_tensors)
        found = dict(zip(bare.inputs, values, strict=True))
        for node, spec in described:
            if spec.role == "tangent":
                found[spec] = _tangent(value_of(node))
            elif not self._exists(spec):
                value = value_of(node)
                found[spec] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return found

    def _exists(self, spec: InputSpec) -> bool:
        """False for a piece of state that the optimizer has not created yet."""
        if spec.role != "state" or self.session.optimizer is None:
            return True
        name, key = spec.target.rsplit("/", 1)
        return key in self.session.optimizer.state.get(self.session.tensors()[name], {})


def _settling(program: Program) -> Iterator[Program]:
    """The program with its loss scale, and with lower ones down to 1; itself where nothing is scaled."""
    state = program.pass_state.get(SCALE)
    if state is None:
        yield program
        return
    scale = state.fill
    while scale >= 1:
        yield replace(program, pass_state={**program.pass_state, SCALE: replace(state, fill=scale)})
        scale /= _LOWER


def _tangent(value: torch.Tensor) -> torch.Tensor:
    """A tangent as a mean has it, with entries that differ: constant ones vanish behind normalisations."""
    sizes = [_torch.size_hint(size) for size in value.shape]
    count = math.prod(sizes)
    steps = torch.arange(count, dtype=torch.float64, device=value.device)
    return steps.mul(0.7).cos().div(max(count, 1)).to(value.dtype).reshape(sizes)
