"""The pass core: what a pass is, how passes are found and ordered, and how a list of them is run."""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from graphopt.errors import GraphoptError, PassError, PipelineError, VerifyError, did_you_mean
from graphopt.ir import verify as verifier
from graphopt.ir.autocast import plain_precision
from graphopt.ir.ops.values import format_bytes
from graphopt.ir.program import Program, Stage
from graphopt.rewriting.clock import Clock
from graphopt.rewriting.shards import Shards
from graphopt.rewriting.spec import format_pass, parse_passes

if TYPE_CHECKING:
    from graphopt.analysis.liveness import MemoryTimeline
    from graphopt.rewriting.instruments import Instrument

__all__ = ["Changed", "Numerics", "Pass", "PassRecord", "PassStage", "Pipeline", "available_passes", "find_pass"]

Numerics = Literal["bitwise", "tolerant", "changes"]
logger = logging.getLogger("graphopt")

PassStage = Stage | Literal["last"]
"""Which program a pass rewrites; ``last`` is the one that runs: joint for a drop-in model, step for a whole step."""

STAGES: tuple[PassStage, ...] = ("forward", "joint", "step", "last")


@dataclass(frozen=True, slots=True)
class Changed:
    """What a pass did. It is falsy where the program is as it was, and then ``reason`` says why.

    Attributes:
        counts: what was done how often: ``{"recomputed": 204}``.
        bytes_saved: how much lower the predicted peak is, in bytes (filled in by the pipeline).
        tensors: names of the tensors that the pass decided about.
        lines: what a user should read, one line each.
        reason: why nothing was done, for a pass that did nothing.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    bytes_saved: int = 0
    tensors: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return any(self.counts.values())

    def __str__(self) -> str:
        if not self:
            return f"nothing: {self.reason or 'there was nothing to do'}"
        return ", ".join(f"{count} {what}" for what, count in self.counts.items())


class Pass(abc.ABC):
    """A rewrite of a program. Subclasses are final frozen dataclasses whose fields are their options.

    Class attributes:
        name: kebab-case, unique among all installed passes.
        stage: which program it rewrites: forward, joint, step, or last (the one that runs, joint or step, after all
            others).
        also: later stages whose program it rewrites as well; ``apply`` is called once for each (``program.stage`` says
            which), and what it does at one must not depend on an object's memory of another.
        numerics: ``bitwise`` (results equal to the last bit), ``tolerant`` (within a tolerance that the docstring
            states) or ``changes``.
        after: names of passes that run before this one when both are given.
        requires: names of passes that must be given too.
        conflicts: names of passes that must not be given too.
        changes_signature: whether inputs or outputs of the program may differ afterwards.
    """

    name: ClassVar[str]
    stage: ClassVar[PassStage]
    also: ClassVar[tuple[PassStage, ...]] = ()
    numerics: ClassVar[Numerics]
    after: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    changes_signature: ClassVar[bool] = False

    @abc.abstractmethod
    def apply(self, program: Program) -> Changed:
        """Rewrite ``program`` in place and say what was done.

        The program given is valid, and the pipeline checks it again afterwards. A pass that cannot help changes
        nothing and returns ``Changed(reason=...)``. Applying a pass a second time does nothing or raises.

        Raises:
            GraphoptError: where the options do not fit the program.
        """

    def prepare(self, model: nn.Module) -> None:
        """Called once, before the first run of what the pass has rewritten, with the model that it runs on.

        For what has to be so before the first step, such as equal parameters on all ranks. A whole step that goes on
        from a loaded ``state_dict`` does not call it: each rank has loaded what it needs.
        """
        del model

    def form(self, clock: Clock) -> str:
        """Which of its programs this pass wants for the next update of a whole step; "" is the one of the long run.

        The step compiles a program for each form that comes up. ``apply`` finds it in ``program.forms`` at the stages
        step and last, where it is absent for the program that is shown. All ranks have to come to the same form.
        """
        del clock
        return ""

    def advance(self, clock: Clock) -> None:
        """Called after every update of a whole step, to look at what it left and to change ``clock.numbers``."""
        del clock

    def settle(self, program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Bring together what this pass lets differ between ranks; ``TrainStep.synchronize`` calls it on all ranks.

        Args:
            program: of the long run, as this pass and all others have rewritten it.
            model: whose parameters may be changed.
            optimizer: whose state may be changed.
        """
        del program, model, optimizer

    def shards(self, sizes: Mapping[str, int]) -> Shards | None:
        """The part of each trained parameter that this rank updates; None, as by default, for all of all.

        Asked before the optimizer is traced, whose state is then for these elements only. The pass sees to it that
        parameters are whole again behind the update.

        Args:
            sizes: elements of each trained parameter, by name.
        """
        del sizes
        return None

    def concerns(self, program: Program) -> bool:
        """Whether there is anything to do for this pass at the stage of ``program``; it is not run where not.

        For passes of several stages, which act in one way in a drop-in program and in another in a whole step.
        """
        return True

    def __str__(self) -> str:
        return format_pass(self)


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass that ran: its text form, what it did and cost, and the program's size and peak around it."""

    name: str
    spec: str
    stage: Stage
    numerics: Numerics
    changed: Changed
    seconds: float
    nodes_before: int
    nodes_after: int
    peak_before: int | None
    peak_after: int | None

    def _repr_html_(self) -> str:
        from graphopt.report.notebook import records_html

        return records_html([self])

    def __str__(self) -> str:
        peak = ""
        if self.peak_before is not None and self.peak_after is not None and self.peak_before != self.peak_after:
            peak = f"; peak {format_bytes(self.peak_before)} -> {format_bytes(self.peak_after)} (predicted)"
        return f"{self.spec}: {self.changed}{peak}; {self.seconds:.2f} s"


