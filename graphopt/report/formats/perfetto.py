"""A program as a trace for Perfetto: lanes of calls over predicted time, and memory by category.

The format is Chrome's trace events as JSON (ui.perfetto.dev and chrome://tracing open it): complete events for calls,
counters for bytes, flows from what is started to where it is waited for. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from graphopt.analysis.costs.cost import CostReport, check_cost, costs_of
from graphopt.errors import GraphoptError, check_type
from graphopt.ir.files.text import Writer
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.ir.version import VERSION
from graphopt.report.text.memory_bands import bytes_by_category
from graphopt.rewriting.distributed.prediction.collective import LINK, is_exchange, seconds_on_link
from graphopt.rewriting.distributed.prediction.link import Link, parse_bandwidth
from graphopt.rewriting.distributed.prediction.run_schedule import COMPUTE, LANES, Slice, schedule

__all__ = ["to_perfetto"]

_PROCESS = 1


def to_perfetto(
    program: Program, *, cost: str = "roofline", costs: CostReport | None = None, link: str | Link = LINK
) -> dict[str, Any]:
    """The trace of one run, as predicted: one slice for each call, in the order of the program.

    Calls run one after the other on the lane ``compute``, each as long as the cost model says. Collectives and copies
    run beside it on lanes of their own, each kind in the order in which they are started, and the call that waits for
    one lasts until that one is done. What is known of a call (type, phase, module, source line, who made it) is among
    its arguments.

    Args:
        program: of any stage.
        cost: where seconds come from: ``roofline`` (runs nothing of the program), ``measured``, or the name of a device
            (``graphopt.analysis.costs.cost.COSTS``).
        costs: seconds of the program's calls that are known already, in place of ``cost``.
        link: what joins ranks that exchange something, ``10Gbit`` or ``25GB/s`` in each direction, or with a latency.

    Returns:
        plain data, to be written as JSON. All times and bytes are predicted.

    Raises:
        GraphoptError: for an unknown cost model or bandwidth, and for ``costs`` of another program.
    """
    check_cost(cost)
    check_type("link", link, (str, Link), "a bandwidth such as '10Gbit', or a Link")
    joined = Link(parse_bandwidth(link)) if isinstance(link, str) else link
    memory = program.memory()
    known = costs if costs is not None else costs_of(memory, cost)
    if len(known.seconds) != len(memory.nodes):
        raise GraphoptError(
            f"costs holds seconds of {len(known.seconds)} calls, and the program has {len(memory.nodes)}: make it with "
            "cost_report(program.memory().nodes)"
        )
    title = f"{program.title or 'program'}, {program.stage} stage"
    seconds, unknown = seconds_on_link(memory.nodes, known.seconds, joined)
    events = [*_named(title), *_Run(memory, seconds).events()]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "title": title,
            "passes": ", ".join(program.history),
            "times": f"predicted: {str(known).splitlines()[0]}",
            **_exchanges(memory, joined, unknown),
            "graphopt": VERSION,
        },
    }


def _exchanges(memory: MemoryTimeline, link: Link, unknown: int) -> dict[str, str]:
    """What is said of exchanges, where there are any."""
    if not any(map(is_exchange, memory.nodes)):
        return {}
    others = f"; the number of ranks of {unknown} is not known, which take what they would on the device"
    return {"exchanges": f"over a link of {link}{others if unknown else ''}"}


def _named(title: str) -> Iterator[dict[str, Any]]:
    yield _about("process_name", 0, name=title)
    for lane, name in enumerate(LANES, 1):
        yield _about("thread_name", lane, name=name)
        yield _about("thread_sort_index", lane, sort_index=lane)


def _about(what: str, lane: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": lane, "args": args}


class _Run:
    """The events of one run."""

    def __init__(self, memory: MemoryTimeline, seconds: Sequence[float]) -> None:
        self._memory, self._seconds = memory, seconds
        self._categories = bytes_by_category(memory)
        self._flows: dict[fx.Node, int] = {}
        self._counted: dict[str, int] | None = None
        self._writer = Writer()

    def events(self) -> Iterator[dict[str, Any]]:
        """Everything that happens, in the order of the program."""
        for found in schedule(self._memory, self._seconds):
            yield from self._counters(found.position, found.now)
            yield self._slice(found)
            if found.lane != COMPUTE:
                self._flows[found.node] = len(self._flows) + 1
                yield self._flow(found.node, "s", found.lane, found.start)
            elif found.awaited is not None:
                yield self._flow(found.awaited, "f", COMPUTE, found.start)

    def _slice(self, found: Slice) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": schema.op_name(found.node),
            "cat": info(found.node).phase.value,
            "pid": _PROCESS,
            "tid": LANES.index(found.lane) + 1,
            "ts": _microseconds(found.start),
            "dur": _microseconds(found.seconds),
            "args": self._details(found.node),
        }

    def _details(self, node: fx.Node) -> dict[str, str]:
        """What is shown of a call that is selected; nothing that is empty."""
        known = info(node)
        opening, arguments, closing = self._writer.call(node)
        about = {
            "node": node.name,
            "type": type_text(value_of(node)),
            "phase": known.phase.value,
            "module": known.module,
            "names": ", ".join(known.names),
            "source": known.source,
            "made by": known.origin,
            "call": f"{opening}{', '.join(arguments)}{closing}",
        }
        return {key: value for key, value in about.items() if value}

    def _flow(self, started: fx.Node, which: str, lane: str, at: float) -> dict[str, Any]:
        event = {
            "ph": which,
            "name": "waits for",
            "cat": "wait",
            "id": self._flows[started],
            "pid": _PROCESS,
            "tid": LANES.index(lane) + 1,
            "ts": _microseconds(at),
        }
        return {**event, "bp": "e"} if which == "f" else event

    def _counters(self, position: int, at: float) -> Iterator[dict[str, Any]]:
        """The bytes by category, where they are not what they were."""
        now = {name: sizes[position] for name, sizes in self._categories.items()}
        if now and now != self._counted:
            self._counted = now
            when = _microseconds(at)
            yield {"ph": "C", "name": "memory (bytes)", "pid": _PROCESS, "tid": 0, "ts": when, "args": now}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
