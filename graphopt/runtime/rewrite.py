"""Capture, passes and lowering, stage by stage: what `optimize`, `optimize_step` and the command line share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from graphopt.capture import CaptureSession
from graphopt.ir.program import Program, Stage
from graphopt.report.console.progress import ShowPasses
from graphopt.report.console.terminal import working
from graphopt.rewriting.dump import DumpDirectory
from graphopt.rewriting.instruments import Instrument, LogPasses, Snapshots
from graphopt.rewriting.pipeline import PassRecord, Pipeline
from graphopt.rewriting.shards import Shards

__all__ = ["Rewritten", "Verify", "rewrite"]

Verify = Literal["structure", "numerics"] | bool


@dataclass
class Rewritten:
    """What came of one capture and its passes.

    Attributes:
        session: the capture.
        verify: how far each pass is checked.
        stages: the program of each stage after its passes.
        records: every pass that ran.
        snapshots: ``(label, program)`` after capture, after each lowering and after each pass.
    """

    session: CaptureSession
    verify: Verify = "structure"
    stages: dict[Stage, Program] = field(default_factory=dict)
    records: list[PassRecord] = field(default_factory=list)
    snapshots: list[tuple[str, Program]] = field(default_factory=list)

    @property
    def program(self) -> Program:
        """The program of the last stage."""
        return list(self.stages.values())[-1]

    def lower_joint(
        self, pipeline: Pipeline, *, first: bool = False, program: Program | None = None,
        forms: Mapping[str, str] | None = None,
    ) -> Program:  # fmt: skip
        """A step program, with its passes, of the rewritten joint program or of a variant of it.

        Args:
            pipeline: whose step passes run.
            first: make the program of the optimizer's first step, which creates its state.
            program: a variant of the joint program.
            forms: which of their programs passes want, by their names (``Pass.form``).
        """
        source = program or self.stages["joint"]
        lowered = self.session.lower_joint(source, first=first, shards=self.shards(pipeline))
        lowered.history = source.history
        lowered.forms, lowered.numbers, lowered.compiled = forms or {}, source.numbers, source.compiled
        pipeline.run(lowered, verify=self.verify)
        return lowered

    def shards(self, pipeline: Pipeline) -> Shards | None:
        """The part of each trained parameter that this rank updates; None for all of all."""
        return _shards(self.session, self.stages["joint"], pipeline)

    def finish(self, program: Program, pipeline: Pipeline) -> None:
        """Run the passes of the stage ``last`` on a variant of the joint program that runs without an update."""
        for current in pipeline.of("last"):
            Pipeline([current]).run(program, verify=self.verify)

    def retrace(self, pipeline: Pipeline) -> None:
        """Trace the optimizer again, after its settings changed."""
        self.stages["step"] = self.lower_joint(pipeline)


def rewrite(
    session: CaptureSession, pipeline: Pipeline, *, until: Stage, verify: Verify = "structure",
    numbers: dict[str, float] | None = None, compiled: bool = False,
) -> Rewritten:  # fmt: skip
    """Run a pipeline over a capture, lowering it to stage ``until``.

    Writes a run directory where the environment variable ``GRAPHOPT_DUMP`` names one, and says on a terminal what is
    being done.

    Args:
        session: the capture.
        pipeline: whose passes run.
        until: the last stage.
        verify: how far each pass is checked.
        numbers: of the step's clock, which passes read and add to (``Program.numbers``).
        compiled: whether a compiler makes the code that runs.
    """
    with working(f"capturing {session.forward.program.title or 'the model'}") as show:
        program = session.forward.program.copy()
        program.numbers, program.compiled = {} if numbers is None else numbers, compiled
        return _rewrite(session, program, pipeline, until, verify, show)


def _rewrite(
    session: CaptureSession, program: Program, pipeline: Pipeline, until: Stage, verify: Verify,
    show: Callable[[str], None],
) -> Rewritten:  # fmt: skip
    result = Rewritten(session, verify)
    snapshots = Snapshots()
    instruments: list[Instrument] = [LogPasses(), ShowPasses(show), snapshots]
    dump = DumpDirectory.from_environment(session, pipeline)
    if dump is not None:
        instruments.append(dump)
    while True:
        snapshots.record(f"captured {program.stage}", program)
        if dump is not None:
            dump.record(f"captured-{program.stage}", program)
        last = program.stage == until
        result.records += pipeline.run(program, last=last, verify=verify, instruments=instruments)
        result.stages[program.stage] = program
        if program.stage == until:
            break
        show(f"lowering the {program.stage} stage")
        lowered = _lower(session, program, pipeline)
        lowered.history, lowered.numbers, lowered.compiled = program.history, program.numbers, program.compiled
        program = lowered
    result.snapshots = snapshots.programs
    if dump is not None:
        dump.finish(result.records)
    return result


def _lower(session: CaptureSession, program: Program, pipeline: Pipeline) -> Program:
    if program.stage == "forward":
        return session.lower_forward(program)
    return session.lower_joint(program, shards=_shards(session, program, pipeline))


def _shards(session: CaptureSession, program: Program, pipeline: Pipeline) -> Shards | None:
    return pipeline.shards({name: parameter.numel() for name, parameter in session.trained(program).items()})