# --- finding passes --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _registered() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group="graphopt.passes"):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            owners = " and ".join(f"{e.value} (from {e.dist.name if e.dist else '?'})" for e in (other, entry))
            raise PipelineError(f"two installed packages register a pass called {entry.name!r}: {owners}; remove one")
        found[entry.name] = entry
    return found


def find_pass(name: str) -> type[Pass]:
    """The pass class registered under ``name`` (kebab-case) in the entry-point group ``graphopt.passes``.

    Raises:
        PipelineError: for an unknown name, with the nearest ones; or where what is registered is not a pass.
    """
    entry = _registered().get(name)
    if entry is None:
        hint = did_you_mean(name, _registered()) or f"known passes: {', '.join(sorted(_registered()))}"
        raise PipelineError(f"there is no pass called {name!r}; {hint}")
    try:
        cls = entry.load()
    except Exception as error:
        owner = entry.dist.name if entry.dist else "an unknown package"
        raise PipelineError(f"the pass {name!r} ({entry.value}, from {owner}) cannot be imported: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        raise PipelineError(
            f"the entry point {entry.value} for {name!r} is not a subclass of graphopt.Pass"
        )
    if cls.name != name:
        raise PipelineError(f"{entry.value} is registered as {name!r} but calls itself {cls.name!r}")
    return cls


def available_passes() -> dict[str, type[Pass]]:
    """Every installed pass by name, in alphabetical order; one that cannot be imported is left out, and logged."""
    found: dict[str, type[Pass]] = {}
    for name in sorted(_registered()):
        try:
            found[name] = find_pass(name)
        except PipelineError as error:
            logger.error("%s", error)
    return found


# --- running passes --------------------------------------------------------------------------------------------------


