"""Settings for every test: one thread, a fixed seed, no dump directory from outside."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    monkeypatch.delenv("GRAPHOPT_DUMP", raising=False)
