"""A program as a picture for people: one self-contained SVG."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property

from torch import fx

from graphopt import _torch
from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes, tensors_of
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.report.console.escape import printable, safe
from graphopt.report.pictures.layout import COLUMNS, ROW_HEIGHT, Box, Edge, Lane, Layout, lay_out

__all__ = ["PHASE_COLORS", "printable", "to_svg"]

PHASE_COLORS = {
    Phase.FORWARD: ("#56b4e9", "#e6f3fc", "#12303f"),
    Phase.BACKWARD: ("#e69f00", "#fdf3df", "#3b2c08"),
    Phase.RECOMPUTE: ("#009e73", "#def3ec", "#0a3226"),
    Phase.TRANSFER: ("#cc79a7", "#f9ecf3", "#3c2232"),
    Phase.SYNC: ("#e2d400", "#fcfade", "#37340e"),
    Phase.UPDATE: ("#0072b2", "#deecf6", "#0b283c"),
}
"""Each phase's color (after Okabe and Ito, told apart by everyone) and its tint on white and on black."""

_HATCHES = {
    Phase.FORWARD: "",
    Phase.BACKWARD: "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2",
    Phase.RECOMPUTE: "M1.5,1.5 h1.6 M4.5,4.5 h1.6",
    Phase.TRANSFER: "M0,3 h6",
    Phase.SYNC: "M0,0 l6,6 M0,6 l6,-6",
    Phase.UPDATE: "M3,0 v6",
}
"""What tells the phases apart where there is no color; forward is plain."""

_STYLE = """
.gou{background:#fff;font-family:ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
.gou .code{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.gou text{fill:#1b1f24}
.gou .dim{fill:#57606a}
.gou .paper{fill:#fff}
.gou .frame{fill:#f4f5f7;stroke:#c3c9d0}
.gou .flow{fill:none;stroke:#7b858f;stroke-width:1.1}
.gou .head{fill:#7b858f}
.gou .saved{fill:none;stroke:#d55e00;stroke-opacity:.5}
.gou .hosted{fill:none;stroke:#cc79a7;stroke-dasharray:7 4}
.gou .savedhead{fill:#d55e00}
.gou .hostedhead{fill:#cc79a7}
.gou .bytes{fill:#9a3f00}
.gou .pill{fill:#fff;stroke:#d55e00;stroke-opacity:.5}
.gou .ground{fill:#f4f5f7}
.gou .hatch{fill:none;stroke:#fff;stroke-width:1.5}
.gou .sync-hatch{stroke:#6b6300}
"""
_DARK = """
.gou{background:#0d1117}
.gou text{fill:#e6edf3}
.gou .dim{fill:#9aa4af}
.gou .paper{fill:#0d1117}
.gou .frame{fill:#161b22;stroke:#3d444d}
.gou .flow{stroke:#8b949e}
.gou .head{fill:#8b949e}
.gou .bytes{fill:#ffa564}
.gou .pill{fill:#0d1117}
.gou .ground{fill:#161b22}
.gou .hatch{stroke:#0d1117}
"""

_MARGIN = 28.0
_ARCS = 44.0
"""Room beside a column for arrows that pass others by."""
_THICKEST = 13.0
_CODE_ASPECT = 0.602
"""Width of a character over its height, in the widest of the monospaced fonts."""
_VERBOSE = re.compile("^_*(native_)?|_for_cpu|_legit(_functional)?|_with_indices")
"""What is left out of the names of ops in boxes."""


def to_svg(program: Program, fold: bool = True) -> str:
    """The U-shaped picture: forward down the left, backward up the right, one row per module.

    A box says which module, which ops run (views left out), and how many bytes of its results are saved for backward;
    pointing at it tells all. Arrows across are the kept activations, as thick as they are large. The file needs
    nothing else, follows the reader's light or dark setting, and tells phases apart in black and white, too.

    Args:
        program: of any stage. The peak is predicted for joint and step programs.
        fold: draw equal consecutive blocks once ("×6"), and close modules where the picture would exceed 30 rows.
    """
    (layout,) = lay_out([program], fold=fold)
    return "\n".join(_Drawing(program, layout).draw()) + "\n"


