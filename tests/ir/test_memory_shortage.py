"""Memory that runs out while a program is made: what the error says, and that the next call is right."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import graphopt
from graphopt import CaptureError, GraphoptError, Phase
from graphopt.ir.ops.updates.opaque_update import opaque_update_

SHORTAGES: dict[str, Callable[[], Exception]] = {
    "of C++": lambda: MemoryError("std::bad_alloc"),
    "of a thread": lambda: RuntimeError("can't start new thread"),
    "of Python": MemoryError,
    "of torch's CPU allocator": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:132] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "of a device": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
}


class Short:
    """Raises one error, in the first call that comes by."""

    def __init__(self, error: Exception) -> None:
        self._errors = iter([error])  # a capture that fails takes back what attributes it has set

    def meet(self) -> None:
        for error in self._errors:
            raise error


class Needy(nn.Module):
    """A layer whose forward may have no memory left."""

    def __init__(self, short: Short | None) -> None:
        super().__init__()
        self.layer, self.short = nn.Linear(4, 4), short

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.short is not None:
            self.short.meet()
        return self.layer(x)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.sweep(but=("of torch's CPU allocator",))
@pytest.mark.parametrize("kind", SHORTAGES)
def test_a_forward_for_which_there_is_no_memory_is_told_as_that(kind: str) -> None:
    model = Needy(Short(SHORTAGES[kind]()))
    with pytest.raises(GraphoptError, match="the machine's memory ran out while Needy was captured") as caught:
        graphopt.capture(model, (torch.randn(2, 4),))
    assert not isinstance(caught.value, CaptureError)
    assert graphopt.capture(model, (torch.randn(2, 4),)).stage == "joint"


def test_an_update_for_which_there_was_no_memory_is_traced_by_the_next_call() -> None:
    torch.manual_seed(0)
    model, x = Needy(None), torch.randn(2, 4)
    eager = copy.deepcopy(model)
    short = Short(MemoryError("std::bad_alloc"))

    class NeedySGD(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            short.meet()
            super().step(closure)

    step = graphopt.optimize_step(model, NeedySGD(model.parameters(), lr=0.1), loss=_loss)
    with pytest.raises(GraphoptError, match=r"memory ran out while the update of NeedySGD .*\(std::bad_alloc\)"):
        step(x)
    loss = step(x)
    assert all(node.target is not opaque_update_ for node in step.program.phase_nodes(Phase.UPDATE))
    plain = torch.optim.SGD(eager.parameters(), lr=0.1)
    expected = _loss(eager, x)
    expected.backward()
    plain.step()
    assert torch.equal(loss, expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
