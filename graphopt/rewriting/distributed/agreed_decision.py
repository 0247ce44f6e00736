"""Decisions that one rank takes for all: what ranks measure differs, and what they exchange has to be the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from graphopt.errors import GraphoptError
from graphopt.ir.ops.groups import find_group, talking
from graphopt.ir.program import Program

__all__ = ["decided_by_first_rank"]

T = TypeVar("T")


def decided_by_first_rank(program: Program, decide: Callable[[], T]) -> T:
    """What the first rank decides, on every rank of the group whose shards a program keeps.

    All of them have to come here. In a program without shards of parameters each process decides for itself.

    Args:
        program: that is decided about.
        decide: gives plain data.

    Raises:
        GraphoptError: on the others, with what the first rank raises.
    """
    name = next((state.group for state in program.pass_state.values() if state.shard is not None), None)
    if name is None:
        return decide()
    group = find_group(name)
    found: list[Any] = [None, None]
    if group.rank == 0:
        try:
            found[0] = decide()
        except Exception as error:  # whatever it is, the other ranks must not wait
            found[1] = error
    told = [found[0], None if found[1] is None else str(found[1])]
    with talking():
        dist.broadcast_object_list(told, src=dist.get_global_rank(group.handle, 0), group=group.handle)
    if found[1] is not None:
        raise found[1]
    if told[1] is not None:
        raise GraphoptError(told[1])
    return cast(T, told[0])
