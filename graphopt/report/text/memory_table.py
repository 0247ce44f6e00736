"""Where a program's bytes are: the peak, what is alive there, and a chart over its calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.analysis.returned_loss import of_loops
from graphopt.ir.files.text import short_source
from graphopt.ir.memory.timeline import LiveTensor, MemoryTimeline, ReservedMemory
from graphopt.ir.node import info
from graphopt.ir.program import Program
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.report.console.terminal import Span
from graphopt.report.text.memory_chart import category_style, chart

__all__ = ["memory_json", "memory_spans", "memory_text"]

_BAR = 24
_BLOCK = "█"


def memory_text(program: Program, top: int = 10, width: int = 80) -> str:
    """The memory report: peak and where it is, categories and largest tensors there, and a chart over the calls.

    Args:
        program: of any stage; a forward program is counted as if it ran without autograd.
        top: how many of the tensors alive at the peak are listed.
        width: columns that the chart may take, 40 at least; names and source lines are never cut.

    Returns:
        lines of text; bytes in powers of ten, sizes that vary by their example.
    """
    lines = memory_spans(program, top, width, colored=False)
    return "".join("".join(text for text, _ in line) + "\n" for line in lines)


def memory_spans(program: Program, top: int = 10, width: int = 80, *, colored: bool = True) -> list[list[Span]]:
    """The same for a terminal: lines made of pieces with their rich styles, with a chart by category.

    Args:
        program: as for ``memory_text``.
        top: as for ``memory_text``.
        width: as for ``memory_text``.
        colored: without, what ``memory_text`` says, and no styles.
    """
    timeline = program.memory()
    passes = ", ".join(program.history) or "none"
    title = f"{program.title or 'program'}, {program.stage} stage; passes: {passes}"
    if not timeline.nodes:
        return [
            [(title, "bold" if colored else "")],
            [(f"no ops; {format_bytes(timeline.resident_bytes)} persistent", "")],
        ]
    lines: list[list[Span]] = [[(title, "bold" if colored else "")]]
    reserved = reserved_where_cached(program, timeline)
    known = [] if reserved is None else _reserved(reserved)
    lines += [[(line, "")] for line in [*_peak(timeline), *known, "", "at the peak, by category"]]
    lines += _categories(timeline, colored)
    lines += [[(line, "")] for line in ["", *_alive(timeline.alive, top), ""]]
    return lines + chart(timeline, width, colored=colored)


def memory_json(program: Program) -> dict[str, Any]:
    """The same for machines: peak, categories, everything alive at the peak, and the bytes at each call.

    Args:
        program: of any stage.

    Returns:
        plain data: ``peak_bytes``, ``allocated_peak_bytes`` (what running adds to persistent memory),
        ``resident_bytes``, ``loops`` (``MemoryTimeline.loops``), ``device`` (the one whose bytes these are),
        ``other_devices`` (what is on others), ``peak_at``, ``reserved`` (what the device's allocator takes, None where
        that is what is alive), ``categories``, ``alive`` and ``timeline``. All sizes are bytes.
    """
    timeline = program.memory()
    reserved = reserved_where_cached(program, timeline)
    return {
        "title": program.title,
        "stage": program.stage,
        "passes": list(program.history),
        "peak_bytes": timeline.peak_bytes,
        "allocated_peak_bytes": timeline.allocated_peak_bytes,
        "resident_bytes": timeline.resident_bytes,
        "loops": dict(timeline.loops),
        "device": timeline.where,
        "other_devices": {
            device: {"peak_bytes": other.peak_bytes, "resident_bytes": other.resident_bytes}
            for device, other in timeline.others.items()
        },
        "peak_at": _call_json(timeline, _peak_position(timeline)) if timeline.nodes else None,
        "reserved": None if reserved is None else _reserved_json(reserved),
        "categories": timeline.categories if timeline.nodes else {},
        "alive": [
            {"name": item.name, "bytes": item.bytes, "category": item.category, "source": item.source}
            for item in (timeline.alive if timeline.nodes else [])
        ],
        "timeline": [_call_json(timeline, position) for position in range(len(timeline.nodes))],
    }


def _call_json(timeline: MemoryTimeline, position: int) -> dict[str, Any]:
    node = timeline.nodes[position]
    known = info(node)
    return {
        "call": position,
        "node": node.name,
        "names": list(known.names),
        "phase": known.phase.value,
        "module": known.module,
        "source": known.source,
        "bytes": timeline.bytes[position],
    }


def _peak_position(timeline: MemoryTimeline) -> int:
    return timeline.bytes.index(timeline.peak_bytes)


def _peak(timeline: MemoryTimeline) -> list[str]:
    position = _peak_position(timeline)
    node = timeline.nodes[position]
    known = info(node)
    name = f" ({known.names[0]})" if known.names else ""
    source = f", {short_source(known.source)}" if known.source else ""
    added = format_bytes(timeline.allocated_peak_bytes)
    return [
        f"peak        {format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes)",
        f"where       {node.name}{name}, op {position + 1} of {len(timeline.nodes)}, in {known.phase.value}{source}",
        f"persistent  {format_bytes(timeline.resident_bytes)} before and after; running adds up to {added}",
        *([f"loops       {loops}"] if (loops := of_loops(timeline)) else []),
        *(_elsewhere(timeline)),
    ]


def _elsewhere(timeline: MemoryTimeline) -> Iterator[str]:
    """What is on other devices than the one that is shown; nothing for a program on one device."""
    for device, other in timeline.others.items():
        peak, resident = format_bytes(other.peak_bytes), format_bytes(other.resident_bytes)
        yield f"{f'on {device}':<11} {peak} at most beside what is on {timeline.where}, {resident} of it persistent"


def _reserved(reserved: ReservedMemory) -> list[str]:
    """What the device's allocator takes for the program, line by line."""
    where = reserved.peak_at
    at = "before the first op" if where is None else f"at {(info(where).names or (where.name,))[0]}"
    used = ", ".join(f"{name} {format_bytes(size)}" for name, size in reserved.workspaces.items() if size)
    first = (
        f"reserved    {format_bytes(reserved.reserved_peak_bytes)} ({reserved.reserved_peak_bytes} bytes) on "
        f"{reserved.device} in {counted(reserved.segments, 'segments')}, first {at}"
    )
    second = (
        f"unused      {format_bytes(reserved.unused_bytes)} of it then, {format_bytes(reserved.inactive_split_bytes)} "
        f"in split segments; blocks in use reach {format_bytes(reserved.allocated_peak_bytes)}"
    )
    lines = [first, second, *([f"            {used} of it for workspaces of libraries"] if used else [])]
    if reserved.memory_bytes is not None:
        outside = f", {format_bytes(reserved.context_bytes)} outside of the allocator" if reserved.context_bytes else ""
        fits = "fits into" if reserved.fits else "does not fit into"
        lines.append(f"device      {fits} {format_bytes(reserved.memory_bytes)}{outside}")
    return lines


