"""Captures found in the folder of the cache instead of being made, and put there when they were made.

A capture is looked up by its key (``program_key``). What is read is checked: the file by its digest, the data field by
field, the program by the rules of programs, its inputs against the live model, optimizer and call. Whatever fails is a
capture that is not there, with a warning that says what failed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.capture.flatten import flatten
from graphopt.capture.graph_part import GraphPart
from graphopt.capture.replayed_trace import not_replayed, replay_trace
from graphopt.errors import GraphoptError
from graphopt.ir.autocast import plain_precision
from graphopt.ir.checked_json import Field
from graphopt.ir.context import Context
from graphopt.ir.deserialization import from_json, read_pass_state
from graphopt.ir.node import InputSpec, Stage
from graphopt.ir.program import Program
from graphopt.ir.serialization import to_json
from graphopt.ir.state import PassState
from graphopt.ir.verify import verify
from graphopt.rewriting.dump import DumpDirectory
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.captures import SizeRule
from graphopt.runtime.rewrite import Rewritten, Verify, rewrite
from graphopt.runtime.stored.capture_content import (
    LazySnapshots,
    LazyStages,
    read_records,
    read_rules,
    refuse_process_bound,
    write_records,
    write_rules,
)
from graphopt.runtime.stored.live_inputs import check_inputs, live_constants
from graphopt.runtime.stored.program_files import HEADER, FolderFiles, ProgramFiles
from graphopt.runtime.stored.program_folder import (
    entries,
    is_on,
    make_room,
    note_refusal,
    programs_folder,
)
from graphopt.runtime.stored.program_key import Key, Subject, differences, program_key, read_sections
from graphopt.runtime.stored.result_structure import read_structure, write_structure
from graphopt.runtime.stored.shipped_captures import Shipped
from graphopt.runtime.stored.stable_form import NoStableFormError, digest

__all__ = ["CacheLookup", "ProgramCache", "StoredCapture", "not_kept", "read_capture", "variant_file", "write_capture"]

logger = logging.getLogger(__name__)
_package = logging.getLogger("graphopt")

_FORMAT = 1


@dataclass
class StoredCapture:
    """The files of one capture, from which its programs are read and to which new ones are added.

    Attributes:
        state: the optimizer state that the step program takes, by target.
        pass_state: what passes keep in the program that runs.
        loaded: whether the capture was read from here.
    """

    files: ProgramFiles
    session: CaptureSession
    context: Context
    state: tuple[str, ...] = ()
    pass_state: Mapping[str, PassState] = field(default_factory=dict)
    loaded: bool = False

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

    def read(self, name: str) -> Program:
        """A program from a file, checked, on the live tensors.

        Raises:
            GraphoptError: where it is none, or does not fit them.
        """
        data, path = self.files.read(name), self.files.place(name)
        try:
            program = from_json(data.value)
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


@dataclass
class CacheLookup:
    """One question to the cache: what was found, or where to put what is captured instead.

    Attributes:
        found: the capture with its rules for sizes; None where there is none.
    """

    key: Key
    folder: Path
    found: tuple[Rewritten, list[SizeRule]] | None = None
    why: str = ""
    said: list[tuple[str, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Around a capture: what it warns of is kept with it, and said again where it is read."""
        handler = _Listener(self.said)
        _package.addHandler(handler)
        try:
            yield
        finally:
            _package.removeHandler(handler)

    def keep(self, rewritten: Rewritten, rules: list[SizeRule]) -> None:
        """Write a capture, and let its variants be written when they are made; says why not at DEBUG."""
        reason = not_kept(rewritten) or _not_replayed(rewritten)
        files = FolderFiles(self.folder / self.key.name)
        if not reason:
            try:
                write_capture(files, self.key, rewritten, rules, self.said, self.why)
            except (OSError, GraphoptError, NoStableFormError) as error:
                reason = str(error)
        if reason:
            refuse(self.folder, self.key.title, reason)
            return
        rewritten.entry = StoredCapture(files, rewritten.session, rewritten.program.context)
        make_room(self.folder)


