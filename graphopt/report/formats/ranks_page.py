"""A page that shows what each rank holds between steps, and when it waits for the others.

All ranks run one program, so that what is said of one holds for all: each has another part of what is divided. Times
are predicted: calls by a cost model, exchanges by a link of so many bits per second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.analysis.costs.cost import check_cost, costs_of
from graphopt.errors import GraphoptError, check_type
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes, format_seconds
from graphopt.report.console.escape import safe
from graphopt.report.formats.plain_page import plain_page, plain_table
from graphopt.rewriting.distributed.prediction.collective import LINK, group_size, is_exchange, moved, seconds_on_link
from graphopt.rewriting.distributed.prediction.link import Link, parse_bandwidth
from graphopt.rewriting.distributed.prediction.run_schedule import NETWORK, Slice, schedule
from graphopt.rewriting.shards import shard_of

__all__ = ["to_ranks"]

_SHOWN_RANKS = 8
_SHOWN_WAITS = 40
_WIDTH, _HEIGHT = 1000.0, 26.0
_LEAST = 0.6
"""Narrower pieces of the picture are drawn this wide, in its units."""

_PHASES = {Phase.FORWARD: "forward", Phase.BACKWARD: "backward", Phase.SYNC: "exchange", Phase.UPDATE: "update"}

_STYLE = """
:root{--wait:#cf222e}
@media (prefers-color-scheme:dark){:root{--wait:#ff7b72}}
svg text{fill:var(--dim);font-size:13px}
.forward{fill:#0072b2}.backward{fill:#e69f00}.exchange,.other{fill:#7f7f7f}.update{fill:#009e73}
.wait{fill:var(--wait)}.network{fill:#cc79a7}
"""


def to_ranks(program: Program, *, link: str | Link = LINK, cost: str = "roofline") -> str:
    """The page: one HTML file in ASCII that needs no network and runs nothing.

    Args:
        program: of a stage in which ranks exchange something.
        link: what joins each rank to the others, ``10Gbit`` or ``25GB/s`` in each direction, or with a latency.
        cost: where the seconds of calls come from (``graphopt.analysis.costs.cost.COSTS``).

    Raises:
        GraphoptError: for a program without an exchange, an unknown cost model or bandwidth, and where the size of a
            group is not known: the program is another process's.
    """
    check_cost(cost)
    check_type("link", link, (str, Link), "a bandwidth such as '10Gbit', or a Link")
    joined = Link(parse_bandwidth(link)) if isinstance(link, str) else link
    memory = program.memory()
    exchanges = {node: group_size(node) for node in memory.nodes if is_exchange(node)}
    if not exchanges:
        raise GraphoptError(
            "this program exchanges nothing with other ranks: give the program of a step with data-parallel, "
            "shard-optimizer or shard-parameters, made in a process group, or for several devices (graphopt dump "
            "--devices)"
        )
    report = costs_of(memory, cost)
    seconds, _ = seconds_on_link(memory.nodes, report.seconds, joined)
    run = list(schedule(memory, seconds))
    divided = list(_divided(program, exchanges))
    holdings = _holdings(program, memory, divided)
    total, waited = max(found.end for found in run), sum(found.waits for found in run if _waits_for_rank(found))
    ranks = max(exchanges.values())
    title = f"{program.title or 'program'}: what each of {ranks} ranks holds, and when it waits"
    resident = sum(holding.bytes for holding in holdings)
    whole = sum(holding.whole for holding in holdings)
    sentence = (
        f"Each rank holds {format_bytes(resident)} between steps; all of them together, what is there several times "
        f"counted once, {format_bytes(whole)}. A step peaks at {format_bytes(memory.peak_bytes)}. It takes "
        f"{format_seconds(total)}, of which a rank waits {format_seconds(waited)} ({100 * waited / total:.0f} %) for "
        f"others, over a link of {joined}."
    )
    body = [
        f"<h1>{safe(title)}</h1>", f"<p>{safe(sentence)}</p>",
        "<h2>What a rank holds between steps</h2>", *_holdings_table(holdings),
        "<h2>Which elements each rank has</h2>", *_divided_table(divided),
        "<h2>When a rank waits</h2>", *_picture(run, total), *_waits_table(run, exchanges),
        f'<p class="dim">Seconds are predicted: {safe(str(report).splitlines()[0])}; exchanges by the link.</p>',
    ]  # fmt: skip
    return plain_page(title, body, _STYLE)


def _waits_for_rank(found: Slice) -> bool:
    return found.awaited is not None and is_exchange(found.awaited)


# --- what a rank holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Holding:
    """One kind of what is there between steps, of this rank; ``whole`` is what all ranks have of it, counted once."""

    kind: str
    bytes: int
    whole: int


@dataclass(frozen=True, slots=True)
class _Divided:
    """A parameter, or its optimizer's state, of whose elements each rank has some, and the bytes of this rank's."""

    name: str
    bytes: int
    elements: int
    ranks: int


def _holdings(program: Program, memory: MemoryTimeline, divided: Sequence[_Divided]) -> list[_Holding]:
    """By kind, in the order of the program's inputs; a parameter whose values are in shards takes no bytes itself."""
    ranks_of = {found.name: found.ranks for found in divided}
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.role in ("input", "tangent", "hyperparameter"):
            continue
        size = sum(storage.bytes for storage in memory.refers[node])
        kind, ranks = _KINDS.get(spec.role, spec.role), 1
        state = program.pass_state.get(spec.target) if spec.role == "pass_state" else None
        if state is not None and state.shard is not None:
            kind, ranks = "shards of parameters", ranks_of[state.source]
        elif spec.role == "state" and spec.target in ranks_of:
            kind, ranks = "shards of optimizer state", ranks_of[spec.target]
        sums[kind][0] += size
        sums[kind][1] += size * ranks
    return [_Holding(kind, own, whole) for kind, (own, whole) in sums.items() if own]


_KINDS = {
    "parameter": "parameters, whole",
    "buffer": "buffers",
    "constant": "constants",
    "gradient": "gradients",
    "state": "optimizer state",
    "pass_state": "what passes keep",
}


def _divided(program: Program, exchanges: Mapping[fx.Node, int]) -> Iterator[_Divided]:
    """Everything of which each rank has a part."""
    elements = {spec.target: value_of(node).numel() for node, spec in program.inputs_of("parameter")}
    gathers = [size for node, size in exchanges.items() if schema.op_name(node) == "all_gather_into_tensor"]
    shards = {state.source: state for state in program.pass_state.values() if state.shard is not None}
    for name, state in shards.items():
        size = state.shape[0] * state.dtype.itemsize
        yield _Divided(name, size, elements[name], find_group(state.group).size)
    for node, spec in program.inputs_of("state"):
        value, name = value_of(node), spec.target.rpartition("/")[0]
        if value.dim() != 1 or name not in elements:
            continue
        if name in shards:
            yield _Divided(spec.target, storage_bytes(value), elements[name], find_group(shards[name].group).size)
        elif value.numel() < elements[name] and gathers:
            yield _Divided(spec.target, storage_bytes(value), elements[name], gathers[0])


def _holdings_table(holdings: Sequence[_Holding]) -> Iterator[str]:
    rows = [(h.kind, format_bytes(h.bytes), format_bytes(h.whole), f"{h.bytes / h.whole:.0%}") for h in holdings]
    own, whole = sum(h.bytes for h in holdings), sum(h.whole for h in holdings)
    rows.append(("all of it", format_bytes(own), format_bytes(whole), f"{own / max(whole, 1):.0%}"))
    yield from plain_table(("kind", "a rank", "all ranks, counted once", "share"), rows)


def _divided_table(divided: Sequence[_Divided]) -> Iterator[str]:
    if not divided:
        yield "<p>Nothing is divided: every rank holds all of it.</p>"
        return
    most = max(found.ranks for found in divided)
    shown = min(most, _SHOWN_RANKS)
    rows = []
    for found in divided:
        cells = [_elements(found, rank) for rank in range(shown)]
        rows.append((found.name, format_bytes(found.bytes), *cells))
    yield from plain_table(("tensor", "a rank", *(f"rank {rank}" for rank in range(shown))), rows)
    more = f" Ranks {shown} to {most - 1} have what follows." if most > shown else ""
    yield (f'<p class="dim">Elements in the order of memory.{more}</p>')


def _elements(found: _Divided, rank: int) -> str:
    """The first and the last element of a rank's part."""
    first, length = shard_of(found.elements, rank, found.ranks) if rank < found.ranks else (0, 0)
    return f"{first}–{first + length - 1}" if length else "none"


# --- when it waits ---------------------------------------------------------------------------------------------------


def _picture(run: Sequence[Slice], total: float) -> Iterator[str]:
    """Two lanes over time: the calls by phase, red where they wait for other ranks; and the exchanges."""
    yield (
        f'<svg viewBox="0 0 {_WIDTH:g} {3.4 * _HEIGHT:g}" role="img" aria-label="Computation, waiting and exchanges '
        f'over {safe(format_seconds(total))}">'
    )
    legend = "computation (blue forward, orange backward, green update, gray copies for exchanges), waiting (red)"
    yield f'<text x="0" y="{0.7 * _HEIGHT:g}">{legend}</text>'
    yield from _bars(
        [(_class(found), found.start, found.end) for found in run if found.lane != NETWORK], _HEIGHT, total
    )
    yield from _bars(
        [("wait", found.start, found.start + found.waits) for found in run if _waits_for_rank(found) and found.waits],
        _HEIGHT,
        total,
    )
    yield f'<text x="0" y="{2.6 * _HEIGHT:g}">exchanges</text>'
    yield from _bars([("network", f.start, f.end) for f in run if f.lane == NETWORK], 2.75 * _HEIGHT, total, 0.6)
    yield "</svg>"


def _class(found: Slice) -> str:
    return _PHASES.get(info(found.node).phase, "other")


def _bars(bars: Sequence[tuple[str, float, float]], top: float, total: float, height: float = 0.8) -> Iterator[str]:
    """Rectangles; neighbours of one kind are one."""
    joined: list[tuple[str, float, float]] = []
    for kind, start, end in bars:
        if end <= start:
            continue
        if joined and joined[-1][0] == kind and start - joined[-1][2] < 1e-3 * total:
            joined[-1] = (kind, joined[-1][1], end)
        else:
            joined.append((kind, start, end))
    for kind, start, end in joined:
        x, width = _WIDTH * start / total, max(_WIDTH * (end - start) / total, _LEAST)
        yield f'<rect class="{kind}" x="{x:.2f}" y="{top:g}" width="{width:.2f}" height="{height * _HEIGHT:g}"/>'


def _waits_table(run: Sequence[Slice], exchanges: dict[fx.Node, int]) -> Iterator[str]:
    waits: dict[fx.Node, float] = defaultdict(float)
    for found in run:
        if found.awaited is not None:
            waits[found.awaited] += found.waits
    started = [found for found in run if found.node in exchanges]
    longest = sorted(started, key=lambda found: -waits[found.node])[:_SHOWN_WAITS]
    rows = [
        (
            schema.op_name(found.node),
            _what(found.node),
            format_bytes(moved(found.node).payload),
            str(exchanges[found.node]),
            format_seconds(found.start),
            format_seconds(found.seconds),
            format_seconds(waits[found.node]),
        )
        for found in longest
    ]
    head = ("exchange", "of", "a rank puts in", "ranks", "starts at", "takes", "waited for")
    yield from plain_table(head, rows, text=1)
    if len(started) > len(longest):
        yield f'<p class="dim">The {len(longest)} that are waited for longest, of {len(started)}.</p>'


def _what(node: fx.Node) -> str:
    known = info(node)
    return ", ".join(known.names) or known.module or known.origin
