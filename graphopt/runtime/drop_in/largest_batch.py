"""The largest batch whose predicted peak fits into so many bytes: captured and planned, and never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.capture import CaptureSession
from graphopt.capture.call.batch_rows import batch_of_rows
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.capture.step.traced_update import has_state
from graphopt.errors import ArgumentError, GraphoptError, PassError, public, whole_number
from graphopt.ir.context import Context, StepContext
from graphopt.ir.node import Stage
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes, parse_bytes
from graphopt.rewriting.memory.budget_text import check_budget, is_what_is_free
from graphopt.rewriting.memory.fit.budget import BudgetError, budget_bytes
from graphopt.rewriting.pipeline import Passes
from graphopt.rewriting.progress import working
from graphopt.runtime.drop_in.module import take_over
from graphopt.runtime.programs.rewrite import rewrite
from graphopt.runtime.runner import Options

__all__ = ["largest_batch"]

Batch = Callable[[int], Any] | tuple[Any, ...] | Mapping[str, Any] | torch.Tensor


@public
def largest_batch(
    model: nn.Module,
    batch: Batch,
    passes: Passes = (),
    *,
    budget: int | str,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    least: int = 1,
    most: int = 65_536,
) -> int:
    """The largest batch whose step fits into a budget, by its predicted peak; nothing of the model is run.

    Each size that is tried is captured and rewritten once: first ``least``, then where a line through the peaks so far
    meets the budget. With ``FitMemory`` among the passes a size fits where a plan for it was found.

    Args:
        model: as for ``graphopt.optimize_step``; its training flags count.
        batch: the arguments of a call, as a tuple or as a dict by name, whose first axes are the batch's; or a function
            that gives them for a number of rows.
        passes: that the training is going to use.
        budget: bytes, ``"8GB"``, or ``"auto"`` for what is free; parameters and optimizer state count.
        loss: as for ``graphopt.optimize_step``; None without an optimizer for a drop-in model.
        optimizer: whose update and state count; None for a drop-in model.
        least: the smallest batch that is of use.
        most: where the search ends.

    Returns:
        the number of rows.

    Raises:
        GraphoptError: where ``least`` rows do not fit, with the bytes that they take.
        CaptureError: where the model cannot be captured.

    Example:
        >>> graphopt.largest_batch(model, (x,), loss=loss, optimizer=optimizer, budget="1MB")
        1730
    """
    check_budget(budget)
    if isinstance(budget, str) and "%" in budget:
        raise ArgumentError(f"budget={budget!r} is a share of a peak that grows with the batch: give bytes, or auto")
    least, most = (whole_number(name, value, least=1, of="rows") for name, value in (("least", least), ("most", most)))
    if most < least:
        raise ArgumentError(f"largest_batch looks from least={least} up to most={most}: most is the smaller one")
    plain, given = take_over(model, passes)
    trial = _Trial(
        plain, batch_of_rows(batch), Options.checked(plain, given, None, "eager", "structure"), loss, optimizer
    )
    with working(f"the largest batch of {type(plain).__name__}") as show:
        return _search(lambda rows: trial.excess(rows, budget, show), least, most)


def _search(excess: Callable[[int], int], least: int, most: int) -> int:
    """The largest number from ``least`` to ``most`` whose excess is not above 0; excesses grow with the number."""
    low, below = least, excess(least)
    if below > 0:
        raise GraphoptError(
            f"no batch fits: with {least} row{'' if least == 1 else 's'} the step takes {format_bytes(below)} more "
            "than the budget: give a larger one, or passes that save memory"
        )
    high, above = most + 1, 0
    guess = 2 * least
    while high - low > 1:
        middle = min(max(guess, low + 1), high - 1)
        value = excess(middle)
        slope = (value - below) / (middle - low)
        if value > 0:
            wide, high, above = high - low, middle, value
        else:
            wide, low, below = high - low, middle, value
        guess = low + int(-below / slope) if slope > 0 else 2 * low
        if above and high - low > wide // 2 and wide > 4:
            guess = min(max(guess, low + (high - low) // 8), high - (high - low) // 8 - 1)
    return low


class _Trial:
    """One training, captured for batches of several sizes."""

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[[int], tuple[tuple[Any, ...], Mapping[str, Any]]],
        options: Options,
        loss: Callable[..., Any] | None,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._model, self._batch, self._options = model, batch, options
        self._loss = loss if loss is not None or optimizer is None else True
        self._optimizer = optimizer

    def excess(self, rows: int, budget: int | str, show: Any) -> int:
        """Bytes above the budget that a step of so many rows takes; not above 0 where it fits."""
        args, kwargs = self._batch(rows)
        try:
            with CAPTURE_LOCK:
                program = self._program(args, kwargs)
                memory = program.memory()
                reserved = reserved_where_cached(program, memory)
        except PassError as error:
            if not isinstance(error.__cause__, BudgetError):
                raise
            show(f"{rows} rows: no plan fits")
            return max(1, error.__cause__.smallest_bytes - self._limit(budget))
        taken = memory.peak_bytes if reserved is None else reserved.reserved_peak_bytes
        show(f"{rows} rows: {format_bytes(taken)}")
        return taken - budget_bytes(budget, memory)

    def _limit(self, budget: int | str) -> int:
        """Bytes of a budget; for ``auto``, which depends on the program, none are known."""
        if isinstance(budget, str):
            return 2**62 if is_what_is_free(budget) else parse_bytes(budget)
        return int(budget)

    def _program(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
        session = CaptureSession(self._model, args, kwargs, loss=self._loss, optimizer=self._optimizer)
        until: Stage = "joint" if self._optimizer is None else "step"
        return rewrite(
            session,
            self._options.pipeline,
            until=until,
            context=Context(step=StepContext(there=self._is_there)),
            log=False,
        ).program

    def _is_there(self, role: str, target: str) -> bool:
        """Whether the optimizer has a piece of state already (``StepContext.there``)."""
        return role == "state" and self._optimizer is not None and has_state(self._optimizer, self._model, target)
