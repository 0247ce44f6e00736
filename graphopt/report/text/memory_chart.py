"""A memory timeline drawn with block characters: one color for plain text, one for each category on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.report.console.terminal import Span
from graphopt.report.text.memory_bands import (
    CATEGORY_STYLES,
    OTHER_STYLE,
    Section,
    bytes_by_category,
    columns,
    highest,
    sections,
)

__all__ = ["category_style", "chart"]

_LEVELS = " ▁▂▃▄▅▆▇█"
_LIMIT = "┄"
_PLAIN_ROWS, _COLORED_ROWS = 8, 14
_NARROWEST = 40


def category_style(category: str) -> str:
    """The rich style of a category's blocks."""
    return CATEGORY_STYLES.get(category, OTHER_STYLE)[0]


def chart(
    timeline: MemoryTimeline, width: int, *, colored: bool = False, top: int = 0, limit: int | None = None
) -> list[list[Span]]:
    """Bytes above persistent memory, at the highest of each column's ops; ``▲`` marks the peak.

    Args:
        timeline: with at least one call.
        width: columns that the chart may take; at least 40 are taken.
        colored: stack the categories, each in its color, in a higher chart, and say which is which.
        top: bytes that the chart reaches up to at least, so that two charts can have one scale.
        limit: bytes at which a dashed line crosses the chart, such as a budget; it has to be above persistent memory.

    Returns:
        lines, each made of pieces with their rich styles; none has a style unless ``colored``.
    """
    return list(_Chart(timeline, max(width, _NARROWEST), colored, top, limit).lines())


class _Chart:
    def __init__(self, timeline: MemoryTimeline, width: int, colored: bool, top: int, limit: int | None) -> None:
        self.timeline, self.colored, self.limit = timeline, colored, limit
        self.rows = _COLORED_ROWS if colored else _PLAIN_ROWS
        self.low, self.high = timeline.resident_bytes, max(timeline.peak_bytes, top, limit or 0)
        self.peak = timeline.bytes.index(timeline.peak_bytes)
        self.sections = sections(timeline)
        self.label = max(len(format_bytes(self.low)), len(format_bytes(self.high)))
        self.widths = _widths(self.sections, width - self.label - 2 - len(self.sections))
        self.moving = _above_persistent(timeline) if colored else {}

    def lines(self) -> Iterator[list[Span]]:
        """The whole chart."""
        calls, label = len(self.timeline.nodes), self.label
        yield [(f"bytes over the {calls} ops, from persistent memory up to the peak (▲)", "")]
        labels = [format_bytes(self.high), *[""] * (self.rows - 2), format_bytes(self.low)]
        crossed = self._crossed()
        if self.limit is not None and crossed is not None:
            labels[crossed] = format_bytes(self.limit)
        axis = names = ""
        blocks: list[list[Span]] = [[] for _ in labels]
        for section in self.sections:
            space = self.widths[section.name]
            shown = columns(section, space)
            stacks = [self._stack(column) for column in shown]
            for row, cells in enumerate(blocks):
                base = (self.rows - 1 - row) * 8
                blank = _LIMIT if row == crossed else " "
                drawn = [_cell(stack, base, blank) for stack in stacks]
                cells += _joined([*drawn, (blank * (space - len(shown)) + "│", "")])
            axis += "".join("▲" if self.peak in column else "─" for column in shown).ljust(space, "─") + "┴"
            names += section.name.ljust(space + 1)
        for text, cells in zip(labels, blocks, strict=True):
            yield _joined([(f"{text.rjust(label)} │", ""), *cells])
        yield [(f"{' ' * label} └{axis}", "")]
        yield [(f"{' ' * label}  {names}".rstrip(), "")]
        if self.moving:
            yield [(f"{' ' * label}  from the top:", ""), *self._key()]
        for section in self.sections:
            most = format_bytes(max(self.timeline.bytes[section.start : section.end]))
            yield [(f"{section.name}: {counted(section.size, 'ops')}, up to {most}", "")]

    def _crossed(self) -> int | None:
        """The row, from the top, that the limit crosses: the first one above a bar of so many bytes."""
        if self.limit is None or not self.low <= self.limit < self.high:
            return None
        return self.rows - 1 - min(self._eighths(self.limit - self.low) // 8, self.rows - 1)

    def _key(self) -> Iterator[Span]:
        for name in reversed(self.moving):
            yield " ██", category_style(name)
            yield f" {name}", ""

    def _stack(self, column: range) -> list[Span]:
        """What stands in a column from the bottom: a blank for each eighth of a row, with its style."""
        call = highest(self.timeline, column)
        if not self.colored:
            return [("", "")] * self._eighths(self.timeline.bytes[call] - self.low)
        total, stack = 0, list[Span]()
        for name, sizes in self.moving.items():
            total += sizes[call]
            stack += [("", category_style(name))] * (self._eighths(total) - len(stack))
        return stack

    def _eighths(self, size: int) -> int:
        """The height of a bar in eighths of a row; what is above the base is at least one."""
        if self.high == self.low:
            return 0
        return max(1 if size > 0 else 0, round(size / (self.high - self.low) * self.rows * 8))


def _cell(stack: list[Span], base: int, blank: str) -> Span:
    """The character of one row: a block as high as the lowest style in it, on the most frequent one above."""
    styles = [style for _, style in stack[base : base + 8]]
    if not styles:
        return blank, ""
    lowest = styles[0]
    height = next((index for index, style in enumerate(styles) if style != lowest), len(styles))
    if height == len(styles):
        return _LEVELS[height], lowest
    above = max(styles[height:], key=styles[height:].count)
    if len(styles) < 8:
        return _LEVELS[len(styles)], max(styles, key=styles.count)
    return _LEVELS[height], f"{lowest} on {above}"


def _joined(spans: list[Span]) -> list[Span]:
    """The same with neighbours of one style as one piece."""
    found: list[Span] = []
    for text, style in spans:
        if found and found[-1][1] == style:
            found[-1] = (found[-1][0] + text, style)
        else:
            found.append((text, style))
    return found


def _above_persistent(timeline: MemoryTimeline) -> dict[str, list[int]]:
    """Bytes of each category at each op, without persistent memory; only categories that have any."""
    resident: dict[str, int] = {}
    for storage in timeline.storages:
        if storage.is_input:
            resident[storage.category] = resident.get(storage.category, 0) + storage.bytes
    found = {}
    for name, sizes in bytes_by_category(timeline).items():
        base = resident.get(name, 0)
        if any(size > base for size in sizes):
            found[name] = [size - base for size in sizes]
    return found


def _widths(parts: list[Section], room: int) -> dict[str, int]:
    """How many columns each section gets: by its number of calls, and enough for its name."""
    widths: dict[str, int] = {}
    calls = sum(section.size for section in parts)
    for section in sorted(parts, key=lambda item: item.size):
        share = min(section.size, room * section.size // calls)
        widths[section.name] = max(share, len(section.name))
        room, calls = max(0, room - widths[section.name]), calls - section.size
    return widths
