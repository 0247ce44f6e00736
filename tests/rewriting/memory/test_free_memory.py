"""How many bytes a device has free, by statistics that stand for those of CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphopt.rewriting.memory import free_memory

GIB = 2**30
THERE = torch.device("cuda:1")


def free(monkeypatch: pytest.MonkeyPatch, driver: int, **statistics: int) -> int:
    asked: list[torch.device] = []
    named = {f"{name}.all.current": count for name, count in statistics.items()}
    cuda = SimpleNamespace(
        mem_get_info=lambda device: asked.append(device) or (driver, 80 * GIB),
        memory_stats=lambda device: asked.append(device) or named,
    )
    monkeypatch.setattr(free_memory.torch, "cuda", cuda)
    found = free_memory.free_bytes(THERE)
    assert asked == [THERE, THERE]
    return found


def test_whole_cached_segments_are_free_and_parts_of_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {"reserved_bytes": 30 * GIB, "active_bytes": 12 * GIB, "inactive_split_bytes": 5 * GIB}
    assert free(monkeypatch, 40 * GIB, **statistics) == (40 + 30 - 12 - 5) * GIB


def test_before_the_first_request_what_the_driver_has_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert free(monkeypatch, 79 * GIB) == 79 * GIB
