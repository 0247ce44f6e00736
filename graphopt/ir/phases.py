"""The stages of a program, when its nodes run, and what is decided about their values; nothing here needs torch."""

from __future__ import annotations

import enum
from typing import Literal

__all__ = ["Phase", "Policy", "Stage"]

Stage = Literal["forward", "joint", "step"]


class Phase(enum.StrEnum):
    """When in a step a node runs, and what for.

    Example:
        >>> program = graphopt.capture(model, (x,), loss=loss)
        >>> any(program.phase_nodes(graphopt.Phase.BACKWARD))
        True
        >>> [phase.value for phase in graphopt.Phase][:2]
        ['forward', 'backward']
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    TRANSFER = "transfer"
    SYNC = "sync"
    UPDATE = "update"


class Policy(enum.StrEnum):
    """What planners decide about a forward value that backward reads; torch's own words.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=loss).prepare(x)
        >>> from graphopt.ir.node import info
        >>> any(info(node).policy is graphopt.Policy.MUST_SAVE for node in step.program.nodes)
        True
    """

    MUST_SAVE = "MUST_SAVE"
    MUST_RECOMPUTE = "MUST_RECOMPUTE"
    MUST_CPU_OFFLOAD = "MUST_CPU_OFFLOAD"