def _fit(text: str, width: float, size: float, *, keep_end: bool = False) -> str:
    """``text`` cut to ``width`` pixels in the monospaced font, at its end or, for paths, in front."""
    room = max(int(width / (size * _CODE_ASPECT)), 2)
    if len(text) <= room:
        return text
    if keep_end:
        end = text[-room + 1 :]
        return f"…{end[max(end.find('.'), 0) :]}"
    start = text[: room - 1]
    return f"{start[: start.rfind(', ') + 2] or start}…"


def _called(node: fx.Node) -> str:
    """The op that a node calls, in brief; for one that saves or replays the generator's state, the random op."""
    inner = next((a for a in node.args[:2] if isinstance(a, _torch.OpOverload)), None)
    name = inner._schema.name.split("::")[-1] if inner is not None else schema.op_name(node)
    return _VERBOSE.sub("", name.replace("scaled_dot_product", "sdp")) or name


def _ops(nodes: list[fx.Node]) -> str:
    """``addmm ×2, gelu``: which ops run how often, those with the largest results first.

    Views and picking of results are named only where there is nothing else.
    """
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for node in [n for n in nodes if not schema.is_view(n) and schema.op_name(n) != "getitem"] or nodes:
        count[_called(node)] += 1
        size[_called(node)] += sum(storage_bytes(tensor) for tensor in tensors_of(value_of(node)))
    return ", ".join(f"{name} ×{count[name]}" if count[name] > 1 else name for name, _ in size.most_common())


def _bytes_text(sizes: list[int]) -> str:
    """Bytes of each of several blocks: ``6 × 2.1 MB`` where they are equal, else their sum."""
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} × {format_bytes(sizes[0])}"
    return format_bytes(sum(sizes))


