"""Numbers of an optimizer's groups that change while it trains: read by the program at each run, as learning rates are.

A trace of the update has them as constants. Where a schedule changes one (momentum in ``OneCycleLR``, a weight decay
that grows), the fused kernels of torch's optimizers take it from a new input of the program instead, and passes need
not run again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.step.traced_update import settings
from graphopt.capture.step.update_settings import Number, number_target
from graphopt.ir.names import identifier
from graphopt.ir.node import InputSpec
from graphopt.ir.program import Program
from graphopt.runtime.step.step_variants import CapturedStep

__all__ = ["follow_settings", "read_numbers", "with_numbers_read"]

logger = logging.getLogger("graphopt")

_TOLD_AT = 3
"""The trace for other settings at which a user hears of it."""

_KERNELS = ("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_")
_OF_TUPLES = {("betas", 0): "beta1", ("betas", 1): "beta2"}


def follow_settings(captured: CapturedStep, optimizer: torch.optim.Optimizer) -> None:
    """Make the programs of a capture those for the settings that the optimizer has now.

    Numbers that have changed are read at each run from now on, where that can be; otherwise the update is traced anew.
    """
    now = settings(optimizer)
    if captured.settings.serves(now, captured.read):
        return
    changed = captured.settings.changed(now)
    read = captured.read | set(changed)
    program = None
    if captured.readable and changed and captured.settings.serves(now, read) and _may_be_read(optimizer):
        program = read_numbers(captured.rewritten.program, read, captured.settings.numbers)
    if program is not None:
        captured.rewritten.replace(program)
        captured.read = read
    else:
        started = time.perf_counter()
        captured.rewritten.retrace()
        count, seconds = captured.traced
        captured.traced = count + 1, seconds + time.perf_counter() - started
        captured.read = frozenset()
        _tell(captured, optimizer, changed)
    captured.variants.clear()
    captured.settings, captured.looked_at, captured.ahead = now, None, None


def _tell(captured: CapturedStep, optimizer: torch.optim.Optimizer, changed: Sequence[Number]) -> None:
    """Say once that the update is traced again and again, and what to do."""
    if captured.traced[0] != _TOLD_AT:
        return
    names = ", ".join(dict.fromkeys(key for _, key, _ in changed)) or "settings of its groups"
    logger.warning(
        "the update of %s was traced anew %d times, in %.1f s, since %s changed: with fused=True, where torch has such "
        "kernels and no pass has taken a number over, the program reads numbers at each run; or change them less often",
        type(optimizer).__name__,
        *captured.traced,
        names,
    )


def with_numbers_read(captured: CapturedStep, program: Program, optimizer: torch.optim.Optimizer) -> Program:
    """A program of a capture that has just been traced, reading the numbers that others of the capture read.

    Where it cannot, the next change of a number takes a new trace of all of them.
    """
    if not captured.read:
        return program
    found = read_numbers(program, captured.read, settings(optimizer).numbers)
    if found is None:
        captured.readable, captured.read, captured.settings = False, frozenset(), settings(optimizer)
    return program if found is None else found


def _may_be_read(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update depends on numbers by the arguments of its kernels, and by whether they are 0, and not else.

    Torch's own do; an optimizer of the user's may do with numbers what it likes.
    """
    return type(optimizer).__module__.startswith("torch.optim.")


def read_numbers(program: Program, numbers: Collection[Number], values: Mapping[Number, float]) -> Program | None:
    """A copy of a program that reads numbers of the optimizer's groups at each run.

    Args:
        program: of a step.
        numbers: which ones.
        values: what all numbers were when the program was traced.

    Returns:
        None where the program has one of them elsewhere than as an argument of torch's fused kernels, or a pass has
        put something else in its place.
    """
    copy = program.copy()
    rates = {spec.target: node for node, spec in copy.inputs_of("hyperparameter")}
    for number in sorted(numbers):
        rate = rates.get(f"lr[{number[0]}]")
        calls = [] if rate is None else list(rate.users)
        if not all(map(_is_kernel, calls)):
            return None
        constants = [call for call in calls if not isinstance(_argument(call, number), (fx.Node, type(None)))]
        if any(_argument(call, number) != values[number] for call in constants):
            return None
        if constants:
            target = number_target(number)
            value = _torch.symbolic_float(identifier(target), float(values[number]))
            node = rates.get(target) or copy.add_input(identifier(target), value, InputSpec("hyperparameter", target))
            for call in constants:
                _put(call, number, node)
    return copy


def _is_kernel(call: fx.Node) -> bool:
    return isinstance(call.target, _torch.OpOverload) and call.target._schema.name in _KERNELS


def _place(call: fx.Node, number: Number) -> tuple[str, int]:
    """The name of a kernel's argument for a number, and where it stands among all; -1 where there is none."""
    _, key, place = number
    name = _OF_TUPLES.get((key, place), key)
    names = [argument.name for argument in call.target._schema.arguments]  # type: ignore[union-attr]
    return name, names.index(name) if name in names else -1


def _argument(call: fx.Node, number: Number) -> Any:
    """What a kernel gets for a number; None where it takes no such argument."""
    name, place = _place(call, number)
    return call.args[place] if 0 <= place < len(call.args) else call.kwargs.get(name)


def _put(call: fx.Node, number: Number, node: fx.Node) -> None:
    name, place = _place(call, number)
    if place < len(call.args):
        call.update_arg(place, node)
    else:
        call.update_kwarg(name, node)
