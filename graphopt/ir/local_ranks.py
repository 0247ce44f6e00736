"""How many processes of a job share this machine, its memory and its links."""

from __future__ import annotations

import os

from graphopt.errors import GraphoptError

__all__ = ["local_ranks"]


def local_ranks() -> int:
    """What ``torchrun`` says in ``LOCAL_WORLD_SIZE``; 1 where nothing does.

    Raises:
        GraphoptError: where it is no such number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.strip().isdecimal() or int(text) < 1:
        raise GraphoptError(f"LOCAL_WORLD_SIZE is {text!r}: it is the number of processes on this machine, 1 or more")
    return int(text)