class Pipeline:
    """An ordered list of passes.

    Args:
        passes: ``Pass`` objects, or their text form; their order is free where nothing constrains it.

    Raises:
        PipelineError: with every problem at once: unknown names and options, a pass given twice, conflicts, missing
            requirements, circular order.
    """

    def __init__(self, passes: str | Iterable[Pass] = ()) -> None:
        given: Sequence[Any] = parse_passes(passes, find_pass) if isinstance(passes, str) else list(passes)
        self.passes: tuple[Pass, ...] = tuple(_ordered(given))

    def __str__(self) -> str:
        return ",".join(str(p) for p in self.passes)

    def of(self, stage: PassStage) -> list[Pass]:
        """The passes that rewrite the program of one stage, in order."""
        return _sorted_stage([p for p in self.passes if stage in (p.stage, *p.also)])

    def shards(self, sizes: Mapping[str, int]) -> Shards | None:
        """The part of each trained parameter that this rank updates, as a pass wants it (``Pass.shards``).

        Raises:
            PipelineError: where two passes want to say so.
        """
        found = {current.name: current.shards(sizes) for current in self.passes}
        wanted = {name: shards for name, shards in found.items() if shards is not None}
        if len(wanted) > 1:
            raise PipelineError(f"{' and '.join(wanted)} both shard the update: give one of them")
        return next(iter(wanted.values()), None)

    def due(self, stage: Stage, *, last: bool) -> list[Pass]:
        """The passes for a program of a stage, in order; ``last`` says whether it is the one that runs."""
        return self.of(stage) + (self.of("last") if last else [])

    def run(
        self,
        program: Program,
        *,
        last: bool = True,
        verify: Literal["structure", "numerics"] | bool = "structure",
        instruments: Sequence[Instrument] = (),
    ) -> list[PassRecord]:
        """Apply the passes of the program's stage to it, in place.

        Around each pass: instruments, apply, dead code, refreshed values, the invariant table.

        Args:
            program: of any stage.
            last: whether this is the program that runs, so that passes of the stage ``last`` are due too.
            verify: whether to check the invariant table after each pass.
            instruments: are told of each pass.

        Raises:
            PassError: where a pass raises; the original is its cause.
            VerifyError: where a pass leaves a program that breaks an invariant.
        """
        records = []
        due = [current for current in self.due(program.stage, last=last) if current.concerns(program)]
        for current in due:
            for instrument in instruments:
                instrument.before_pass(current, program)
            before = program.copy()
            try:
                record = self._apply(current, program, before, verify is not False)
            except GraphoptError as error:
                for instrument in instruments:
                    instrument.failed_pass(current, before, error)
                raise self._failure(current, due, program.stage, error) from error
            except Exception as error:
                for instrument in instruments:
                    instrument.failed_pass(current, before, error)
                raise self._failure(current, due, program.stage, error) from error
            if record.spec not in program.history:  # a pass of several stages is one pass
                program.history = (*program.history, record.spec)
            records.append(record)
            for instrument in instruments:
                instrument.after_pass(current, program, record)
        return records

    def _apply(self, current: Pass, program: Program, before: Program, check: bool) -> PassRecord:
        started = time.perf_counter()
        with plain_precision():
            return self._apply_plainly(current, program, before, check, started)

    def _apply_plainly(
        self, current: Pass, program: Program, before: Program, check: bool, started: float
    ) -> PassRecord:
        changed = current.apply(program)
        if not isinstance(changed, Changed):
            raise PassError(
                f"{type(current).__name__}.apply returned {type(changed).__name__}; pass developer: return a Changed"
            )
        program.erase_dead()
        if check:
            verifier.verify(program, before=before, declared_signature_change=current.changes_signature)
        seconds = time.perf_counter() - started
        peaks: tuple[int | None, int | None] = (None, None)
        if program.stage != "forward":
            was, now = before.memory(), program.memory()
            peaks = (was.peak_bytes, now.peak_bytes)
            changed = _with_saving(changed, was, now) if changed else changed
        return PassRecord(
            current.name, str(current), program.stage, current.numerics, changed, seconds,
            len(before.graph.nodes), len(program.graph.nodes), *peaks,
        )  # fmt: skip

    def _failure(self, current: Pass, due: Sequence[Pass], stage: Stage, error: Exception) -> GraphoptError:
        shown = ", ".join(f">>> {p} <<<" if p is current else str(p) for p in self.passes)
        kind = VerifyError if isinstance(error, VerifyError) else PassError
        what = "left a program that is not valid" if isinstance(error, VerifyError) else "failed"
        failure = kind(
            f"pass {due.index(current) + 1}/{len(due)} of the {stage} stage, {current.name!r}, {what}: {error}"
        )
        failure.add_note(f"pipeline: {shown}")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        return failure


def _with_saving(changed: Changed, was: MemoryTimeline, now: MemoryTimeline) -> Changed:
    """Add how much lower the peak is; where it is higher, a line says so, and what it consists of."""
    saved = was.peak_bytes - now.peak_bytes
    lines = changed.lines
    if saved < 0:
        largest = ", ".join(f"{item.name} ({format_bytes(item.bytes)})" for item in now.alive[:3])
        lines = (*lines, f"the predicted peak rises by {format_bytes(-saved)}; largest there: {largest}")
    return replace(changed, bytes_saved=saved, lines=lines)


def _ordered(given: Sequence[Any]) -> list[Pass]:
    problems: list[str] = []
    by_name: dict[str, Pass] = {}
    for index, item in enumerate(given):
        if isinstance(item, type) and issubclass(item, Pass):
            problems.append(f"$.passes[{index}]: {item.__name__} is a class; give an object: {item.__name__}(...)")
        elif not isinstance(item, Pass):
            problems.append(
                f"$.passes[{index}]: {item!r} is not a pass; wrap a function on a GraphModule in FxPass(...)"
            )
        elif item.name in by_name:
            problems.append(f"$.passes[{index}]: {item.name!r} is given twice; give it once with all its options")
        else:
            by_name[item.name] = item
    for item in by_name.values():
        problems += [
            f"{item.name!r} needs {name!r}, which is not in the list" for name in item.requires if name not in by_name
        ]
        problems += [
            f"{item.name!r} and {name!r} cannot be used together" for name in item.conflicts if name in by_name
        ]
    if problems:
        raise PipelineError("\n".join(problems))
    ordered = [p for stage in STAGES for p in _sorted_stage([p for p in by_name.values() if p.stage == stage])]
    for stage in STAGES:
        _sorted_stage([p for p in ordered if stage in (p.stage, *p.also)])
    return ordered


def _sorted_stage(passes: list[Pass]) -> list[Pass]:
    """Stable topological order: the given order, except where ``after`` asks for another."""
    names = {p.name for p in passes}
    waiting, ordered, done = list(passes), [], set[str]()
    while waiting:
        ready = next((p for p in waiting if all(n in done or n not in names for n in p.after)), None)
        if ready is None:
            circle = ", ".join(f"{p.name} (after {', '.join(p.after)})" for p in waiting)
            raise PipelineError(f"these passes each ask to run after another of them: {circle}")
        waiting.remove(ready)
        ordered.append(ready)
        done.add(ready.name)
    return ordered
