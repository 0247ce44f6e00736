"""What regions of forward programs write and do is seen from outside of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from graphopt import Program
from graphopt.capture import CaptureSession
from graphopt.ir.region_effects import has_effect, is_written, mutated_inputs

X = torch.ones(4, 4)


class Region(nn.Module):
    """Runs a function on a buffer without gradients."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        self.register_buffer("buffer", torch.zeros(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.function(self.buffer)  # type: ignore[arg-type]
        return self.linear(x) + self.buffer


def nested(buffer: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        buffer.t()[0].add_(1)


WRITING = {"itself": lambda b: b.add_(1), "a view": lambda b: b[1:].zero_(), "a nested region": nested}
OTHER = {"nothing": lambda b: b.sin(), "a copy": lambda b: b.clone()[0]}


def captured(model: nn.Module) -> Program:
    """The forward program of a model."""
    return CaptureSession(model, (X,)).forward()


def region_of(program: Program) -> tuple[fx.Node, fx.Node]:
    """The call of the region, and the buffer."""
    (region,) = [node for node in program.nodes if "wrap_with_set_grad" in str(node.target)]
    ((buffer, _),) = program.inputs_of("buffer")
    return region, buffer


@pytest.mark.parametrize("what", WRITING)
def test_a_region_that_writes_to_a_buffer_stays(what: str) -> None:
    program = captured(Region(WRITING[what]))
    region, buffer = region_of(program)
    assert mutated_inputs(region, program.attributes) == [buffer]
    assert has_effect(region, program.attributes)
    assert is_written(buffer, program.attributes)
    program.erase_dead()
    assert region in program.nodes


@pytest.mark.parametrize("what", OTHER)
def test_a_region_whose_result_is_not_used_goes(what: str) -> None:
    program = captured(Region(OTHER[what]))
    assert not any(is_written(node, program.attributes) for node, _ in program.inputs_of("buffer"))
    program.erase_dead()
    assert not any("wrap_with_set_grad" in str(node.target) for node in program.nodes)


def test_a_region_that_draws_random_numbers_stays() -> None:
    program = captured(Region(lambda buffer: torch.rand_like(buffer)))
    region, _ = region_of(program)
    assert has_effect(region, program.attributes)
    assert mutated_inputs(region, program.attributes) == []