def write_capture(
    files: ProgramFiles,
    key: Key,
    rewritten: Rewritten,
    rules: list[SizeRule],
    said: list[tuple[str, str]],
    why: str = "",
) -> None:
    """Write the programs of a capture, and then what they are of.

    Raises:
        OSError: where a file cannot be written.
        GraphoptError: for a program without a textual form.
    """
    for stage in _written_stages(rewritten):
        files.write(f"stage-{stage}", to_json(rewritten.stages[stage]))
    files.write(HEADER, header_of(key, rewritten, rules, said, why))


def _written_stages(rewritten: Rewritten) -> list[Stage]:
    kept: tuple[Stage, ...] = ("joint", "step")
    return [stage for stage in kept if stage in rewritten.stages]


class _Listener(logging.Handler):
    """Notes the warnings of graphopt's loggers."""

    def __init__(self, said: list[tuple[str, str]]) -> None:
        super().__init__(logging.WARNING)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        if record.levelno == logging.WARNING:
            self._said.append((record.name, record.getMessage()))


def header_of(
    key: Key, rewritten: Rewritten, rules: list[SizeRule], said: list[tuple[str, str]], why: str
) -> dict[str, Any]:
    """What an entry says of a capture beside its programs."""
    program, session = rewritten.program, rewritten.session
    joint = session.joint if session.optimizer is None else None
    return {
        "format": _FORMAT,
        "title": key.title,
        "key": key.sections,
        "why": why,
        "pipeline": str(rewritten.pipeline),
        "stages": list(_written_stages(rewritten)),
        "seconds": rewritten.seconds,
        "rules": write_rules(rules),
        "records": write_records(rewritten.records),
        "warnings": [list(item) for item in said],
        "state": [spec.target for _, spec in program.inputs_of("state")],
        "pass_state": {target: state.to_json() for target, state in program.pass_state.items()},
        "first": [] if joint is None else [[spec.role, spec.target] for spec in joint.inputs],
        "outputs": None if joint is None else write_structure(session.outputs),
    }


def not_kept(rewritten: Rewritten) -> str:
    """Why a capture is not kept; empty where it is."""
    if rewritten.session.assigned:
        return f"forward sets {rewritten.session.assigned[0]}, which only running its Python does"
    if rewritten.program.context.numbers:
        return "passes have measured numbers that are not part of a program"
    reasons = [refuse_process_bound(rewritten.stages[stage]) for stage in rewritten.stages if stage != "forward"]
    return next((reason for reason in reasons if reason), "")


def _not_replayed(rewritten: Rewritten) -> str:
    """Why the program of a drop-in model is not kept; empty where it is."""
    session = rewritten.session
    if session.optimizer is not None or session.joint is None:
        return ""
    return not_replayed(session.joint, rewritten.program)


def refuse(folder: Path, title: str, reason: str) -> None:
    """Say, and note for ``graphopt cache``, why a capture is not kept."""
    logger.debug("the capture of %s is not kept: %s", title, reason)
    note_refusal(folder, title, reason, digest([title, reason])[:24])


