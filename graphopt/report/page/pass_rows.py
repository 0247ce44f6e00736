"""What the table of passes and the sentence above it say."""

from __future__ import annotations

from typing import Any

from graphopt.errors import PipelineError
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.page.story import STAGE_NAMES, Story
from graphopt.rewriting.registry import find_pass
from graphopt.rewriting.text.spec import option_fields, parse_passes

__all__ = ["passes_json", "sentence"]


def passes_json(story: Story) -> list[dict[str, Any]]:
    """One row for each pass that ran; bytes are predicted, seconds measured."""
    return [
        {
            "name": record.name,
            "spec": record.spec,
            "options": _options(record.spec),
            "stage": record.stage,
            "numerics": record.numerics,
            "done": bool(record.changed),
            "changed": str(record.changed),
            "ops": _ops(story, index),
            "peaks": [record.peak_before, record.peak_after],
            "seconds": record.seconds,
            "lines": list(record.changed.lines),
            "tensors": list(record.changed.tensors),
        }
        for index, snapshot in enumerate(story.snapshots)
        if (record := snapshot.record) is not None
    ]


def _ops(story: Story, index: int) -> list[int] | None:
    """Ops before and after a pass; None of a capture that was read, which has the last program alone."""
    previous = story.previous(index)
    if previous is None or story.snapshots[previous].program is story.snapshots[index].program:
        return None
    return [_op_count(story.snapshots[at].program) for at in (previous, index)]


def _options(spec: str) -> list[list[Any]]:
    """Every option in force as ``[name, value, whether it is the default]``; none of a pass that is not registered."""
    try:
        (current,) = parse_passes(spec, find_pass)
    except (PipelineError, ValueError, TypeError):
        return []
    rows = []
    for option in option_fields(type(current)):
        value = getattr(current, option.field)
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        rows.append([option.name, shown, not option.required and value == option.default])
    return rows


def sentence(story: Story, peaks: tuple[int, int] | None) -> str:
    """One sentence that sums the run up: model, stage, ops, passes, and the peak before and after.

    Args:
        story: what the page shows.
        peaks: predicted peaks in bytes, before and after; None for a forward program, whose bytes mean little.
    """
    program = story.snapshots[story.after].program
    count = _op_count(program)
    ops = "1 op" if count == 1 else f"{count:,} ops"
    parts = [f"{program.title or 'A program'}: {STAGE_NAMES[program.stage]} of {ops}"]
    done = list(dict.fromkeys(record.name for record in story.records if record.changed))
    idle = list(dict.fromkeys(record.name for record in story.records if record.name not in done))
    if done:
        parts.append(f"rewritten by {_listed(done)}")
    if idle:
        parts.append(f"{_listed(idle)} changed nothing")
    if not story.records:
        parts.append(f"after {', '.join(program.history)}" if program.history else "as captured, without passes")
    if peaks is not None:
        parts.append(_peak(story, peaks))
    return "; ".join(parts) + "."


def _op_count(program: Program) -> int:
    return sum(node.op not in ("placeholder", "output") for node in program.graph.nodes)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _peak(story: Story, peaks: tuple[int, int]) -> str:
    before, after = peaks
    changed = f" → {format_bytes(after)}" if before != after else ""
    share = f" ({after / before - 1:+.1%})" if before and before != after else ""
    told = f"predicted peak {format_bytes(before)}{changed}{share}"
    measured = [
        f"{what} {format_bytes(size)}"
        for what, size in (("before", story.measured.before), ("after", story.measured.after))
        if size is not None
    ]
    return told + (
        f"; measured above persistent memory: {', '.join(measured)}" if measured else "; no peak was measured"
    )
