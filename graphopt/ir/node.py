"""What is known of a program's nodes: phase, module, names and provenance, the example value, inputs and outputs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.phases import Phase, Policy, Stage

__all__ = [
    "INPUT_ROLES",
    "OUTPUT_ROLES",
    "TRACE_CONSTANT",
    "BatchSlice",
    "Candidate",
    "InputSpec",
    "NodeInfo",
    "OutputSpec",
    "Phase",
    "Policy",
    "Stage",
    "TensorInfo",
    "info",
    "info_like",
    "known_of",
    "own_phase",
    "set_info",
    "set_value",
    "slice_number",
    "unique_names",
    "value_of",
]


INPUT_ROLES = (
    "parameter", "buffer", "constant", "input", "tangent", "gradient", "state", "hyperparameter", "pass_state",
)  # fmt: skip
OUTPUT_ROLES = ("output", "loss", "gradient", "mutation", "state", "base")
"""What inputs and outputs of a program can be; see ``InputSpec`` and ``OutputSpec``."""

_INFO = "graphopt"


class BatchSlice(NamedTuple):
    """What a call is in a step that takes its batch in slices, one forward and backward after another.

    Attributes:
        number: which slice it is for, from 0.
        of: the name of the tensor that it makes a part of, or of the call where that has none.
        phase: when that one ran; in the step, all calls of slices are of backward.
    """

    number: int
    of: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What graphopt knows of a node beyond its op and its value. Immutable, so copies of nodes never share changes.

    ``origin`` is who made it, and behind a colon and a space what for: ``recompute: blocks.0``.
    """

    phase: Phase
    module: str = ""
    names: tuple[str, ...] = ()
    source: str = ""
    origin: str = "capture"
    policy: Policy | None = None
    region: int | None = None
    batch_slice: BatchSlice | None = None

    @property
    def made_by(self) -> str:
        """Who made it: the name of a pass, or ``capture``."""
        return self.origin.partition(": ")[0]

    @property
    def made_for(self) -> str:
        """What for, as its maker says; empty where it does not."""
        return self.origin.partition(": ")[2]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What a placeholder stands for.

    ``role`` is parameter, buffer, constant, input, tangent, gradient (an accumulator), state (of the optimizer),
    hyperparameter or pass_state (what a pass keeps across steps); ``target`` names it (``layers.0.weight``,
    ``args[0]``, ``layers.0.weight/exp_avg``, ``lr[0]``, ``loss-scale/scale``).
    """

    role: str
    target: str


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What an output value is: ``role`` is output, loss, gradient, mutation or state; ``target`` names it."""

    role: str
    target: str


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One named tensor of a program. ``bytes`` counts its storage, 0 for a view of another tensor's storage."""

    name: str
    node: str
    shape: tuple[Any, ...]
    dtype: torch.dtype
    bytes: int
    phase: Phase
    module: str
    source: str
    role: str
    saved: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tensor through which all of the network's data passes.

    Attributes:
        name: its best name.
        node: the node's name.
        bytes: what keeping it costs.
        saves: bytes that need not be kept from the previous candidate up to this one when both are checkpoints.
        source: the user's line that makes it.
    """

    name: str
    node: str
    bytes: int
    saves: int
    source: str


def info(node: fx.Node) -> NodeInfo:
    """The ``NodeInfo`` of a node of a program."""
    found = node.meta.get(_INFO)
    if found is None:
        raise GraphoptError(
            f"node {node.name!r} ({node.format_node()}) has no phase or module: it was added to the graph directly; "
            "add nodes with Program.insert, which fills in what passes, printers and the memory model need"
        )
    return found  # type: ignore[no-any-return]


def known_of(node: fx.Node) -> NodeInfo | None:
    """The ``NodeInfo`` of a node; None where nothing is known of it."""
    return node.meta.get(_INFO)


def info_like(like: fx.Node | None, phase: Phase, origin: str, names: tuple[str, ...]) -> NodeInfo:
    """What is known of a call that is inserted: module and source of another one, nothing that was decided for that."""
    base = info(like) if like is not None else NodeInfo(phase)
    return replace(base, phase=phase, origin=origin, names=names, policy=None, region=None, batch_slice=None)


def own_phase(node: fx.Node) -> Phase:
    """The phase of a call; in a slice of the batch, the one that it has there."""
    known = info(node)
    return known.phase if known.batch_slice is None else known.batch_slice.phase


def slice_number(node: fx.Node) -> int | None:
    """Which slice of the batch a call is for; None where it is for the whole batch."""
    part = info(node).batch_slice
    return None if part is None else part.number


def set_info(node: fx.Node, known: NodeInfo) -> None:
    """Replace what is known of a node."""
    node.meta[_INFO] = known


def value_of(node: fx.Node) -> Any:
    """What a node gives, without data: a fake tensor, a number, a tuple of these; None for one without a value."""
    return node.meta.get("val")


TRACE_CONSTANT = "constant of the trace"
"""The origin of an input that the trace has met as a value, and that no caller gives."""


def set_value(node: fx.Node, example: Any) -> None:
    """Replace the example value of a node."""
    node.meta["val"] = example


def unique_names(graph: fx.Graph) -> None:
    """Where two tensors were given one name, the later ones become ``name@1``, ``name@2`` and so on."""
    taken: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op == "output":
            continue
        unique = []
        for name in info(node).names:
            unique.append(name if taken[name] == 0 else f"{name}@{taken[name]}")
            taken[name] += 1
        set_info(node, replace(info(node), names=tuple(unique)))