class ProgramCache:
    """Looks up the captures of one model or step.

    Args:
        pipeline: whose passes run.
        until: the stage of the program that runs.
        backend: as the user gave it.
        verify: how far passes are checked.
        dynamic_shapes: as the user gave them.

    Attributes:
        shipped: the captures of a file that a step was loaded from.
    """

    def __init__(self, pipeline: Pipeline, until: Stage, backend: object, verify: Verify, dynamic_shapes: Any) -> None:
        self._pipeline = pipeline
        self._until: Stage = until
        self._backend = backend
        self._verify: Verify = verify
        self._dynamic_shapes = dynamic_shapes
        self.shipped: Shipped | None = None

    def look_up(self, session: CaptureSession, context: Context) -> CacheLookup | None:
        """What is there for a capture that is about to be made; None where the cache is off or cannot serve it.

        Raises:
            GraphoptError: for the first call of a step that was loaded from a file, where the file has no capture for
                it.
        """
        if self.shipped is not None:
            found = self.shipped.find(self.key, session)
            if found is not None:
                key, files = found
                return CacheLookup(key, Path(), self.read(files, session, context, key))
        folder = programs_folder()
        if folder is None or not is_on() or isinstance(session.model, GraphPart):
            return None
        reason = self._out_of_reach(context)
        if not reason:
            try:
                key = self.key(session)
            except NoStableFormError as error:
                reason = str(error)
        if reason:
            refuse(folder, session.title, reason)
            return None
        lookup = CacheLookup(key, folder)
        own = FolderFiles(folder / key.name)
        if HEADER not in own:
            lookup.why = _nearest(folder, key)
            logger.debug("no stored capture of %s: %s", key.title, lookup.why)
            return lookup
        try:
            lookup.found = self.read(own, session, context, key)
        except GraphoptError as error:
            lookup.why = str(error)
            logger.warning("a stored capture of %s cannot be used, and it is captured anew: %s", key.title, error)
        return lookup

    def key(self, session: CaptureSession) -> Key:
        """The key of a capture.

        Raises:
            NoStableFormError: where it depends on what cannot be compared.
        """
        return program_key(self.subject(session.model, session.loss, session.optimizer, session.example))

    def subject(self, model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer | None, example: Any) -> Subject:
        """What is captured with these options.

        Args:
            model: the bare model.
            loss: as for ``CaptureSession``.
            optimizer: whose update ends the program.
            example: positional and keyword arguments of the call; None where there is none yet.
        """
        compiler = self._backend if isinstance(self._backend, str) else "callable"
        return Subject(
            model, loss, optimizer, example, self._pipeline, self._until, compiler, self._verify, self._dynamic_shapes
        )

    def read(
        self, own: ProgramFiles, session: CaptureSession, context: Context, key: Key
    ) -> tuple[Rewritten, list[SizeRule]]:
        """The capture of a key in its files, for the live model."""
        started = time.perf_counter()
        classes = {text for name, text in key.sections["code"].items() if name.startswith(("global ", "class "))}
        found = read_capture(own, session, context, self._pipeline, self._verify, classes)
        own.used()
        found[0].seconds = time.perf_counter() - started
        return found

    def _out_of_reach(self, context: Context) -> str:
        """Why no capture of these options is looked up; empty where it is."""
        if self._verify == "numerics":
            return 'verify="numerics" compares with the program before passes, which only a capture has'
        if context.numbers:
            return "passes go on with numbers of an earlier run"
        if any(_exchanges(current) for current in self._pipeline.passes):
            return "passes exchange with other ranks while they rewrite"
        if DumpDirectory.is_wanted():
            return "GRAPHOPT_DUMP asks for the programs before and between passes"
        return ""


def _exchanges(current: object) -> bool:
    return any(name in type(current).__dict__ for name in ("prepare", "settle", "shards"))


