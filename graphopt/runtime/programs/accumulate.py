"""Gradient accumulation as rewriting: gradients added into buffers, the mean taken in the seed of the backward."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.names import identifier
from graphopt.ir.node import InputSpec, OutputSpec, Phase, info, value_of
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.memory.fit.named_plan import ACCUMULATION

__all__ = ["WEIGHT", "accumulating", "add_gradients"]

WEIGHT = "join/weight"
"""The name of the number by which the gradients of this rank count, where ranks end at different times."""


def accumulating(
    joint: Program, divisor: int, begun: Collection[str], *, last: bool = True, weighed: bool = False
) -> Program:
    """The program of one batch of an accumulation, without an update.

    Args:
        joint: of stage joint with a loss; it is only read.
        divisor: what gradients are divided by, the number of batches; 0 for their sum.
        begun: the parameters that have an accumulator already; none in the first batch.
        last: whether an update follows.
        weighed: whether gradients count by a number that is set before each run.
    """
    program = joint.copy()
    if divisor:
        _scale_seed(program, divisor)
    if weighed:
        _weigh_seed(program)
    return _accumulate_gradients(program, begun, last=last) if begun else program


def _scale_seed(program: Program, batches: int) -> None:
    """Let the backward of a joint program start from ``1 / batches``, as ``(loss / batches).backward()`` does."""
    seed = _seed(program)
    shape, _ = seed.args
    seed.args = (shape, 1.0 / batches)


def _weigh_seed(program: Program) -> None:
    """Multiply what the backward of a joint program starts from by a number that is set before each run."""
    seed = _seed(program)
    value = value_of(seed)
    weight = program.add_state(WEIGHT, PassState((), value.dtype, value.device, fill=1.0, saved=False))
    common: dict[str, Any] = {"after": seed, "phase": Phase.BACKWARD, "like": seed, "origin": ACCUMULATION}
    weighed = program.insert(torch.ops.aten.mul.Tensor, (seed, weight), hint="weighed", **common)
    for reader in [user for user in seed.users if user is not weighed]:
        reader.replace_input_with(seed, weighed)


def _seed(program: Program) -> fx.Node:
    """What the backward of a joint program starts from."""
    seed = next((n for n in program.phase_nodes(Phase.BACKWARD) if info(n).names == ("loss~",)), None)
    if seed is None:
        raise GraphoptError("a program without a loss has no seed to scale; gradient accumulation needs a loss")
    return seed


def _accumulate_gradients(result: Program, begun: Collection[str], *, last: bool) -> Program:
    """Add the gradients of a joint program to what earlier batches left, in place, as each becomes final.

    Accumulators that this batch does not add to are inputs as well: they are in memory. Gradients of parameters without
    an accumulator are returned and become one.

    Args:
        result: of stage joint with a loss.
        begun: the parameters that have an accumulator already.
        last: return every accumulated gradient (an update follows).
    """
    parameters = {spec.target: node for node, spec in result.inputs_of("parameter")}
    values: list[Any] = []
    specs: list[OutputSpec] = []
    added: set[str] = set()
    for value, spec in zip(result.output_values, result.outputs, strict=True):
        mine = spec.role == "gradient" and spec.target in parameters and isinstance(value, fx.Node)
        if not mine or spec.target not in begun:
            values.append(value)
            specs.append(spec)
            continue
        total = result.insert(
            torch.ops.aten.add_.Tensor,
            (_accumulator(result, spec.target, value_of(value)), value),
            after=value,
            phase=Phase.BACKWARD,
            like=value,
            origin=ACCUMULATION,
        )
        result.hand_over_name(f"{spec.target}~", value, total)
        added.add(spec.target)
        if last:
            values.append(total)
            specs.append(spec)
    for name in sorted(set(begun) - added):
        kept = _accumulator(result, name, value_of(parameters[name]))
        if last:
            values.append(kept)
            specs.append(OutputSpec("gradient", name))
    result.set_outputs(values, specs)
    return result


def _accumulator(program: Program, parameter: str, value: Any) -> fx.Node:
    return program.add_input(identifier(f"grad {parameter}"), value, InputSpec("gradient", parameter))


def add_gradients(answers: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add gradients to ``.grad`` of the tensors of a batch; several of one tensor are added up first."""
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor, value in answers:
        known = sums.get(id(tensor))
        sums[id(tensor)] = (tensor, value if known is None else known[1] + value)
    for tensor, value in sums.values():
        tensor.grad = value if tensor.grad is None else tensor.grad.add_(value)
