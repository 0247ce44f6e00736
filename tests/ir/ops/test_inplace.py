"""What calls that write in place allocate for themselves: measured like that of other calls."""

from __future__ import annotations

import pytest
import torch

from graphopt import Program, measure_peak, optimize_step
from graphopt.ir.ops import schema
from graphopt.passes import FuseUpdate
from tests.support.fitting import wide
from tests.support.training import OPTIMIZERS, mean_square

ROWS = torch.linspace(-1, 1, 8 * 8).reshape(8, 8).cos()


def temporaries(program: Program, op: str) -> list[int]:
    """What each call of an op takes while it runs."""
    memory = program.memory()
    return [
        size
        for node, size in zip(memory.nodes, memory.temporaries, strict=True)
        if schema.op_name(node) == op and schema.mutated_inputs(node)
    ]


@pytest.mark.sweep
def test_a_peak_at_a_number_that_is_wrapped_in_a_tensor() -> None:
    """With few rows the peak is where RMSprop adds 1 to its steps, and eps to its averages."""
    model = wide()
    step = optimize_step(model, OPTIMIZERS["rmsprop"](model.parameters()), [FuseUpdate()], loss=mean_square)
    step(ROWS), step(ROWS)
    memory = step.program.memory()
    assert schema.mutated_inputs(memory.peak_at)
    assert memory.temporaries[memory.nodes.index(memory.peak_at)] > 0
    assert measure_peak(lambda: step(ROWS)).allocated_peak_bytes == memory.allocated_peak_bytes


@pytest.mark.sweep(but=("momentum",))
@pytest.mark.parametrize("optimizer", ["adamw", "rmsprop", "momentum", "adagrad"])
def test_fused_kernels_take_nothing_and_counting_steps_eight_bytes(optimizer: str) -> None:
    model = wide()
    step = optimize_step(model, OPTIMIZERS[optimizer](model.parameters()), loss=mean_square, example_inputs=(ROWS,))
    fused = {"adamw": "_fused_adamw_", "momentum": "_fused_sgd_", "adagrad": "_fused_adagrad_"}.get(optimizer)
    if fused:
        assert temporaries(step.program, fused) == [0]
    if optimizer != "momentum":
        assert max(temporaries(step.program, "_foreach_add_")) in (8, 12)


def test_measuring_leaves_what_is_written_to_as_it_is() -> None:
    model = wide()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = optimize_step(model, optimizer, loss=mean_square, example_inputs=(ROWS,))
    step.program.memory()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
