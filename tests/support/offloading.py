"""What the tests of Offload share: the pass with figures that do not depend on the machine, and a model for it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphopt import Program
from graphopt.ir.node import info
from graphopt.passes import Offload
from tests.support.fitting import calls
from tests.support.training import Net
from tests.support.transferring import stored_bytes

ROWS = torch.linspace(-1, 1, 256 * 8).reshape(256, 8).cos()
LARGE = 40_000
"""A tensor of 256 rows and 64 features is larger, one of 8 features smaller."""


def off(*tensors: str, **options: Any) -> Offload:
    """The pass with figures from the roofline, for tensors from ``LARGE`` bytes on."""
    return Offload(tensors, **{"cost": "roofline", "min_bytes": LARGE, **options})


def layers(p: float = 0.3) -> Net:
    """Alternates between 8 and 64 features; its large tensors come one after the other."""
    torch.manual_seed(0)
    return Net(
        nn.Linear(8, 64), nn.GELU(), nn.Dropout(p), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(),
        nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 8),
    )  # fmt: skip


def moved(program: Program) -> list[str]:
    """The names of what is offloaded, in the order in which copies start."""
    return [info(node.args[0]).names[0] for node in calls(program, "offload")]  # type: ignore[arg-type]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "transfers" in thread.name]


@contextmanager
def nothing_held_afterwards() -> Iterator[None]:
    """Transfers hold nothing when the test ends, and run in one thread at most."""
    yield
    gc.collect()  # tracebacks of errors hold the tensors of their frames
    assert stored_bytes() == 0
    assert len(threads()) <= 1