def read_capture(
    own: ProgramFiles,
    session: CaptureSession,
    context: Context,
    pipeline: Pipeline,
    verified: Verify,
    classes: Collection[str] = (),
) -> tuple[Rewritten, list[SizeRule]]:
    """A capture from its files, for a live model; its programs are read when they are needed.

    Raises:
        GraphoptError: where the files hold no capture, or one that does not fit.
    """
    header = own.read(HEADER)
    if header["format"].whole(0) != _FORMAT:
        raise header["format"].expected(f"format {_FORMAT}")
    tensors = flatten(session.example, paths=False)[0]
    rules = read_rules(header["rules"], tensors)
    if not fits(rules, tensors):
        raise GraphoptError("it is for other sizes")
    known = {"joint": "joint", "step": "step"}
    stages: list[Stage] = [stage.one_of(known) for stage in header["stages"].items(most=2)]  # type: ignore[misc]
    if not stages:
        raise header["stages"].expected("at least one stage")
    entry = StoredCapture(
        own,
        session,
        context,
        tuple(target.text() for target in header["state"].items()),
        {name: read_pass_state(item) for name, item in header["pass_state"].entries()},
        loaded=True,
    )
    missing = [stage for stage in stages if f"stage-{stage}" not in own]
    if missing:
        raise GraphoptError(f"{own.place(HEADER)}: the program of the stage {missing[0]} is missing")
    lazy = _stages(entry, stages, pipeline, verified)
    records = read_records(header["records"])
    rewritten = Rewritten(session, pipeline, verified, lazy, records, LazySnapshots(lazy), entry=entry)
    if session.optimizer is None:
        _replay(header, rewritten, tensors, classes)
    _say_again(header["warnings"])
    return rewritten, rules


def _replay(header: Field, rewritten: Rewritten, tensors: list[torch.Tensor], classes: Collection[str]) -> None:
    """Make the program of a drop-in model differentiable.

    Raises:
        GraphoptError: where it does not fit the live model.
    """
    entry, session = rewritten.entry, rewritten.session
    assert isinstance(entry, StoredCapture)
    program = rewritten.stages["joint"] = entry.read("stage-joint")
    roles = {role: role for role in ("parameter", "buffer", "constant")}
    first = [[part for part in item.items(most=2)] for item in header["first"].items()]
    if any(len(pair) != 2 for pair in first):
        raise header["first"].expected("pairs of a role and a target")
    specs = [InputSpec(role.one_of(roles), target.text()) for role, target in first]
    with plain_precision():
        joint = replay_trace(program, specs, session.tensors(), tensors)
    session.replay(joint, read_structure(header["outputs"], classes))


def _stages(entry: StoredCapture, stages: list[Stage], pipeline: Pipeline, verified: Verify) -> LazyStages:
    """The programs of the stages, read when they are needed; one that then cannot be read is captured."""

    def reader(stage: Stage) -> Callable[[], Program]:
        def read() -> Program:
            try:
                return entry.read(f"stage-{stage}")
            except GraphoptError as error:
                logger.warning("a stored program cannot be used, and is captured anew: %s", error)
                made = rewrite(entry.session, pipeline, until=stages[-1], verify=verified, context=entry.context)
                return made.stages[stage]

        return read

    return LazyStages({stage: reader(stage) for stage in stages})


def _say_again(field: Field) -> None:
    """Log what the capture warned of: it holds for the program that was read as well."""
    for item in field.items(most=200):
        parts = [part.text() for part in item.items(most=2)]
        if len(parts) == 2 and parts[0].split(".")[0] == "graphopt":
            logging.getLogger(parts[0]).warning("%s", parts[1])


def fits(rules: list[SizeRule], tensors: list[torch.Tensor]) -> bool:
    """Whether the sizes of a call obey the rules of a capture that was read."""
    values: dict[str, int] = {}
    for rule in rules:
        size = tensors[rule.input].shape[rule.dim]
        if rule.size is not None and size != rule.size:
            return False
        if rule.size is None and (size < rule.low or size > (size if rule.high is None else rule.high)):
            return False
        if rule.size is None and values.setdefault(rule.symbol, size) != size:
            return False
    return True


def _nearest(folder: Path, key: Key) -> str:
    """Why there is no entry for a key: what differs from the nearest entry of the same model."""
    best: list[str] | None = None
    for entry in entries(folder)[:20]:
        with contextlib.suppress(GraphoptError):
            header = entry.header()
            if header["title"].text() == key.title:
                found = differences(key.sections, read_sections(header["key"]))
                if best is None or len(found) < len(best):
                    best = found
    return "; ".join(best) if best else f"there is no capture of {key.title} yet"
