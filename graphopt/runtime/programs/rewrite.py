"""Capture, passes and lowering, stage by stage: what `optimize`, `optimize_step` and the command line share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.ir.context import Context
from graphopt.ir.node import Stage, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.dump import DumpDirectory
from graphopt.rewriting.instruments import Instrument, LogPasses, ShowPasses, Snapshots
from graphopt.rewriting.memory.order.overlapped_exchanges import overlap_exchanges
from graphopt.rewriting.pass_ import Pass, PassRecord
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.progress import working
from graphopt.rewriting.shards import Shards
from graphopt.runtime.programs.accumulate import accumulating

__all__ = ["Checks", "Keeper", "Rewritten", "Verify", "capturing", "rewrite"]

_SHOWN = 3
"""Tensors of a call that are written out where it is captured."""

Verify = Literal["structure", "numerics"] | bool


class Keeper(Protocol):
    """Where the programs of a capture are kept beyond this process."""

    @property
    def loaded(self) -> bool:
        """Whether the capture was read from there."""
        ...

    @property
    def state(self) -> Sequence[str]:
        """The optimizer state that the step program of a capture that was read takes."""
        ...

    @property
    def pass_state(self) -> Mapping[str, PassState]:
        """What passes keep in the program of a capture that was read."""
        ...

    @property
    def unlimited(self) -> Program:
        """The program before the passes that keep it within a number of bytes, of a capture that was read."""
        ...

    def variant(self, name: str, make: Callable[[], Program]) -> Program:
        """A program beside those of the stages: read, or made and written."""
        ...


@dataclass
class Rewritten:
    """What came of one capture and its passes.

    Attributes:
        session: the capture.
        pipeline: the passes.
        verify: how far each pass is checked.
        stages: the program of each stage after its passes.
        records: every pass that ran.
        snapshots: ``(label, program)`` after capture, after each lowering and after each pass.
        seconds: that capture, lowering and passes took, or reading them.
        ahead: seconds of these that the programs of other calls took, which are made before the first one runs.
        compiling: seconds that a compiler took for the first of its programs; 0 without one.
        entry: where programs of this capture are kept beyond the process; None for nowhere.
        variants: its programs beside those of the stages, as far as they were needed, by what they depend on.
        divisor: for how many batches the program of the stage step updates, as the last of them; 0 for a sum of
            however many. Its inputs are the gradients of those before.
    """

    session: CaptureSession
    pipeline: Pipeline
    verify: Verify = "structure"
    stages: MutableMapping[Stage, Program] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    snapshots: Sequence[tuple[str, Program]] = field(default_factory=list)
    seconds: float = 0.0
    ahead: float = 0.0
    compiling: float = 0.0
    entry: Keeper | None = None
    variants: dict[str, Program] = field(default_factory=dict)
    divisor: int = 1

    @property
    def program(self) -> Program:
        """The program of the last stage."""
        return self.stages[list(self.stages)[-1]]

    @property
    def loaded(self) -> bool:
        """Whether it was read from the cache instead of being captured."""
        return self.entry is not None and self.entry.loaded

    @property
    def state(self) -> Sequence[str]:
        """The optimizer state that the program takes, by target; without reading a program for it."""
        if self.entry is not None and self.entry.loaded:
            return self.entry.state
        return [spec.target for _, spec in self.program.inputs_of("state")]

    @property
    def pass_state(self) -> Mapping[str, PassState]:
        """What passes keep in the program; without reading a program for it."""
        return self.entry.pass_state if self.entry is not None and self.entry.loaded else self.program.pass_state

    def variant(self, name: str, make: Callable[[], Program]) -> Program:
        """A program of this capture beside those of its stages, which may be kept beyond the process.

        Args:
            name: says everything that it depends on beside the capture.
            make: makes it.
        """
        if name not in self.variants:
            self.variants[name] = make() if self.entry is None else self.entry.variant(name, make)
        return self.variants[name]

    def unlimited(self, limited: Iterable[Pass]) -> Program:
        """The last program before the passes that keep it within a number of bytes.

        Args:
            limited: these passes.
        """
        if self.entry is not None and self.entry.loaded:
            return self.entry.unlimited
        specs = {str(current) for current in limited}
        stage = self.program.stage
        return [p for _, p in self.snapshots if p.stage == stage and specs.isdisjoint(p.history)][-1]

    def lower(self, program: Program) -> Program:
        """The program of the next stage, as it is before the passes of that stage."""
        if program.stage == "forward":
            return self.session.lower_forward(program)
        return self.session.lower_joint(self.updating(program), shards=self._shards(program))

    def updating(self, joint: Program) -> Program:
        """The joint program of the call that updates, with the gradients of those before where there are several."""
        if self.divisor == 1:
            return joint
        return accumulating(joint, self.divisor, self.session.trained(joint))

    def accumulating_call(self) -> Program:
        """The program of a call in between, where several calls' gradients are added up for an update.

        The optimizer's state, which it does not read, is in memory beside it.
        """
        begun = {spec.target for _, spec in self.program.inputs_of("gradient")}
        program = accumulating(self.stages["joint"], self.divisor, begun, last=False)
        there = {
            (spec.role, spec.target): value_of(node)
            for node, spec in self.program.inputs_of("state", "pass_state")
            if not schema.resides_elsewhere(node)
        }
        program.context = program.context.with_persistent(there)
        self.finish(program)
        return program

    @no_collection()
    def lower_joint(self, program: Program, *, first: bool = False, forms: Mapping[str, str] | None = None) -> Program:
        """A step program, with its passes, of the rewritten joint program or of a variant of it.

        Args:
            program: the one of stage joint; it is only read.
            first: make the program of the optimizer's first step, which creates its state.
            forms: which of their programs passes want, by their names (``TrainingPass.form``).
        """
        lowered = self.session.lower_joint(program, first=first, shards=self.shards)
        lowered.context = replace(lowered.context, step=replace(lowered.context.step, forms=forms or {}))
        self.pipeline.run(lowered, verify=self.verify)
        self.overlap(lowered)
        return lowered

    def overlap(self, program: Program) -> int:
        """Let what a program exchanges for sharded parameters run beside the computation; returns how many move."""
        return overlap_exchanges(program, limited=any(current.has_limit for current in self.pipeline.passes))

    @property
    def shards(self) -> Shards | None:
        """The part of each trained parameter that this rank updates; None for all of all."""
        return self._shards(self.stages["joint"]) if self.pipeline.training else None

    def _shards(self, joint: Program) -> Shards | None:
        trained = self.session.trained(joint)
        return self.pipeline.shards({name: parameter.numel() for name, parameter in trained.items()})

    def finish(self, program: Program) -> None:
        """Run the passes of the stage ``last`` on a variant of the joint program that runs without an update."""
        for current in self.pipeline.of("last"):
            self.pipeline.alone(current).run(program, verify=self.verify)
        self.overlap(program)

    def replace(self, program: Program) -> None:
        """Take another step program, which does the same with inputs of its own."""
        self.stages["step"] = program
        self.variants.clear()
        self.entry = None  # what is kept has been traced with the settings as they were

    def retrace(self) -> None:
        """Trace the optimizer again, after its settings changed."""
        with working(f"tracing the optimizer of {self.session.title} with its other settings"):
            self.replace(self.lower_joint(self.updating(self.stages["joint"])))


@dataclass(frozen=True)
class Checks:
    """What is checked of programs while passes run.

    Attributes:
        verify: how far each pass is checked.
        accept: is called with the program of each stage before its passes, and may refuse it.
    """

    verify: Verify = "structure"
    accept: Callable[[Program], None] | None = None


def capturing(session: CaptureSession) -> str:
    """What is shown while a session is captured: of what, and for which call."""
    tensors = [type_text(t) for t in _torch.pytree.tree_leaves(session.example) if isinstance(t, torch.Tensor)]
    shown = ", ".join([*tensors[:_SHOWN], *(["…"] if len(tensors) > _SHOWN else [])])
    return f"capturing {session.title}{shown and f' for {shown}'}"


@no_collection()
def rewrite(
    session: CaptureSession,
    pipeline: Pipeline,
    *,
    until: Stage,
    checks: Checks | None = None,
    context: Context | None = None,
    divisor: int = 1,
    log: bool = True,
) -> Rewritten:
    """Run a pipeline over a capture, lowering it to stage ``until``.

    Writes a run directory where the environment variable ``GRAPHOPT_DUMP`` names one, and says on a terminal what is
    being done.

    Args:
        session: the capture.
        pipeline: whose passes run.
        until: the last stage.
        checks: what is checked of the programs; each pass's structure by default.
        context: of the programs; an empty one by default.
        divisor: as ``Rewritten`` has it.
        log: log what each pass does.
    """
    checks = checks or Checks()
    result = Rewritten(session, pipeline, checks.verify, divisor=divisor)
    started = time.perf_counter()
    snapshots = Snapshots()
    with working(capturing(session)) as show:
        instruments: list[Instrument] = [*([LogPasses()] if log else []), ShowPasses(show), snapshots]
        dump = DumpDirectory.from_environment(session.title, pipeline)
        if dump is not None:
            instruments.append(dump)
        program = session.forward(pipeline.autocast)
        program.context = context or Context()
        while True:
            snapshots.record(f"captured {program.stage}", program)
            if checks.accept is not None:
                checks.accept(program)
            if dump is not None:
                dump.record(f"captured-{program.stage}", program)
            last = program.stage == until
            result.records += pipeline.run(program, last=last, verify=checks.verify, instruments=instruments)
            result.stages[program.stage] = program
            if last:
                if result.overlap(program):
                    snapshots.record("exchanges beside the computation", program)
                break
            show(f"lowering the {program.stage} stage")
            program = result.lower(program)
        result.snapshots = snapshots.programs
        result.seconds = time.perf_counter() - started
        if dump is not None:
            dump.finish(result.records)
    return result
