"""A process in a memory cgroup of its own, which the system kills where it takes more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["limited", "most_taken"]


def limited(command: Sequence[str], limit: int, name: str = "graphopt-benchmark") -> list[str]:
    """A command that runs another one within so many bytes; needs root, and cgroups of the first version.

    Args:
        command: program and arguments.
        limit: bytes; 0 for none.
        name: of the cgroup.
    """
    return [sys.executable, "-c", _ENTER, str(limit), name, *command] if limit else list(command)


def most_taken(name: str) -> int:
    """The most bytes that a process of a cgroup has had so far, since ``limited`` made it or let another one in."""
    own = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    return int((Path("/sys/fs/cgroup/memory") / own.lstrip("/") / name / "memory.max_usage_in_bytes").read_text())


_ENTER = """
import os, pathlib, sys
own = next(line.split(":")[2] for line in open("/proc/self/cgroup").read().splitlines() if ":memory:" in line)
group = pathlib.Path("/sys/fs/cgroup/memory") / own.lstrip("/") / sys.argv[2]
group.mkdir(exist_ok=True)
(group / "memory.limit_in_bytes").write_text(sys.argv[1])
(group / "memory.max_usage_in_bytes").write_text("0")
(group / "cgroup.procs").write_text(str(os.getpid()))
os.execv(sys.argv[3], sys.argv[3:])
"""
