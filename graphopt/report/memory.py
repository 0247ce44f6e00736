"""Where a program's bytes are: the peak, what is alive there, and a chart over its calls."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from graphopt.analysis.liveness import LiveTensor, MemoryTimeline
from graphopt.program import Phase, Program, info
from graphopt.report.tables import aligned
from graphopt.report.text import short_source
from graphopt.values import format_bytes

__all__ = ["memory_json", "memory_text"]

_HEIGHT = 8
_LEVELS = " ▁▂▃▄▅▆▇█"
_BAR = 24


def memory_text(program: Program, top: int = 10, width: int = 80) -> str:
    """The memory report: peak and where it is, categories and largest tensors there, and a chart over the calls.

    Args:
        program: of any stage; a forward program is counted as if it ran without autograd.
        top: how many of the tensors alive at the peak are listed.
        width: columns that the chart may take, 40 at least; names and source lines are never cut.

    Returns:
        lines of text; bytes in powers of ten, sizes that vary by their example.
    """
    timeline = program.memory()
    passes = ", ".join(program.history) or "none"
    lines = [f"{program.title or 'program'}, {program.stage} stage; passes: {passes}"]
    if not timeline.nodes:
        return "\n".join([*lines, f"no calls; {format_bytes(timeline.resident_bytes)} resident"]) + "\n"
    lines += _peak(timeline)
    lines += ["", "at the peak, by category", *_categories(timeline)]
    lines += ["", *_alive(timeline.alive, top)]
    lines += ["", *_chart(timeline, max(width, 40))]
    return "\n".join(lines) + "\n"


def memory_json(program: Program) -> dict[str, Any]:
    """The same for machines: peak, categories, everything alive at the peak, and the bytes at each call.

    Args:
        program: of any stage.

    Returns:
        plain data: ``peak_bytes``, ``allocated_peak_bytes`` (what running adds to what is resident),
        ``resident_bytes``, ``peak_at``, ``categories``, ``alive`` and ``timeline``. All sizes are bytes.
    """
    timeline = program.memory()
    return {
        "title": program.title,
        "stage": program.stage,
        "passes": list(program.history),
        "peak_bytes": timeline.peak_bytes,
        "allocated_peak_bytes": timeline.allocated_peak_bytes,
        "resident_bytes": timeline.resident_bytes,
        "peak_at": _call_json(timeline, _peak_position(timeline)) if timeline.nodes else None,
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
        f"peak      {format_bytes(timeline.peak_bytes)} ({timeline.peak_bytes} bytes)",
        f"where     {node.name}{name}, call {position + 1} of {len(timeline.nodes)}, in {known.phase.value}{source}",
        f"resident  {format_bytes(timeline.resident_bytes)} before and after; running adds up to {added}",
    ]


def _categories(timeline: MemoryTimeline) -> list[str]:
    rows = []
    for category, size in sorted(timeline.categories.items(), key=lambda item: (-item[1], item[0])):
        share = size / timeline.peak_bytes
        rows.append((category, format_bytes(size), f"{share:.1%}", "█" * max(1, round(share * _BAR))))
    return [f"  {line}" for line in aligned(rows, right=(1, 2))]


def _alive(alive: list[LiveTensor], top: int) -> list[str]:
    shown = alive[:top]
    lines = [f"alive at the peak, largest {len(shown)} of {len(alive)}"]
    rows = [(item.name, format_bytes(item.bytes), item.category, short_source(item.source)) for item in shown]
    lines += [f"  {line}" for line in aligned(rows, right=(1,))]
    rest = sum(item.bytes for item in alive[len(shown) :])
    return lines + ([f"  and {len(alive) - len(shown)} more, {format_bytes(rest)} together"] if rest else [])


# --- the chart -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """The calls ``start`` to ``end`` (not included), in the columns that the chart gives them."""

    name: str
    start: int
    end: int

    @property
    def size(self) -> int:
        """How many calls."""
        return self.end - self.start


def _sections(timeline: MemoryTimeline) -> list[_Section]:
    """Forward up to its last call, backward up to its last call (with what is between), the update after that."""
    phases = [info(node).phase for node in timeline.nodes]
    number = len(phases)
    forward = max((i + 1 for i, phase in enumerate(phases) if phase is Phase.FORWARD), default=0)
    late = (Phase.BACKWARD, Phase.RECOMPUTE)
    backward = max((i + 1 for i, phase in enumerate(phases) if phase in late), default=forward)
    update = next((i for i in range(max(forward, backward), number) if phases[i] is Phase.UPDATE), number)
    found = [_Section("forward", 0, forward), _Section("backward", forward, update), _Section("update", update, number)]
    return [section for section in found if section.end > section.start]


def _widths(sections: list[_Section], room: int) -> dict[str, int]:
    """How many columns each section gets: by its number of calls, and enough for its name."""
    widths: dict[str, int] = {}
    calls = sum(section.size for section in sections)
    for section in sorted(sections, key=lambda item: item.size):
        share = min(section.size, room * section.size // calls)
        widths[section.name] = max(share, len(section.name))
        room, calls = max(0, room - widths[section.name]), calls - section.size
    return widths


def _columns(section: _Section, width: int) -> list[range]:
    """The calls of each column, as even as they go."""
    columns = min(section.size, width)
    edges = [section.start + section.size * column // columns for column in range(columns + 1)]
    return [range(start, end) for start, end in itertools.pairwise(edges)]


def _chart(timeline: MemoryTimeline, width: int) -> list[str]:
    """Bytes above what is resident, the highest of each column's calls; ``▲`` marks the peak."""
    low, high = timeline.resident_bytes, timeline.peak_bytes
    label = max(len(format_bytes(low)), len(format_bytes(high)))
    sections = _sections(timeline)
    calls = len(timeline.nodes)
    widths = _widths(sections, width - label - 2 - len(sections))
    peak = _peak_position(timeline)
    rows = [""] * _HEIGHT
    axis = names = ""
    for section in sections:
        columns, space = _columns(section, widths[section.name]), widths[section.name]
        heights = [_eighths(max(timeline.bytes[i] for i in column), low, high) for column in columns]
        for row in range(_HEIGHT):
            base = (_HEIGHT - 1 - row) * 8
            rows[row] += "".join(_LEVELS[min(8, max(0, height - base))] for height in heights).ljust(space) + "│"
        axis += "".join("▲" if peak in column else "─" for column in columns).ljust(space, "─") + "┴"
        names += section.name.ljust(space + 1)
    labels = [format_bytes(high), *[""] * (_HEIGHT - 2), format_bytes(low)]
    lines = [f"bytes over the {calls} calls, from what is resident up to the peak (▲)"]
    lines += [f"{text.rjust(label)} │{row}" for text, row in zip(labels, rows, strict=True)]
    lines += [f"{' ' * label} └{axis}", f"{' ' * label}  {names}".rstrip()]
    for section in sections:
        highest = format_bytes(max(timeline.bytes[section.start : section.end]))
        lines.append(f"{section.name}: {section.size} calls, up to {highest}")
    return lines


def _eighths(size: int, low: int, high: int) -> int:
    """The height of a bar in eighths of a row; what is above the base is at least one."""
    if high == low:
        return 0
    return max(1 if size > low else 0, round((size - low) / (high - low) * _HEIGHT * 8))
