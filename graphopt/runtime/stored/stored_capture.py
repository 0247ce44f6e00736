"""One capture in its files: its programs, and beside them everything that is needed to run them.

What is read is checked: the file by its digest, the data field by field, the program by the rules of programs, its
inputs against the live model, optimizer and call. Whatever fails is a ``GraphoptError``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphopt.capture import CaptureSession
from graphopt.capture.call.flatten import flatten
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.capture.dynamo.graph_part import GraphPart
from graphopt.capture.joint.replayed_trace import replay_trace
from graphopt.errors import GraphoptError
from graphopt.ir.context import Context, PlannedSizes
from graphopt.ir.files.checked_json import Field
from graphopt.ir.files.deserialization import from_json, read_pass_state
from graphopt.ir.files.serialization import to_json
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.node import InputSpec, Stage
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.ir.verify import verify
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.programs.rewrite import Checks, Rewritten, Verify, rewrite
from graphopt.runtime.stored.capture_content import (
    LazySnapshots,
    LazyStages,
    read_questions,
    read_records,
    refuse_process_bound,
    write_questions,
    write_records,
)
from graphopt.runtime.stored.live_inputs import check_inputs, live_constants
from graphopt.runtime.stored.program_files import HEADER, ProgramFiles
from graphopt.runtime.stored.program_key import Key
from graphopt.runtime.stored.result_structure import read_structure, write_structure
from graphopt.runtime.stored.stable_form import digest
from graphopt.runtime.stored.stored_sizes import StoredSizes, read_sizes

__all__ = ["UNLIMITED", "CaptureNotes", "StoredCapture", "not_kept", "read_capture", "variant_file", "write_capture"]

logger = logging.getLogger(__name__)

_FORMAT = 5

UNLIMITED = "unlimited"
"""The file of the program before the passes that keep it within a number of bytes."""


@dataclass
class StoredCapture:
    """The files of one capture, from which its programs are read and to which new ones are added.

    Attributes:
        context: of the programs that are read.
        sizes: the sizes that the capture serves, where they vary.
        state: the optimizer state that the step program takes, by target.
        pass_state: what passes keep in the program that runs.
        loaded: whether the capture was read from here.
        divisor: of the program of a step that accumulates (``Rewritten``).
    """

    files: ProgramFiles
    session: CaptureSession
    context: Context
    sizes: StoredSizes | None = None
    state: tuple[str, ...] = ()
    pass_state: Mapping[str, PassState] = field(default_factory=dict)
    loaded: bool = False
    divisor: int = 1
    _unlimited: Program | None = None

    def variant(self, name: str, make: Callable[[], Program]) -> Program:
        """A program of the capture beside those of its stages: read, or made and written.

        Args:
            name: says everything that it depends on beside the capture.
            make: makes it.
        """
        own = variant_file(name)
        if own in self.files:
            try:
                return self.read(own)
            except GraphoptError as error:
                logger.warning("a stored program cannot be used, and is made anew: %s", error)
        program = make()
        if not refuse_process_bound(program):
            self.write(own, program)
        return program

    @property
    def unlimited(self) -> Program:
        """The program before the passes that keep it within a number of bytes, where sizes vary."""
        if self._unlimited is None:
            self._unlimited = self.read(UNLIMITED)
        return self._unlimited

    def read(self, name: str) -> Program:
        """A program from a file, checked, on the live tensors.

        Raises:
            GraphoptError: where it is none, or does not fit them.
        """
        data, path = self.files.read(name), self.files.place(name)
        try:
            with no_collection():
                program = from_json(data.value, None if self.sizes is None else self.sizes.mode)
            verify(program)
            check_inputs(program, self.session)
        except GraphoptError as error:
            raise GraphoptError(f"{path}: {error}") from error
        except Exception as error:  # of torch, on sizes and strides that no program has
            raise GraphoptError(f"{path}: no program that runs: {type(error).__name__}: {error!s:.200}") from error
        live_constants(program, self.session)
        program.context = replace(self.context, history=program.context.history, compiled=self.context.compiled)
        return program

    def write(self, name: str, program: Program) -> None:
        """Write a program; where that fails, there is none."""
        try:
            self.files.write(name, to_json(program))
        except (OSError, GraphoptError) as error:
            logger.debug("%s is not kept: %s", self.files.place(name), error)


def variant_file(name: str) -> str:
    """The file of a program beside those of the stages."""
    return f"variant-{digest(name)[:24]}"


def not_kept(rewritten: Rewritten) -> str:
    """Why a capture is not kept; empty where it is."""
    if rewritten.session.assigned:
        return f"forward sets {rewritten.session.assigned[0]}, which only running its Python does"
    read = next((effect.words for effect in rewritten.session.effects if effect.reads), "")
    if read:
        return f"forward {read}, which another process may find otherwise"
    if rewritten.session.numbers:
        where = rewritten.session.numbers[0].where
        return f"forward reads a tensor's numbers ({where}), which may be others in another process"
    if rewritten.program.context.step.numbers:
        return "passes have measured numbers that are not part of a program"
    reasons = [refuse_process_bound(rewritten.stages[stage]) for stage in rewritten.stages if stage != "forward"]
    return next((reason for reason in reasons if reason), "")


@dataclass(frozen=True)
class CaptureNotes:
    """What is written of a capture beside its programs and its key.

    Attributes:
        sizes: that it serves, as ``write_sizes`` gives them.
        said: what it warned of: loggers and texts.
        why: it was made, where others were there.
    """

    sizes: dict[str, Any] | None = None
    said: Sequence[tuple[str, str]] = ()
    why: str = ""


def write_capture(files: ProgramFiles, key: Key, rewritten: Rewritten, notes: CaptureNotes) -> None:
    """Write the programs of a capture, and then what they are of.

    Raises:
        OSError: where a file cannot be written.
        GraphoptError: for a program without a textual form.
    """
    for stage in _written_stages(rewritten):
        files.write(f"stage-{stage}", to_json(rewritten.stages[stage]))
    limited = [current for current in rewritten.pipeline.passes if current.has_limit]
    if notes.sizes is not None and limited:
        files.write(UNLIMITED, to_json(rewritten.unlimited(limited)))
    files.write(HEADER, header_of(key, rewritten, notes))


def _written_stages(rewritten: Rewritten) -> list[Stage]:
    kept: tuple[Stage, ...] = ("joint", "step")
    return [stage for stage in kept if stage in rewritten.stages]


def header_of(key: Key, rewritten: Rewritten, notes: CaptureNotes) -> dict[str, Any]:
    """What an entry says of a capture beside its programs."""
    program, session = rewritten.program, rewritten.session
    joint = session.joint if session.optimizer is None else None
    return {
        "format": _FORMAT,
        "title": key.title,
        "key": key.sections,
        "why": notes.why,
        "sizes": notes.sizes,
        "pipeline": str(rewritten.pipeline),
        "stages": list(_written_stages(rewritten)),
        "divisor": rewritten.divisor,
        "seconds": rewritten.seconds,
        "records": write_records(rewritten.records),
        "warnings": [list(item) for item in notes.said],
        "state": [spec.target for _, spec in program.inputs_of("state")],
        "pass_state": {target: state.to_json() for target, state in program.pass_state.items()},
        "first": [] if joint is None else [[spec.role, spec.target] for spec in joint.inputs],
        "outputs": None if joint is None and session.outputs.is_alone else write_structure(session.outputs),
        "questions": write_questions(session.questions),
        "repeated": session.repeated,
    }


def read_capture(
    own: ProgramFiles,
    session: CaptureSession,
    context: Context,
    pipeline: Pipeline,
    verified: Verify,
    classes: Collection[str] = (),
) -> Rewritten:
    """A capture from its files, for a live model; its programs are read when they are needed.

    Raises:
        GraphoptError: where the files hold no capture, or one that does not fit.
    """
    header = own.read(HEADER)
    if header["format"].whole(0) != _FORMAT:
        raise header["format"].expected(f"format {_FORMAT}")
    session.repeated = _read_repeated(header["repeated"], session)
    tensors = session.call_tensors()
    session.replay_questions(read_questions(header["questions"], tensors))
    stages: list[Stage] = ["joint"] if session.optimizer is None else ["joint", "step"]
    if [stage.text() for stage in header["stages"].items(most=2)] != stages:
        raise header["stages"].expected(f"the stages {' and '.join(stages)}")
    sizes = read_sizes(header["sizes"])
    if sizes is not None:
        sizes = read_sizes(header["sizes"], sizes.rules(declared=False).match(tensors))
        assert sizes is not None
        context = replace(context, sizes=PlannedSizes(sizes.sizes, sizes.largest))
    known = session.tensors()
    entry = StoredCapture(
        own,
        session,
        context,
        sizes,
        tuple(_state_of(target, known) for target in header["state"].items()),
        {name: read_pass_state(item) for name, item in header["pass_state"].entries()},
        loaded=True,
        divisor=header["divisor"].whole(0),
    )
    missing = [stage for stage in stages if f"stage-{stage}" not in own]
    if missing:
        raise GraphoptError(f"{own.place(HEADER)}: the program of the stage {missing[0]} is missing")
    lazy = _stages(entry, stages, pipeline, verified)
    if sizes is not None:
        _read_at_once(entry, lazy, pipeline)
    records = read_records(header["records"])
    snapshots = LazySnapshots(lazy)
    rewritten = Rewritten(session, pipeline, verified, lazy, records, snapshots, entry=entry, divisor=entry.divisor)
    if session.optimizer is None:
        _replay(header, rewritten, tensors, classes)
    else:
        alone = header["outputs"].value is None
        session.replay(flatten(torch.empty(()))[1] if alone else read_structure(header["outputs"], classes))
    _say_again(header["warnings"])
    return rewritten


def _read_at_once(entry: StoredCapture, stages: LazyStages, pipeline: Pipeline) -> None:
    """Read all programs of a capture whose sizes vary: the session at hand may not be one that could make them anew.

    Raises:
        GraphoptError: where one cannot be read.
    """
    for stage in stages:
        stages[stage] = entry.read(f"stage-{stage}")
    limited = any(current.has_limit for current in pipeline.passes)
    if limited and entry.unlimited.stage not in stages:
        raise GraphoptError(f"{entry.files.place(UNLIMITED)}: a program of another stage than those that run")


def _read_repeated(field: Field, session: CaptureSession) -> list[str]:
    """The inputs that the programs of a part take several times: parameters, and tensors of the call."""
    arguments = {f"args[{place}]" for place in range(len(flatten(session.example, paths=False)[0]))}
    names = [item.text() for item in field.items(most=100_000)]
    if not isinstance(session.model, GraphPart) and names:
        raise field.expected("no repeated inputs, since the model is not a part of one")
    if not arguments.union(session.tensors()).issuperset(names):
        raise field.expected("parameters and tensors of the call")
    return names


def _state_of(field: Field, tensors: Container[str]) -> str:
    """A piece of optimizer state, ``parameter/key``, of a parameter that the model has."""
    target = field.text()
    if target.rpartition("/")[0] not in tensors:
        raise field.expected("state of one of the model's parameters")
    return target


def _replay(header: Field, rewritten: Rewritten, tensors: list[torch.Tensor], classes: Collection[str]) -> None:
    """Make the program of a drop-in model differentiable.

    Raises:
        GraphoptError: where it does not fit the live model.
    """
    entry, session = rewritten.entry, rewritten.session
    assert isinstance(entry, StoredCapture)
    if entry.sizes is None:  # where sizes vary, all programs have been read
        rewritten.stages["joint"] = entry.read("stage-joint")
    program = rewritten.stages["joint"]
    roles = {role: role for role in ("parameter", "buffer", "constant")}
    first = [list(item.items(most=2)) for item in header["first"].items()]
    if any(len(pair) != 2 for pair in first):
        raise header["first"].expected("pairs of a role and a target")
    specs = [InputSpec(role.one_of(roles), target.text()) for role, target in first]
    if entry.sizes is not None:
        tensors = [
            fake.requires_grad_(given.requires_grad)
            for (_, fake), given in zip(entry.sizes.inputs.tensors, tensors, strict=True)
        ]
    with plain_precision():
        joint = replay_trace(program, specs, session.tensors(), tensors)
    session.replay(read_structure(header["outputs"], classes), joint)


def _stages(entry: StoredCapture, stages: list[Stage], pipeline: Pipeline, verified: Verify) -> LazyStages:
    """The programs of the stages, read when they are needed; one that then cannot be read is captured."""

    def reader(stage: Stage) -> Callable[[], Program]:
        def read() -> Program:
            try:
                return entry.read(f"stage-{stage}")
            except GraphoptError as error:
                logger.warning("a stored program cannot be used, and is captured anew: %s", error)
                made = rewrite(
                    entry.session,
                    pipeline,
                    until=stages[-1],
                    checks=Checks(verified),
                    context=entry.context,
                    divisor=entry.divisor,
                )
                entry.write(f"stage-{stage}", made.stages[stage])
                return made.stages[stage]

        return read

    return LazyStages({stage: reader(stage) for stage in stages})


def _say_again(field: Field) -> None:
    """Log what the capture warned of: it holds for the program that was read as well."""
    for item in field.items(most=200):
        parts = [part.text() for part in item.items(most=2)]
        if len(parts) == 2 and parts[0].split(".")[0] == "graphopt":
            logging.getLogger(parts[0]).warning("%s", parts[1])
