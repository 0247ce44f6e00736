"""What the tests of the cost model share: a profile with round figures, small calls, a folder for figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from graphopt import Phase, Program
from graphopt.analysis.costs.cost import DeviceProfile
from tests.support.training import captured

TOY = DeviceProfile(
    "toy", {"float32": 1e9, "bfloat16": 4e9}, memory_bandwidth=1e6, overhead=1.0, host_bandwidth=1e3,
    memory_bytes=1 << 30,
)  # fmt: skip


def use_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which figures are kept from now on; it does not exist yet."""
    monkeypatch.setenv("GRAPHOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return tmp_path / "cache"


def kept(folder: Path) -> Any:
    """What the one file of figures in a folder holds."""
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def use_changed(folder: Path, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a copy of the figures in ``folder`` from now on, changed on the disk."""
    (path,) = folder.glob("*.json")
    data = json.loads(path.read_text())
    change(data)
    other = folder.parent / "changed"
    other.mkdir()
    (other / path.name).write_text(json.dumps(data))
    monkeypatch.setenv("GRAPHOPT_CACHE", str(other))


def small_program() -> Program:
    """A program to which calls can be added."""
    return captured(nn.Linear(2, 2), torch.zeros(2, 2))


def call(
    op: Callable[..., Any], *args: Any, program: Program | None = None, phase: Phase = Phase.FORWARD, **kwargs: Any
) -> fx.Node:
    """A call of ``op`` at the end of a program; tensors among ``args``, and in lists there, become its inputs."""
    place = small_program() if program is None else program
    inputs, mode = place.inputs, place.fake_mode

    def given(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(given(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        return place.add_input(f"given{len(inputs)}", mode.from_tensor(value), inputs[0])

    return place.insert(op, given(args), kwargs, before=place.output_node, phase=phase, origin="test")
