"""A process in a memory cgroup of its own, which the system kills where it takes more."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["limited"]


def limited(command: Sequence[str], limit: int, name: str = "graphopt-benchmark") -> list[str]:
    """A command that runs another one within so many bytes; needs root, and cgroups of the first version.

    Args:
        command: program and arguments.
        limit: bytes; 0 for none.
        name: of the cgroup.
    """
    return [sys.executable, "-c", _ENTER, str(limit), name, *command] if limit else list(command)


_ENTER = """
import os, pathlib, sys
own = next(line.split(":")[2] for line in open("/proc/self/cgroup").read().splitlines() if ":memory:" in line)
group = pathlib.Path("/sys/fs/cgroup/memory") / own.lstrip("/") / sys.argv[2]
group.mkdir(exist_ok=True)
(group / "memory.limit_in_bytes").write_text(sys.argv[1])
(group / "cgroup.procs").write_text(str(os.getpid()))
os.execv(sys.argv[3], sys.argv[3:])
"""