def _reserved_json(reserved: ReservedMemory) -> dict[str, Any]:
    where = reserved.peak_at
    return {
        "device": reserved.device,
        "reserved_peak_bytes": reserved.reserved_peak_bytes,
        "active_peak_bytes": reserved.active_peak_bytes,
        "allocated_peak_bytes": reserved.allocated_peak_bytes,
        "requested_peak_bytes": reserved.requested_peak_bytes,
        "allocated_bytes": reserved.allocated_bytes,
        "inactive_split_bytes": reserved.inactive_split_bytes,
        "segments": reserved.segments,
        "workspaces": dict(reserved.workspaces),
        "context_bytes": reserved.context_bytes,
        "memory_bytes": reserved.memory_bytes,
        "fits": reserved.fits,
        "peak_at": None if where is None else where.name,
    }


def _categories(timeline: MemoryTimeline, colored: bool) -> list[list[Span]]:
    names, rows = [], []
    for category, size in sorted(timeline.categories.items(), key=lambda item: (-item[1], item[0])):
        share = size / timeline.peak_bytes
        names.append(category)
        rows.append((category, format_bytes(size), f"{share:.1%}", _BLOCK * max(1, round(share * _BAR))))
    lines = aligned(rows, right=(1, 2), indent=2)
    if not colored:
        return [[(line, "")] for line in lines]
    texts = [(line.rstrip(_BLOCK), line) for line in lines]
    return [
        [(text, ""), (line[len(text) :], category_style(name))] for name, (text, line) in zip(names, texts, strict=True)
    ]


def _alive(alive: list[LiveTensor], top: int) -> list[str]:
    shown = alive[:top]
    lines = [f"alive at the peak, largest {len(shown)} of {len(alive)}"]
    rows = [(item.name, format_bytes(item.bytes), item.category, short_source(item.source)) for item in shown]
    lines += aligned(rows, right=(1,), indent=2)
    rest = sum(item.bytes for item in alive[len(shown) :])
    return lines + ([f"  and {len(alive) - len(shown)} more, {format_bytes(rest)} together"] if rest else [])
