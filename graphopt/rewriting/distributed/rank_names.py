"""Names of what differs from rank to rank, so that one rank's is never taken for another's.

``torch.distributed.checkpoint`` takes what has the same name on all ranks for the same, and saves it once. What is a
rank's own therefore has the rank in its name: ``exp_avg@rank1of2``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch.distributed as dist

from graphopt.errors import GraphoptError

__all__ = ["own_name", "owner", "owner_of_all", "place", "plain_name"]

_NAME = re.compile(r"(.+)@rank([0-9]{1,9})of([0-9]{1,9})", re.DOTALL)


def place() -> tuple[int, int]:
    """The rank of this process and how many there are; ``(0, 1)`` without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def own_name(name: str, rank: int, ranks: int) -> str:
    """The name of what is one rank's own; with a single rank just the name."""
    return name if ranks == 1 else f"{name}@rank{rank}of{ranks}"


def plain_name(name: str) -> str:
    """A name without a rank."""
    found = _NAME.fullmatch(name)
    return found[1] if found else name


def owner(name: str) -> tuple[int, int] | None:
    """The rank in a name, and how many there were; None where there is none."""
    found = _NAME.fullmatch(name)
    return (int(found[2]), int(found[3])) if found else None


def owner_of_all(names: Iterable[str]) -> tuple[int, int] | None:
    """The one rank in several names; None where there is none.

    Raises:
        GraphoptError: for names of several ranks.
    """
    owners = {found for name in names if (found := owner(name)) is not None}
    if len(owners) > 1:
        shown = ", ".join(f"{rank} of {ranks}" for rank, ranks in sorted(owners))
        raise GraphoptError(f"the state holds what is several ranks' own ({shown}): load one rank's on each")
    return next(iter(owners), None)
