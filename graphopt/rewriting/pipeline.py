"""A list of passes: how it is ordered, checked and run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from graphopt import _torch
from graphopt.errors import GraphoptError, PassError, PipelineError, VerifyError, check_type, quoted, shown
from graphopt.ir import verify as verifier
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.host import is_memory_shortage
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Stage
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.instruments import Instrument
from graphopt.rewriting.pass_ import STAGES, Changed, Pass, PassRecord, PassStage, Records
from graphopt.rewriting.pipeline_file import read_passes
from graphopt.rewriting.registry import find_pass
from graphopt.rewriting.shards import Shards
from graphopt.rewriting.text.spec import parse_passes
from graphopt.rewriting.training_pass import TrainingPass

__all__ = ["AUTO", "Passes", "Pipeline"]

AUTO = "auto"
"""What stands for the passes that the machine needs; by itself for a plan where memory is short."""

_WITHIN_MEMORY = "fit-memory{budget=auto}"


Passes = str | Pass | Iterable[Pass | str] | os.PathLike[str] | None
"""What stands for a list of passes: objects or their text form, in a list or alone, or the path of a file."""


class Pipeline:
    """An ordered list of passes.

    Args:
        passes: ``Pass`` objects or their text form, in a list or alone, another pipeline, or the ``pathlib.Path`` of a
            file (``graphopt.configs.load``); None for no passes. Their order is free where nothing constrains it.

    Raises:
        PipelineError: with every problem at once: unknown names and options, a pass given twice, conflicts, missing
            requirements, circular order.

    Example:
        >>> pipeline = graphopt.Pipeline("fit-memory{budget=8GB},mixed-precision")
        >>> [current.name for current in pipeline.passes]
        ['mixed-precision', 'fit-memory']
    """

    def __init__(self, passes: Passes = ()) -> None:
        self.passes: tuple[Pass, ...] = tuple(_ordered(_listed(passes)))

    def __str__(self) -> str:
        return ",".join(str(p) for p in self.passes)

    def alone(self, current: Pass) -> Pipeline:
        """One of its passes as a pipeline; that the others which it needs are there was checked for all together."""
        made = Pipeline()
        made.passes = (current,)
        return made

    def of(self, stage: PassStage) -> list[Pass]:
        """The passes that rewrite the program of one stage, in order.

        In a forward program that is captured under autocast, the pass that wanted that comes first: it writes down what
        autocast does, which other passes then find.
        """
        ordered = _sorted_stage([p for p in self.passes if stage in (p.stage, *p.also)])
        return sorted(ordered, key=lambda p: p.autocast is None) if stage == "forward" else ordered

    @property
    def autocast(self) -> torch.dtype | None:
        """The autocast that a model is captured under, as a pass wants it (``Pass.autocast``); None for none.

        Raises:
            PipelineError: where two passes want one.
        """
        wanted = {current.name: current.autocast for current in self.passes if current.autocast is not None}
        if len(wanted) > 1:
            raise PipelineError(f"{' and '.join(wanted)} both want the model captured under autocast: give one of them")
        return next(iter(wanted.values()), None)

    @property
    def training(self) -> list[TrainingPass]:
        """The passes that act between steps, in order."""
        return [current for current in self.passes if isinstance(current, TrainingPass)]

    def shards(self, sizes: Mapping[str, int]) -> Shards | None:
        """The part of each trained parameter that this rank updates, as a pass wants it (``TrainingPass.shards``).

        Raises:
            PipelineError: where two passes want to say so.
        """
        found = {current.name: current.shards(sizes) for current in self.training}
        wanted = {name: shards for name, shards in found.items() if shards is not None}
        if len(wanted) > 1:
            raise PipelineError(f"{' and '.join(wanted)} both shard the update: give one of them")
        return next(iter(wanted.values()), None)

    @property
    def shard_group(self) -> str | None:
        """The process group over whose ranks a pass divides the update; None without such a pass."""
        dividing = (current for current in self.training if type(current).shards is not TrainingPass.shards)
        return next((str(getattr(current, "group", "")) for current in dividing), None)

    @property
    def trains_apart(self) -> bool:
        """Whether a pass lets ranks train by themselves for a while (``TrainingPass.settle``)."""
        return any(type(current).settle is not TrainingPass.settle for current in self.training)

    @property
    def groups(self) -> list[str]:
        """The process groups that passes are told to exchange over, by name; ``""`` is the default group.

        From their options ``group``, ``groups`` (entries ``GLOB=GROUP``) and ``replicas``.
        """
        found = [getattr(current, "group", None) for current in self.passes]
        found += [getattr(current, "replicas", None) or None for current in self.passes]
        entries = [entry for current in self.passes for entry in getattr(current, "groups", ())]
        named = [name for name in found if isinstance(name, str)]
        return list(dict.fromkeys([*named, *(entry.rpartition("=")[2] for entry in entries)]))

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
    ) -> Records:
        """Apply the passes of the program's stage to it, in place.

        Around each pass: instruments, apply, dead code, refreshed values, the invariant table.

        Args:
            program: of any stage.
            last: whether this is the program that runs, so that passes of the stage ``last`` are due too.
            verify: whether to check the invariant table after each pass.
            instruments: are told of each pass.

        Raises:
            ArgumentError: for what is no program.
            PassError: where a pass raises; the original is its cause.
            VerifyError: where a pass leaves a program that breaks an invariant.
        """
        check_type(
            "Pipeline.run's program", program, Program, "a graphopt.Program", "graphopt.capture(model, args) makes one"
        )
        records = Records()
        due = [current for current in self.due(program.stage, last=last) if current.concerns(program)]
        for current in due:
            if not current.concerns(program):  # of two stages, and done with both at the first of them
                continue
            for instrument in instruments:
                instrument.before_pass(current, program)
            before = program.copy()
            try:
                record = self._apply(current, program, before, verify is not False)
            except Exception as error:
                for instrument in instruments:
                    instrument.failed_pass(current, before, error)
                raise self._failure(current, due, program.stage, error) from error
            program.context = program.context.after(record.spec)
            records.append(record)
            for instrument in instruments:
                instrument.after_pass(current, program, record)
        return records

    def _apply(self, current: Pass, program: Program, before: Program, check: bool) -> PassRecord:
        started = time.perf_counter()
        with plain_precision(), _torch.sizes_taken_as(program.context.sizes.planned):
            return self._apply_plainly(current, program, before, check, started)

    def _apply_plainly(
        self, current: Pass, program: Program, before: Program, check: bool, started: float
    ) -> PassRecord:
        was = None if program.stage == "forward" else program.memory()
        changed = current.apply(program)
        if not isinstance(changed, Changed):
            raise PassError(
                f"{type(current).__name__}.apply returned {type(changed).__name__}; pass developer: return a Changed"
            )
        program.erase_dead()
        if check:
            verifier.verify(
                program,
                before=before,
                declared_signature_change=current.changes_signature,
                declared_draws=current.draws,
            )
        seconds = time.perf_counter() - started
        peaks: tuple[int | None, int | None] = (None, None)
        if was is not None:
            now = program.memory()
            peaks = (was.peak_bytes, now.peak_bytes)
            changed = _with_saving(changed, was, now) if changed else changed
        return PassRecord(
            current.name,
            str(current),
            program.stage,
            current.numerics,
            changed,
            seconds,
            len(before.graph.nodes),
            len(program.graph.nodes),
            *peaks,
        )

    def _failure(self, current: Pass, due: Sequence[Pass], stage: Stage, error: Exception) -> GraphoptError:
        shown = ", ".join(f">>> {p} <<<" if p is current else str(p) for p in self.passes)
        kind = VerifyError if isinstance(error, VerifyError) else PassError
        what = "left a program that is not valid" if isinstance(error, VerifyError) else "failed"
        why = f"the machine's memory ran out ({error})" if is_memory_shortage(error) else quoted(error)
        failure = kind(
            f"pass {due.index(current) + 1}/{len(due)} of the {stage} stage, {current.name!r}, {what}: {why}"
        )
        failure.add_note(f"pipeline: {shown}")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        return failure


_BLOCK = 512
"""Bytes that allocators round to: a peak that rises by less is not worth a word."""


def _with_saving(changed: Changed, was: MemoryTimeline, now: MemoryTimeline) -> Changed:
    """Add how much lower the peak is; where it is higher, a line says so, and what it consists of."""
    saved = was.peak_bytes - now.peak_bytes
    lines = changed.lines
    if -saved > max(_BLOCK, was.peak_bytes // 1000):
        largest = ", ".join(f"{item.name} ({format_bytes(item.bytes)})" for item in now.alive[:3])
        lines = (*lines, f"the predicted peak rises by {format_bytes(-saved)}; largest there: {largest}")
    return replace(changed, bytes_saved=saved, lines=lines)


def _listed(passes: Any) -> list[Any]:
    """The objects that ``passes`` stands for, and what else is in a list of them.

    Raises:
        PipelineError: for what is no list of passes, and for text that describes none.
    """
    if passes is None:
        return []
    if isinstance(passes, str):
        return parse_passes(_WITHIN_MEMORY if passes == AUTO else passes, find_pass)
    if isinstance(passes, os.PathLike):
        return read_passes(passes)
    if isinstance(passes, Pipeline):
        return list(passes.passes)
    if isinstance(passes, (Pass, type)):
        return [passes]
    if isinstance(passes, Mapping) or not isinstance(passes, Iterable):
        hint = "; it is run where FxPass(...) wraps it" if callable(passes) else ""
        raise PipelineError(
            f"passes is a list of passes, such as [Recompute(...)], or text, such as {_EXAMPLE!r}, got "
            f"{shown(passes)}{hint}"
        )
    return [found for item in passes for found in (_parsed(item) if isinstance(item, str) else [item])]


def _parsed(text: str) -> list[Any]:
    """The passes of one text in a list, or the error that is to be reported with what else is wrong."""
    try:
        return parse_passes(text, find_pass)
    except PipelineError as error:
        return [error]


_EXAMPLE = "recompute{checkpoints=blocks.*}"


def _ordered(given: Sequence[Any]) -> list[Pass]:
    problems: list[str] = []
    by_name: dict[str, Pass] = {}
    for index, item in enumerate(given):
        if isinstance(item, PipelineError):
            problems.append(f"$.passes[{index}]: {item}")
        elif isinstance(item, type) and issubclass(item, Pass):
            problems.append(f"$.passes[{index}]: {item.__name__} is a class; give an object: {item.__name__}(...)")
        elif not isinstance(item, Pass):
            problems.append(
                f"$.passes[{index}]: {shown(item)} is not a pass; wrap a function on a GraphModule in FxPass(...)"
            )
        elif not isinstance(item, TrainingPass) and (unused := _never_called(item)):
            problems.append(
                f"$.passes[{index}]: {type(item).__name__} has {', '.join(unused)}, which only a graphopt.TrainingPass "
                "is asked for: make that its base class"
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


def _never_called(item: Pass) -> list[str]:
    """The methods of ``TrainingPass`` that a pass has without being one."""
    wanted = [name for name in vars(TrainingPass) if not name.startswith("_")]
    return [name for name in wanted if callable(getattr(type(item), name, None))]


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