class _Drawing:
    """One picture under construction; every method yields lines of SVG."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.rows, self.frames = program, layout.rows, layout.frames
        self.boxes = layout.boxes
        self.nodes = {node.name: node for node in program.graph.nodes}
        self.saved = sorted((edge for edge in layout.edges if edge.kind == "saved"), key=lambda edge: -edge.bytes)
        self.data = [edge for edge in layout.edges if edge.kind == "data" and not edge.crossing]
        self.phases = [phase for phase in Phase if any(box.phase is phase for box in self.boxes)]
        lanes = {box.lane for box in self.boxes} or {Lane.FORWARD}
        self.left = min(COLUMNS[lane][0] for lane in lanes) - _ARCS
        self.right = max(max(sum(COLUMNS[lane]) for lane in lanes) + _ARCS, self.left + 480.0)
        self.head_height = 0.0
        self.labels: list[str] = []

    def draw(self) -> Iterator[str]:
        """The whole file."""
        head = list(self._head())
        ceiling = min([row.y for row in self.rows] + [frame.y for frame in self.frames])
        top = ceiling - 24 - self.head_height - _MARGIN
        floor = max([row.y + ROW_HEIGHT for row in self.rows] + [frame.y + frame.height for frame in self.frames])
        left, width, height = self.left - _MARGIN, self.right - self.left + 2 * _MARGIN, floor - top + _MARGIN + 8
        size = f'width="{width:g}" height="{height:g}"'
        view = f'viewBox="{left:g} {top:g} {width:g} {height:g}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" class="gou" role="img" {size} {view}>'
        yield f"<title>{safe(self.program.title or 'model')}, {self.program.stage} stage</title>"
        yield f"<desc>{safe(self._description())}</desc>"
        yield f"<style>{_style()}</style>"
        yield f"<defs>{''.join(_hatch(phase) for phase in self.phases)}</defs>"
        yield f'<rect class="paper" x="{left:g}" y="{top:g}" {size}/>'
        yield f'<g transform="translate({self.left:g} {top + _MARGIN:g})">'
        yield from head
        yield "</g>"
        for lane in {box.lane: None for box in self.boxes}:
            way = "↓" if lane in (Lane.FORWARD, Lane.FORWARD_OUTSIDE, Lane.RECOMPUTE) else "↑"
            yield _text(COLUMNS[lane][0] + 2, ceiling - 9, f"{lane.value.split()[-1]} {way}", 11, "dim")
        yield from self._frames()
        yield from self._saved_edges()
        yield from self._data_edges()
        yield from self._turn(floor)
        for box in self.boxes:
            yield from self._box(box)
        yield from self.labels
        yield "</svg>"

    # --- title and legend --------------------------------------------------------------------------------------------

    def _head(self) -> Iterator[str]:
        """Title, what is known of the program, the passes it went through, and the legend."""
        room = self.right - self.left
        yield _text(0, 18, _fit(self.program.title or "model", room, 18), 18, "", "bold")
        yield _text(0, 40, self._facts, 12, "dim")
        y = 58.0
        passes = ", ".join(self.program.history)
        for line in textwrap.wrap(f"after {passes}", int(room / 6.7), max_lines=3, placeholder=" …") if passes else ():
            yield _text(0, y, line, 11, "dim code")
            y += 16
        x = 0.0
        keys = [*((phase.value, phase.value) for phase in self.phases)]
        if any(self.boxes[edge.source].phase is not Phase.TRANSFER for edge in self.saved):
            keys.append(("saved", "saved for backward (width by bytes)"))
        if any(self.boxes[edge.source].phase is Phase.TRANSFER for edge in self.saved):
            keys.append(("hosted", "kept outside"))
        if any(frame.copies > 1 for frame in self.frames):
            keys.append(("frame", "equal blocks, drawn once"))
        for key, label in keys:
            width = 56 + 5.8 * len(label)
            if x and x + width > room:
                x, y = 0.0, y + 22
            yield from self._key(key, label, x, y)
            x += width
        self.head_height = y + 26

    def _description(self) -> str:
        """What the picture shows, for those who do not see it."""
        count = Counter({phase: sum(len(b.nodes) for b in self.boxes if b.phase is phase) for phase in self.phases})
        phases = ", ".join(f"{number} {phase.value}" for phase, number in count.items())
        folded = [
            f"{frame.label} drawn once for {frame.copies} equal blocks" for frame in self.frames if frame.copies > 1
        ]
        passes = [f"after {', '.join(self.program.history)}"] if self.program.history else []
        shape = "forward down the left, backward up the right"
        return "; ".join([shape, self._facts, f"ops drawn: {phases or 'none'}", *folded, *passes])

    @cached_property
    def _facts(self) -> str:
        facts = [f"{self.program.stage} stage", f"{len(self.program.graph.nodes):,} nodes"]
        if self.program.stage != "forward":
            memory = self.program.memory()
            facts.append(f"predicted peak {format_bytes(memory.peak_bytes)}")
            facts.append(f"of which {format_bytes(memory.resident_bytes)} persistent")
        outside = sum(sum(box.kept) for box in self.boxes if box.phase is Phase.TRANSFER)
        kept = sum(sum(box.kept) for box in self.boxes) - outside
        facts += [f"{format_bytes(kept)} saved for backward"] * bool(kept)
        return " · ".join([*facts, f"{format_bytes(outside)} kept outside"] if outside else facts)

    def _key(self, key: str, label: str, x: float, y: float) -> Iterator[str]:
        if key in ("saved", "hosted"):
            yield f'<path class="{key}" stroke-width="5" d="M{x:g},{y + 7:g} h22"/>'
        elif key == "frame":
            yield f'<rect class="frame" x="{x:g}" y="{y:g}" width="22" height="14" rx="4"/>'
        else:
            yield from _tinted(key, x, y, 22, 14)
        yield _text(x + 28, y + 11, label, 11.5)

    # --- boxes -------------------------------------------------------------------------------------------------------

    def _frames(self) -> Iterator[str]:
        for frame in self.frames:
            inset = 7.0 * frame.depth
            x, width = self.left + inset, self.right - self.left - 2 * inset
            size = f'width="{width:g}" height="{frame.height - 4:g}"'
            yield f'<rect class="frame" x="{x:g}" y="{frame.y:g}" {size} rx="8"/>'
            label = _fit(frame.label, width - 220, 12, keep_end=True)
            taken = len(label) * 12 * _CODE_ASPECT + 4
            self.labels += [
                f'<rect class="ground" x="{x + 10:g}" y="{frame.y + 4:g}" width="{taken:.0f}" height="17"/>',
                _text(x + 12, frame.y + 17, label, 12, "code", "bold"),
            ]
            if frame.copies > 1:
                kept = sum(sum(box.kept) for box in self.boxes if frame.first <= box.row <= frame.last)
                note = f"×{frame.copies}" + (f", {format_bytes(kept)} kept in all" if kept else "")
                ground = f'y="{frame.y + 4:g}" width="{6.8 * len(note) + 8:.0f}" height="17"'
                self.labels.append(f'<rect class="ground" x="{x + taken + 10:g}" {ground}/>')
                self.labels.append(_text(x + taken + 18, frame.y + 17, note, 12, "", "bold"))

    def _box(self, box: Box) -> Iterator[str]:
        row = self.rows[box.row]
        label = f"{row.label} ×{len(row.paths)}" if "…" in row.label else row.label
        count = counted(len(box.nodes), "ops")
        keeps = f" · saves {_bytes_text(box.kept)}" if any(box.kept) else ""
        ops = _ops([self.nodes[name] for name in box.nodes])
        modules = ", ".join(path or "the model" for path in (*row.paths[:4], *(["…"] if len(row.paths) > 4 else [])))
        room = box.width - 22
        yield f"<g><title>{safe(f'{box.phase.value} of {modules}: {ops} ({count}{keeps})')}</title>"
        yield from _tinted(box.phase.value, box.x, box.y, box.width, box.height - 1)
        x = box.x + 15
        if box.height >= 40:
            yield _text(x, box.y + 15, _fit(label, room, 11.5, keep_end=True), 11.5, "code", "bold")
            yield _text(x, box.y + 28.5, _fit(ops, room, 10), 10, "code")
            yield _text(x, box.y + 41.5, f"{count}{keeps}", 10, "dim")
        else:
            yield _text(x, box.y + 15, _fit(ops, room, 10), 10, "code")
        yield "</g>"

    # --- arrows ------------------------------------------------------------------------------------------------------

    def _saved_edges(self) -> Iterator[str]:
        """Kept activations, large ones first, so that small ones stay visible."""
        starts, ends = self._ports(lambda edge: edge.source), self._ports(lambda edge: edge.target)
        largest = self.saved[0].bytes if self.saved else 1
        labelled: dict[int, list[float]] = defaultdict(list)
        for edge in self.saved:
            source, target = self.boxes[edge.source], self.boxes[edge.target]
            kind = "hosted" if source.phase is Phase.TRANSFER else "saved"
            width = max(1.2, _THICKEST * edge.bytes / largest)
            start, y = source.x + source.width, starts[edge]
            x = max(start, sum(COLUMNS[Lane.FORWARD]))
            tip, tip_y = target.x - 1, ends[edge]
            end = tip - 5 - width * 0.6
            bend = min((end - x) / 2, 170.0)
            curve = f"C{x + bend:g},{y:.1f} {end - bend:.1f},{tip_y:.1f} {end:.1f},{tip_y:.1f}"
            yield f'<path class="{kind}" stroke-width="{width:.1f}" d="M{start:g},{y:.1f} H{x:g} {curve}"/>'
            half = width / 2 + 2.5
            yield f'<path class="{kind}head" d="M{tip:g},{tip_y:.1f} L{end:.1f},{tip_y - half:.1f} v{2 * half:.1f} z"/>'
            if all(abs(y - other) > 11 for other in labelled[edge.source]):
                labelled[edge.source].append(y)
                whole = not edge.crossing and edge.bytes == sum(source.kept)
                text = _bytes_text(source.kept if whole else [edge.bytes])
                pill = f'x="{x + 5:g}" y="{y - 6:.1f}" width="{5.6 * len(text) + 9:.0f}" height="12" rx="6"'
                self.labels += [f'<rect class="pill" {pill}/>', _text(x + 9.5, y + 3.3, text, 9.5, "bytes")]

    def _ports(self, end: Callable[[Edge], int]) -> dict[Edge, float]:
        """Where on the side of its box each arrow starts or ends: spread out, in the order of the other ends."""
        by_box: dict[int, list[Edge]] = defaultdict(list)
        for edge in self.saved:
            by_box[end(edge)].append(edge)
        ports: dict[Edge, float] = {}
        for box, edges in by_box.items():
            edges.sort(key=lambda e: (self.rows[self.boxes[e.source + e.target - box].row].y, e))
            for position, edge in enumerate(edges):
                ports[edge] = self.boxes[box].y + self.boxes[box].height * (position + 1) / (len(edges) + 1)
        return ports

    def _data_edges(self) -> Iterator[str]:
        """Who reads whom on the same side: straight to a neighbour, around the side past others."""
        order: dict[Lane, list[float]] = {
            lane: sorted({self.boxes[e].y for e in range(len(self.boxes)) if self.boxes[e].lane is lane})
            for lane in Lane
        }
        gradients = [self.boxes[e.source] for e in self.data if self.boxes[e.target].phase is Phase.UPDATE]
        yield from self._gradients(gradients)
        for edge in self.data:
            source, target = self.boxes[edge.source], self.boxes[edge.target]
            if target.phase is Phase.UPDATE or source.phase is Phase.UPDATE:
                continue
            if source.lane is target.lane:
                places = order[source.lane]
                span = places.index(target.y) - places.index(source.y)
                yield _straight(source, target) if abs(span) == 1 else _around(source, target, abs(span))
            else:
                yield _across(source, target)

    def _turn(self, floor: float) -> Iterator[str]:
        """The bottom of the U: from the last box of forward to the first of backward."""
        ends = [[box for box in self.boxes if box.phase is phase] for phase in (Phase.FORWARD, Phase.BACKWARD)]
        if not all(ends):
            return
        down, up = max(ends[0], key=lambda box: box.y), ends[1][0]
        x, end, tip = down.x + down.width / 2, up.x + up.width / 2, up.y + up.height
        low = floor + 8
        path = f"M{x:g},{down.y + down.height:g} V{low - 8:g} q0,8 8,8 H{end - 8:g} q8,0 8,-8 V{tip + 6:g}"
        yield f'<path class="flow" stroke-dasharray="2 4" d="{path}"/>'
        yield f'<path class="head" d="M{end:g},{tip:g} l-3.5,6 h7 z"/>'

    def _gradients(self, sources: list[Box]) -> Iterator[str]:
        """One line up the right side to the update, for all the gradients that it reads."""
        update = next((box for box in self.boxes if box.phase is Phase.UPDATE), None)
        if update is None or not sources:
            return
        x = update.x + update.width
        y = update.y + update.height / 2
        rail = self.right - 8
        lowest = max(source.y + source.height / 2 for source in sources)
        ticks = "".join(f"M{s.x + s.width:g},{s.y + s.height / 2:g} H{rail:g} " for s in sources)
        yield f'<path class="flow" d="{ticks}M{rail:g},{lowest:g} V{y:g} H{x + 6:g}"/>'
        yield f'<path class="head" d="M{x:g},{y:g} l7,-3.5 v7 z"/>'


def _style() -> str:
    """The style sheet: for light paper, and what differs on dark."""
    light = "".join(
        f".gou .{phase.value}{{fill:{tint};stroke:{color}}}\n.gou .{phase.value}-bar{{fill:{color}}}\n"
        for phase, (color, tint, _) in PHASE_COLORS.items()
    )
    dark = "".join(f".gou .{phase.value}{{fill:{tint}}}\n" for phase, (_, _, tint) in PHASE_COLORS.items())
    return f"{_STYLE}{light}@media (prefers-color-scheme:dark){{{_DARK}{dark}}}"


def _hatch(phase: Phase) -> str:
    return (
        f'<pattern id="gou-{phase.value}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path class="hatch {phase.value}-hatch" d="{_HATCHES[phase]}"/></pattern>'
    )


def _text(x: float, y: float, text: str, size: float, kind: str = "", weight: str = "") -> str:
    kinds = f' class="{kind}"' if kind else ""
    weights = f' font-weight="{weight}"' if weight else ""
    return f'<text{kinds} x="{x:g}" y="{y:.1f}" font-size="{size:g}"{weights}>{safe(text)}</text>'


def _tinted(phase: str, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """A box in a phase's color, with the phase's hatch on a bar at its left."""
    yield f'<rect class="{phase}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
    bar = f'x="{x + 0.5:g}" y="{y + 0.5:g}" width="8" height="{height - 1:g}" rx="3"'
    yield f'<rect class="{phase}-bar" {bar}/>'
    yield f'<rect fill="url(#gou-{phase})" {bar}/>'


def _straight(source: Box, target: Box) -> str:
    """An arrow to the next box above or below."""
    down = target.y > source.y
    x = source.x + source.width / 2
    start, tip = (source.y + source.height, target.y) if down else (source.y, target.y + target.height)
    side = -6 if down else 6
    return (
        f'<path class="flow" d="M{x:g},{start:g} V{tip + side:g}"/>'
        f'<path class="head" d="M{x:g},{tip:g} l-3.5,{side} h7 z"/>'
    )


def _around(source: Box, target: Box, span: int) -> str:
    """An arrow past other boxes of the column: left of forward and recomputation, right of backward."""
    right = source.lane in (Lane.BACKWARD, Lane.BACKWARD_OUTSIDE)
    edge = source.x + source.width if right else source.x
    out = 1 if right else -1
    bulge = edge + out * (14 + 5 * min(span, 6))
    y, tip = source.y + source.height * 0.7, target.y + target.height * 0.3
    if target.y < source.y:
        y, tip = source.y + source.height * 0.3, target.y + target.height * 0.7
    return (
        f'<path class="flow" d="M{edge:g},{y:g} C{bulge:g},{y:g} {bulge:g},{tip:g} {edge + out * 6:g},{tip:g}"/>'
        f'<path class="head" d="M{edge:g},{tip:g} l{out * 6:g},-3 v6 z"/>'
    )


def _across(source: Box, target: Box) -> str:
    """An arrow to another column on the same side of the U."""
    right = target.x > source.x
    out = 1 if right else -1
    x = source.x + source.width if right else source.x
    tip = target.x if right else target.x + target.width
    y, tip_y = source.y + source.height / 2, target.y + target.height / 2
    end = tip - out * 6
    middle = (x + end) / 2
    return (
        f'<path class="flow" d="M{x:g},{y:g} C{middle:g},{y:g} {middle:g},{tip_y:g} {end:g},{tip_y:g}"/>'
        f'<path class="head" d="M{tip:g},{tip_y:g} l{-out * 6:g},-3 v6 z"/>'
    )
