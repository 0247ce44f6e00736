"""Process groups by name, whether their ranks mean to do the same, and when they talk outside of programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from graphopt import _torch
from graphopt.errors import GraphoptError, did_you_mean

__all__ = ["Group", "find_group", "is_talking", "talking"]

_talks = 0


@contextlib.contextmanager
def talking() -> Iterator[None]:
    """Around what ranks tell each other outside of a program: whoever waits in it waits for another rank."""
    global _talks
    _talks += 1
    try:
        yield
    finally:
        _talks -= 1


def is_talking() -> bool:
    """Whether the thread that trains is inside of ``talking``."""
    return _talks > 0


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that this process belongs to.

    Attributes:
        name: as torch.distributed calls it.
        rank: of this process in the group.
        size: how many processes it has.
        handle: the group itself, for torch.distributed.
    """

    name: str
    rank: int
    size: int
    handle: Any

    def agree(self, plan: Sequence[str], what: str) -> None:
        """Compare a plan with that of every other rank, so that they do not wait for each other later.

        Every rank of the group has to call this; one that does not makes the others wait for the group's timeout.

        Args:
            plan: what this rank is going to do, step by step.
            what: whose plan it is, for the message.

        Raises:
            GraphoptError: naming the first rank whose plan differs from that of rank 0, and the first step.
        """
        plans: list[list[str]] = [[] for _ in range(self.size)]
        dist.all_gather_object(plans, list(plan), group=self.handle)
        for rank, other in enumerate(plans):
            if other == plans[0]:
                continue
            length = max(len(other), len(plans[0]))
            padded = [[*steps, *["nothing"] * (length - len(steps))] for steps in (plans[0], other)]
            step = next(index for index, (one, two) in enumerate(zip(*padded, strict=True)) if one != two)
            raise GraphoptError(
                f"{what}: the ranks of the group {self.name!r} do not mean to do the same: step {step} is "
                f"{padded[0][step]!r} on rank 0 and {padded[1][step]!r} on rank {rank}; run the same model, shapes of "
                "batches and passes on every rank of the group"
            )


def find_group(name: str) -> Group:
    """The process group of a name; ``""`` is the default group.

    Raises:
        GraphoptError: where torch.distributed is not initialised, and for an unknown name, with the nearest ones.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise GraphoptError(
            "there is no process group: call torch.distributed.init_process_group(...) in every process before the "
            "first step (torchrun sets what it needs)"
        )
    groups = _torch.process_groups()
    wanted = name or next(key for key, group in groups.items() if group is dist.group.WORLD)
    handle = groups.get(wanted)
    if handle is None:
        hint = did_you_mean(name, groups) or f"its groups are {', '.join(sorted(groups))}"
        raise GraphoptError(
            f"this process belongs to no process group called {name!r}; {hint} (group.group_name is how it is called)"
        )
    return Group(wanted, dist.get_rank(handle), dist.get_world_size(handle), handle)
