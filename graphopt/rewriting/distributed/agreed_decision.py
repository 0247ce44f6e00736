"""Decisions that one rank takes for all: what ranks measure differs, and what they exchange has to be the same."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from graphopt.errors import GraphoptError, quoted
from graphopt.ir.ops.communication.groups import Group, find_group, made_together, talking
from graphopt.ir.program import Program

__all__ = ["decided_by_first_rank", "decided_in_group"]

T = TypeVar("T")


def decided_by_first_rank(program: Program, decide: Callable[[], T]) -> T:
    """What the first rank decides, on every rank of the group whose shards a program keeps.

    In a program without shards of parameters each process decides for itself.

    Args:
        program: that is decided about.
        decide: gives plain data.

    Raises:
        GraphoptError: on the others, the same as on the first rank, or one that says what that raises.
    """
    name = next((state.group for state in program.pass_state.values() if state.shard is not None), None)
    return decide() if name is None else decided_in_group(find_group(name), decide)


def decided_in_group(group: Group, decide: Callable[[], T]) -> T:
    """What the first rank of a group decides, on every rank of it, where all of them make a program.

    A rank that makes one alone decides alone; what it exchanges is compared with the others' before it runs.

    Args:
        group: the ranks.
        decide: gives plain data.

    Raises:
        GraphoptError: on the others, the same as on the first rank, or one that says what that raises.
    """
    if not made_together(group):
        return decide()
    found: list[Any] = [None, None]
    if group.rank == 0:
        try:
            found[0] = decide()
        except Exception as error:  # whatever it is, the other ranks must not wait
            found[1] = error
    told = [found[0], _for_others(found[1])]
    with talking():
        dist.broadcast_object_list(told, src=dist.get_global_rank(group.handle, 0), group=group.handle)
    if found[1] is not None:
        raise found[1]
    if told[1] is not None:
        raise told[1]
    return cast(T, told[0])


def _for_others(error: Exception | None) -> GraphoptError | None:
    """What is raised on other ranks, which go on from it as the first one does."""
    if error is None:
        return None
    if isinstance(error, GraphoptError):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return GraphoptError(quoted(error))
