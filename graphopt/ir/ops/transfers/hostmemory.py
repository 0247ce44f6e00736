"""How much host memory there is to be had, for this process and the groups it is limited by."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_host_bytes"]


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory that can be allocated without swapping or being killed; None where the system does not say.

    The least of what Linux reports as available (``MemAvailable``) and what is left in each control group, of either
    version, that this process is in. Pages of files that the kernel drops when memory is short count as available.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    found = [*_machine(root), *_groups(root)]
    return max(min(found), 0) if found else None


def _machine(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _groups(root: Path) -> Iterator[int]:
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _left(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _left(mount: Path, path: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[int]:
    """Bytes left in a group and in each group around it, where they have a limit.

    In a container the path may be the host's, and only the mount itself be there; groups that are not there are left
    out.
    """
    group = mount / path.strip("/")
    for folder in (group, *group.parents):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is not None and usage is not None:
            cache = sum(int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(cache_field))
            yield limit - usage + cache
        if folder == mount:
            return


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says ``max``."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
