"""Process groups by name, whether their ranks mean to do the same, and when they talk outside of programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from graphopt import _torch
from graphopt.errors import GraphoptError, did_you_mean

__all__ = [
    "Group", "alone", "check_grid", "find_group", "is_talking", "made_together", "making_programs", "require_together",
    "talking", "times_talked",
]  # fmt: skip

_talks = 0
_times = 0


@contextlib.contextmanager
def talking() -> Iterator[None]:
    """Around what ranks tell each other outside of a program: whoever waits in it waits for another rank."""
    global _talks, _times
    _talks += 1
    _times += 1
    try:
        yield
    finally:
        _talks -= 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside of ``talking``: around what this rank does by itself meanwhile, in which it waits for no other rank."""
    global _talks
    before, _talks = _talks, 0
    try:
        yield
    finally:
        _talks = before


def is_talking() -> bool:
    """Whether the thread that trains is inside of ``talking`` and waits for other ranks."""
    return _talks > 0


def times_talked() -> int:
    """How often this process was inside of ``talking`` so far."""
    return _times


_together: ContextVar[Callable[[Group], bool]] = ContextVar("together", default=lambda _: True)


@contextlib.contextmanager
def making_programs(together: Callable[[Group], bool]) -> Iterator[None]:
    """While a program is made; ``together`` finds out whether all ranks of a group make one of the same kind now."""
    token = _together.set(together)
    try:
        yield
    finally:
        _together.reset(token)


def made_together(group: Group) -> bool:
    """Whether all ranks of a group make a program now, so that they may talk about it.

    A rank may make one alone, for a size of batch that others have a program for: it then has to decide alone, and
    whether what it exchanges is the same is compared before it runs.
    """
    return _together.get()(group)


def require_together(group: Group, what: str) -> None:
    """Refuse to talk to ranks that do not listen.

    Args:
        group: the ranks.
        what: cannot be done without them, for the message.

    Raises:
        GraphoptError: where other ranks of the group make no program now.
    """
    if not made_together(group):
        raise GraphoptError(
            f"{what}: this rank makes a program that other ranks of the group {group.name!r} do not make in this call, "
            "so that they cannot agree on it; let all ranks begin together, with batches of the same shapes"
        )


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

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes of the group, as the default group numbers them."""
        return tuple(dist.get_process_group_ranks(self.handle))

    def agree(self, plan: Sequence[str], what: str) -> None:
        """Compare a plan with that of every other rank, so that they do not wait for each other later.

        Every rank of the group has to call this while it makes a program.

        Args:
            plan: what this rank is going to do, step by step.
            what: whose plan it is, for the message.

        Raises:
            GraphoptError: naming the first rank whose plan differs from that of rank 0, and the first step; and where
                other ranks make no program now.
        """
        require_together(self, what)
        plans: list[list[str]] = [[] for _ in range(self.size)]
        with talking():
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

    A dimension of a ``DeviceMesh`` is one too, by its name: which of its groups this process belongs to differs from
    rank to rank, and the name does not.

    Raises:
        GraphoptError: where torch.distributed is not initialised, for an unknown name, with the nearest ones, and for a
            dimension that several meshes have, with other ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise GraphoptError(
            "there is no process group: call torch.distributed.init_process_group(...) in every process before the "
            "first step (torchrun sets what it needs)"
        )
    groups = _torch.process_groups()
    wanted = name or next(key for key, group in groups.items() if group is dist.group.WORLD)
    if wanted not in groups:
        wanted = _of_dimension(name, groups)
    handle = groups[wanted]
    return Group(wanted, dist.get_rank(handle), dist.get_world_size(handle), handle)


_DIMENSION = "mesh_"
"""How torch begins the description of a group of a dimension of a mesh; the dimension's name follows."""


def _of_dimension(name: str, groups: Mapping[str, Any]) -> str:
    """The name of this process's group in the dimension of a mesh."""
    dimensions: dict[str, dict[tuple[int, ...], str]] = {}
    for key, group in groups.items():
        description = str(group.group_desc)
        if description.startswith(_DIMENSION):
            ranks = tuple(dist.get_process_group_ranks(group))
            dimensions.setdefault(description.removeprefix(_DIMENSION), {}).setdefault(ranks, key)
    found = dimensions.get(name, {})
    if len(found) > 1:
        shown = " and ".join(str(list(ranks)) for ranks in found)
        raise GraphoptError(
            f"several meshes have a dimension {name!r}, in which this process is with the ranks {shown}: give the "
            "dimensions names of their own, or mesh[...].get_group().group_name"
        )
    if found:
        return next(iter(found.values()))
    hint = did_you_mean(name, [*groups, *dimensions]) or f"its groups are {', '.join(sorted(groups))}"
    also = f", its meshes' dimensions {', '.join(sorted(dimensions))}" if dimensions else ""
    raise GraphoptError(
        f"this process belongs to no process group called {name!r}; {hint}{also} (group.group_name is how it is "
        "called; a dimension of a DeviceMesh is one by its name, and one that has all ranks is the default group, "
        "without a name)"
    )


def check_grid(whole: Group, rows: Group, columns: Group, what: str) -> None:
    """Raise unless a group is a grid of two others: each rank in one row and one column, which share it alone.

    Nothing is checked for a program that this rank makes alone: the first one was, which all ranks make together.

    Args:
        whole: the group.
        rows: that of this process along one dimension.
        columns: that along the other one; its ranks have the same places in their rows.
        what: who asks, for the message.
    """
    alone = dist.get_backend(rows.handle) == "fake"  # the other ranks are not there
    if alone or not (made_together(rows) and made_together(columns)):
        return
    me = dist.get_rank()
    with talking():
        found: list[Any] = [None] * rows.size
        dist.all_gather_object(found, columns.ranks, group=rows.handle)
        places: list[Any] = [None] * columns.size
        dist.all_gather_object(places, rows.rank, group=columns.handle)
    everyone = [rank for column in found for rank in column]
    right = set(rows.ranks) & set(columns.ranks) == {me} and len({len(column) for column in found}) == 1
    if not right or sorted(everyone) != sorted(whole.ranks) or len(set(places)) > 1:
        raise GraphoptError(
            f"{what}: the {whole.size} ranks of {whole.name!r} are no grid of {rows.name!r} (here the ranks "
            f"{list(rows.ranks)}) and {columns.name!r} ({list(columns.ranks)}): take two dimensions of one DeviceMesh "
            "that has all of them"
        )
