"""GRU as eager mode computes it: the same ops, without the writes into parts of a tensor that tracing loses.

Eager mode adds the gates into two thirds of a matrix and takes the sigmoid there, row by row. Traced, the sums become
tensors of their own, and the sigmoid of a whole tensor rounds otherwise than that of its rows. Here the sums are made
as one matrix, of which the gates are parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["AS_IN_EAGER", "gru", "gru_cell"]


def gru(
    input: torch.Tensor,
    hx: torch.Tensor,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten::gru.input``: outputs of the last layer, and the last hidden state of every layer and direction."""
    x = input.transpose(0, 1) if batch_first else input
    hidden = hx.unbind(0)
    width = 4 if has_biases else 2
    cells = [list(params[start : start + width]) for start in range(0, len(params), width)]
    directions = 2 if bidirectional else 1
    last: list[torch.Tensor] = []
    for layer in range(num_layers):
        found = []
        for direction in range(directions):
            number = layer * directions + direction
            outputs, state = _layer(x, hidden[number], cells[number], reverse=direction == 1)
            found.append(outputs)
            last.append(state)
        x = torch.cat(found, -1) if bidirectional else found[0]
        if dropout != 0 and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last, 0)


def _layer(
    x: torch.Tensor, hidden: torch.Tensor, cell: Sequence[torch.Tensor], *, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One direction of one layer over all steps: its outputs, in order of time, and its last hidden state."""
    bias_ih, bias_hh = cell[2:] if len(cell) > 2 else (None, None)
    outputs: list[torch.Tensor] = []
    steps = F.linear(x, cell[0], bias_ih).unbind(0)
    for gates in reversed(steps) if reverse else steps:
        hidden = _step(gates, hidden, F.linear(hidden, cell[1], bias_hh))
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if reverse else outputs, 0), hidden


def _step(given: torch.Tensor, hidden: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
    size = hidden.shape[-1]
    both = recurrent + given  # the last third is not read: what counts is that rows of the gates stand apart
    reset, update = both.narrow(-1, 0, size).sigmoid(), both.narrow(-1, size, size).sigmoid()
    new = (given.narrow(-1, 2 * size, size) + recurrent.narrow(-1, 2 * size, size) * reset).tanh()
    return (hidden - new) * update + new


def gru_cell(
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """``aten::gru_cell``: the next hidden state."""
    return _step(F.linear(input, w_ih, b_ih), hx, F.linear(hx, w_hh, b_hh))


AS_IN_EAGER: dict[Any, Callable[..., Any]] = {torch.ops.aten.gru.input: gru, torch.ops.aten.gru_cell.default: gru_cell}
"""What these ops are traced as."""
