"""``loss_gradient``: the gradient of logits out of their log-probabilities, without a second tensor of their size.

Eager mode makes the gradient of the log-probabilities first, a tensor of zeros but for one element in each row. Here
that is made for a few rows at a time, by the same kernels, which work row by row.
"""

from __future__ import annotations

from typing import Any

import torch

from graphopt.ir.ops.define import define

__all__ = ["loss_gradient", "loss_gradient_", "rows_at_a_time"]

_aten = torch.ops.aten
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Of the gradient of log-probabilities that are there at a time, by device type."""


def rows_at_a_time(columns: int, kind: str) -> int:
    """For how many rows of so many columns it is made at a time: one for each thread at least."""
    return max(_ELEMENTS.get(kind, 1 << 24) // max(columns, 1), torch.get_num_threads() if kind == "cpu" else 1)


def _new(log_probs: torch.Tensor, *given: Any) -> torch.Tensor:
    return _into(torch.empty_like(log_probs), log_probs, *given)


def _in_place(log_probs: torch.Tensor, *given: Any) -> torch.Tensor:
    return _into(log_probs, log_probs, *given)


def _into(
    result: torch.Tensor,
    log_probs: torch.Tensor,
    grad_output: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    step = rows_at_a_time(log_probs.shape[1], log_probs.device.type)
    for start in range(0, log_probs.shape[0], step):
        rows = log_probs[start : start + step]
        given = grad_output, rows, target[start : start + step], weight, reduction, ignore_index, total_weight
        sparse = _aten.nll_loss_backward.default(*given)
        _aten._log_softmax_backward_data.out(sparse, rows, 1, rows.dtype, out=sparse)
        result[start : start + step].copy_(sparse)
        del sparse  # before the next one is made
    return result


def _like(log_probs: torch.Tensor, *given: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


def _itself(log_probs: torch.Tensor, *given: Any) -> torch.Tensor:
    return log_probs


_GIVEN = "Tensor grad_output, Tensor target, Tensor? weight, int reduction, int ignore_index, Tensor total_weight"

loss_gradient = define(f"loss_gradient(Tensor log_probs, {_GIVEN}) -> Tensor", _new, _like)
"""``loss_gradient(Tensor log_probs, Tensor grad_output, ...) -> Tensor``: ``nll_loss_backward`` of a mean or a sum, and
``_log_softmax_backward_data`` of it over the last dimension, to the same bits.

``log_probs`` is contiguous, of shape [rows, classes], ``target`` of shape [rows]; the others are those of
``nll_loss_backward``.
"""

loss_gradient_ = define(f"loss_gradient_(Tensor(a!) log_probs, {_GIVEN}) -> Tensor(a!)", _in_place, _itself)
"""``loss_gradient_(Tensor(a!) log_probs, ...) -> Tensor(a!)``: the same in place."""
