"""When each call of a program runs, as predicted: one after the other, with exchanges and copies beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes, tensors_of

__all__ = ["AWAY", "BACK", "COMPUTE", "LANES", "NETWORK", "Slice", "copied", "lane_of", "schedule"]

COMPUTE, NETWORK, AWAY, BACK = "compute", "network", "host link, away", "host link, back"
LANES = (COMPUTE, NETWORK, AWAY, BACK)
"""The lanes of a run, from the top. Copies away and back share nothing: links carry both ways at once."""

_STARTS = {
    "graphopt::offload": AWAY,
    "graphopt::move_out": AWAY,
    "graphopt::swap_out": AWAY,
    "graphopt::prefetch": BACK,
    "graphopt::swap_in": BACK,
}
_WAITS = tuple(f"{op}_wait" for op in _STARTS)


@dataclass(frozen=True, slots=True)
class Slice:
    """One call; times are seconds from the beginning of the run.

    Attributes:
        node: the call.
        position: its place in the program.
        lane: one of ``LANES``.
        now: when the program comes to it, which is when it starts unless its lane is busy.
        start: when it starts.
        seconds: how long it takes, waiting included.
        waits: for how long of that the computation stands still.
        awaited: the call that it waits for, which has run beside others; None for one that does not wait.
    """

    node: fx.Node
    position: int
    lane: str
    now: float
    start: float
    seconds: float
    waits: float = 0.0
    awaited: fx.Node | None = None

    @property
    def end(self) -> float:
        """When it is done."""
        return self.start + self.seconds


def schedule(memory: MemoryTimeline, seconds: Sequence[float]) -> Iterator[Slice]:
    """One run of a program on its lanes.

    Collectives and copies run on lanes of their own, each kind in the order in which they are started, and the call
    that waits for one lasts until that one is done.

    Args:
        memory: the program's timeline.
        seconds: of each of its ``nodes``, without waiting.
    """
    free: dict[str, float] = dict.fromkeys(LANES, 0.0)
    done: dict[fx.Node, float] = {}
    for position, (node, own) in enumerate(zip(memory.nodes, seconds, strict=True)):
        lane, now = lane_of(node), free[COMPUTE]
        if lane != COMPUTE:
            start = max(free[lane], now)
            free[lane] = done[node] = start + own
            yield Slice(node, position, lane, now, start, own)
            continue
        awaited = _awaited(node)
        started = awaited if awaited in done else None
        waits = max(done[started] - now, 0.0) if started is not None else 0.0
        free[COMPUTE] = now + waits + own
        yield Slice(node, position, lane, now, now, waits + own, waits, started)


def _op(node: fx.Node) -> str:
    found = getattr(node.target, "_schema", None)
    return str(found.name) if found is not None else ""


def lane_of(node: fx.Node) -> str:
    """Where a call runs; waits stand on the lane of computation."""
    if schema.is_collective(node) and not schema.hands_on(node):
        return NETWORK
    return _STARTS.get(_op(node), COMPUTE)


def _awaited(node: fx.Node) -> fx.Node | None:
    """What a call waits for, seen through elements of tuples; None for one that does not wait."""
    waits = _op(node) in _WAITS or (schema.is_collective(node) and schema.hands_on(node))
    if not waits or not node.args:
        return None
    if _op(node) == "graphopt::swap_out_wait":  # what it waits for returns nothing
        written = schema.nodes_in(node.args)
        begun = (user for user in written[-1].users if _op(user) == "graphopt::swap_out")
        return next((user for user in begun if user.args[:2] == node.args), None)
    source = node.args[0]
    return schema.maker(source) if isinstance(source, fx.Node) else None


def copied(node: fx.Node) -> tuple[int, str]:
    """The bytes that a call on one of the host's lanes copies, and where to or from: ``host`` or ``disk``."""
    source = node if lane_of(node) == BACK else schema.nodes_in(node.args)[-1]
    tier = "disk" if "disk" in node.args else "host"
    return sum(storage_bytes(tensor) for tensor in tensors_of(value_of(source))), tier
