"""Normalisation ops that update running statistics, in the form that leaves the statistics alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["without_statistics"]

_FUNCTIONAL = torch.ops.aten._native_batch_norm_legit_functional.default
_NO_STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats
_TRAINING = 5


def without_statistics(node: fx.Node) -> tuple[Any, tuple[Any, ...], int] | None:
    """How to compute a BatchNorm's output again without its running statistics.

    In training the output depends on the batch alone; the running statistics are read only to be updated.

    Returns:
        The op, its arguments, and how many of the original's results it gives; None for any other op.
    """
    if node.target is not _FUNCTIONAL or node.kwargs or node.args[_TRAINING] is not True:
        return None
    data, weight, bias, _mean, _variance, training, momentum, epsilon = node.args
    return _NO_STATISTICS, (data, weight, bias, training, momentum, epsilon), 3
