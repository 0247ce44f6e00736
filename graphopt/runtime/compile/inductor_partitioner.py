"""A partitioner for the inductor of ``torch.compile``: what forward keeps for backward, within a budget."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphopt import _torch
from graphopt.errors import ArgumentError
from graphopt.ir.version import VERSION
from graphopt.ir.words.written_units import counted, format_bytes, parse_bytes
from graphopt.rewriting.memory.budget_text import check_budget
from graphopt.rewriting.memory.fit.budget import BudgetError, Share
from graphopt.runtime.compile.kept_values import Candidate, KeptValues

__all__ = ["partitioner"]

logger = logging.getLogger("graphopt.capture")

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def partitioner(budget: int | str) -> Any:
    """What divides forward from backward in the stock compiler of ``torch.compile``, in place of torch's own code.

    Backward recomputes what forward does not keep, and random numbers are those of forward: their seeds are kept.
    A smaller budget never keeps more bytes, and its predicted peak is never higher. With 100 % or more, what is kept is
    what torch would keep. Regions of ``torch.utils.checkpoint`` are planned like everything else.

    Args:
        budget: the peak of forward and backward in bytes, with parameters and inputs: a number, ``"8GB"``,
            ``"512MiB"``, or ``"60%"`` of the peak that torch's own partition is predicted to have. It is for each graph
            by itself, where torch cuts a model.

    Returns:
        An object for inductor's option ``custom_partitioner_fn``:
        ``torch.compile(model, options={"custom_partitioner_fn": graphopt.partitioner("60%")})``.

    Raises:
        ArgumentError: for what is no budget.
        TorchVersionError: where the installed torch has no such option.

    Example:
        >>> options = {"custom_partitioner_fn": graphopt.partitioner("60%")}
        >>> options["custom_partitioner_fn"].uuid().endswith("partitioner(budget='60%')")
        True
    """
    check_budget(budget)
    if isinstance(budget, str) and budget.strip().lower() == "auto":
        raise ArgumentError(
            "budget='auto' is not known here: write bytes, '8GB', or '60%' of what torch's partition takes"
        )

    return _torch.as_partitioner(_Split(budget), f"graphopt {VERSION} partitioner(budget={budget!r})")


@dataclass(frozen=True)
class _Split:
    """Divides a joint graph within a budget."""

    budget: int | str

    def __call__(
        self,
        joint: fx.GraphModule,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        compiler: str = "inductor",
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward."""
        del compiler
        if _torch.JointSplit.marked(joint):
            logger.info("partitioner: regions of torch.utils.checkpoint are planned like everything else")
        found = _torch.JointSplit.of(joint, num_fwd_outputs, static_lifetime_input_indices)
        if not found.has_backward:
            return found.without_backward(static_lifetime_input_indices)
        return found.split(_chosen(KeptValues(found).candidates(), self.budget).kept)


def _chosen(candidates: Sequence[Candidate], budget: int | str) -> Candidate:
    """The fastest candidate within a budget.

    Raises:
        BudgetError: where there is none.
    """
    torchs, lowest = candidates[0], candidates[-1]
    limit = _bytes(budget, torchs.peak_bytes)
    for candidate in candidates:
        if candidate.peak_bytes <= limit:
            logger.info(
                "partitioner: peak %s -> %s predicted, kept %s -> %s, %s recomputed (%d with torch's partition)",
                format_bytes(torchs.peak_bytes),
                format_bytes(candidate.peak_bytes),
                format_bytes(torchs.kept_bytes),
                format_bytes(candidate.kept_bytes),
                counted(candidate.again, "calls"),
                torchs.again,
            )
            return candidate
    raise BudgetError(
        f"no partition fits into {format_bytes(limit)} ({limit} bytes): the smallest peak found is {lowest.peak_bytes} "
        f"bytes ({format_bytes(lowest.peak_bytes)}); torch's own partition takes {format_bytes(torchs.peak_bytes)}",
        lowest.peak_bytes,
        limit,
    ).in_shares(budget)


def _bytes(budget: int | str, peak: int) -> int:
    if not isinstance(budget, str):
        return int(budget)
    percent = _PERCENT.fullmatch(budget)
    return Share(float(percent[1]), peak) if percent else parse_bytes(budget)
