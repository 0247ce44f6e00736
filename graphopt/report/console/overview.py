"""What is about to train, on one screen: each pass with every option in force, what it changed, what it means."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes, tensors_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.report.console.terminal import Span, first_rank, write_spans
from graphopt.rewriting.pass_ import Pass, PassRecord
from graphopt.rewriting.text.spec import option_fields
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["announce", "overview_spans", "overview_text"]

logger = logging.getLogger(__name__)

_VARIABLE = "GRAPHOPT_OVERVIEW"
_LONGEST = 120
"""Letters of an option's value that are shown."""

_NUMERICS = {
    "bitwise": "results equal the captured program's to the last bit",
    "tolerant": "results differ within the tolerances that the passes state",
    "changes": "results differ by design",
}


def announce(rewritten: Rewritten, first: bool) -> None:
    """Write the overview to stderr at the start of training.

    It is written by rank 0, where stderr is a terminal; ``GRAPHOPT_OVERVIEW=1`` writes it anywhere, and
    ``GRAPHOPT_OVERVIEW=0`` nowhere.

    Args:
        rewritten: what came of the passes.
        first: whether it is the first capture of a model or step; nothing is written for others.
    """
    if first and _wanted() and first_rank():
        write_spans(overview_spans(rewritten.pipeline.passes, rewritten.records, rewritten.program), sys.stderr)


def _wanted() -> bool:
    setting = os.environ.get(_VARIABLE, "")
    if setting not in ("", "0", "1"):
        logger.warning("%s is %r, and means nothing: 1 prints the overview anywhere, 0 nowhere", _VARIABLE, setting)
    return setting == "1" or (setting != "0" and sys.stderr is not None and sys.stderr.isatty())


def overview_text(passes: Sequence[Pass], records: Sequence[PassRecord], program: Program) -> str:
    """The overview as text.

    Args:
        passes: in the order in which they run.
        records: what each did.
        program: that runs, behind all of them.
    """
    return "".join("".join(text for text, _ in line) + "\n" for line in overview_spans(passes, records, program))


def overview_spans(passes: Sequence[Pass], records: Sequence[PassRecord], program: Program) -> Iterator[list[Span]]:
    """The same as lines made of pieces with their rich styles."""
    calls = sum(node.op not in ("placeholder", "output") for node in program.graph.nodes)
    count = counted(len(passes), "passes") if passes else "no passes"
    head = f"graphopt: {program.title or 'program'}, {program.stage} stage, {counted(calls, 'ops')}, {count}"
    yield [(head, "bold")]
    for current in passes:
        own = [record for record in records if record.spec == str(current)]
        yield [(f"  {current.name}", "bold"), (f" ({current.stage}, {current.numerics})", "")]
        yield from _options(current)
        if not own:
            yield [("    did not run: there was nothing for it to do in this program", "yellow")]
        for record in own:
            yield [
                (
                    f"    {record.stage}: {record.changed}{_peak(record)}",
                    "" if record.changed or record.changed.satisfied else "yellow",
                )
            ]
    yield [(f"  predicted peak  {_peaks(records, program)}", "")]
    yield [(f"  numerics        {_numerics(records)}", "")]
    yield [(f"  exchange        {_exchange(program)}", "")]


def _options(current: Pass) -> Iterator[list[Span]]:
    """Every option in force; a pass that is no dataclass has none that are known."""
    for option in option_fields(type(current)) if hasattr(type(current), "__dataclass_fields__") else ():
        value = getattr(current, option.field)
        shown = _value(value)
        shown = shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"
        default = not option.required and value == option.default
        yield [(f"    {option.name} = {shown}", "dim" if default else ""), (" (default)" if default else "", "dim")]


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return str(getattr(value, "__qualname__", value))


def _peak(record: PassRecord) -> str:
    before, after = record.peak_before, record.peak_after
    if before is None or after is None or before == after:
        return ""
    return f"; peak {_change(before, after)}"


def _peaks(records: Sequence[PassRecord], program: Program) -> str:
    """The peak of the program that runs, and how it was before the passes of each stage."""
    timeline = program.memory()
    resident = f"of which {format_bytes(timeline.resident_bytes)} persistent"
    stages: dict[str, list[int]] = {}
    for record in records:
        if record.peak_before is not None and record.peak_after is not None:
            stages.setdefault(record.stage, []).extend([record.peak_before, record.peak_after])
    peaks = {stage: _change(found[0], found[-1]) for stage, found in stages.items()}
    now = peaks.pop(program.stage, format_bytes(timeline.peak_bytes))
    earlier = "".join(f"; {stage} stage {change}" for stage, change in peaks.items())
    return f"{now}, {resident}{earlier}"


def _change(before: int, after: int) -> str:
    return format_bytes(after) if before == after else f"{format_bytes(before)} -> {format_bytes(after)}"


def _numerics(records: Sequence[PassRecord]) -> str:
    found = {record.numerics for record in records if record.changed}
    worst = next((kind for kind in ("changes", "tolerant") if kind in found), "bitwise")
    who = sorted({record.name for record in records if record.changed and record.numerics == worst})
    by = f" ({', '.join(who)})" if worst != "bitwise" else ""
    return f"{worst}: {_NUMERICS[worst]}{by}"


def _exchange(program: Program) -> str:
    """What a step of this program gives to collectives."""
    starts = [n for n in program.graph.nodes if schema.is_collective(n) and not schema.hands_on(n)]
    if not starts:
        return "nothing"
    size = sum(storage_bytes(t) for node in starts for s in node.all_input_nodes for t in tensors_of(value_of(s)))
    kinds = Counter(schema.op_name(node).rstrip("_") for node in starts)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return f"this rank puts {format_bytes(size)} per step into collectives: {listed}"
