"""Two passes together in a whole step: one that changes results, and any other beside it."""

from __future__ import annotations

from typing import TypedDict

import torch
import torch.distributed as dist

import graphopt
from graphopt import PassError, PipelineError
from tests.support.core_passes import ROWS, Row
from tests.support.training import OPTIMIZERS


class Together(TypedDict):
    """What came of two passes.

    Attributes:
        refused: the error where both cannot be; empty where they can.
        same: whether losses and parameters are those without the other pass.
        finite: whether all of them are numbers.
        alike: whether parameters are the same on all ranks behind the last step.
    """

    refused: str
    same: bool
    finite: bool
    alike: bool


def together(one: str, other: str) -> Together:
    """Train two steps with one pass, as text, and with another, by name, beside it."""
    row = ROWS[other]
    exchanged = dist.is_initialized()
    alone = f"data-parallel,{one}" if exchanged else one
    texts = [text for text in _split(row.passes) if text != "data-parallel"]
    try:
        found = trained(row, ",".join([alone, *texts]))
    except (PassError, PipelineError) as error:
        return Together(refused=str(error), same=False, finite=False, alike=False)
    expected = trained(row, alone)
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    flat = torch.cat([tensor.flatten().double() for tensor in found[2:]])
    return Together(refused="", same=same, finite=bool(flat.isfinite().all()), alike=not exchanged or _alike(flat))


def _split(passes: str) -> list[str]:
    return [str(current) for current in graphopt.Pipeline(passes).passes]


def trained(row: Row, passes: str) -> list[torch.Tensor]:
    """The losses of two steps, and the parameters behind them."""
    model = row.model("plain")
    step = graphopt.optimize_step(model, OPTIMIZERS[row.optimizer](model.parameters()), passes)
    torch.manual_seed(1)
    losses = [step(*row.batch(number)) for number in range(2)]
    step.state_dict()  # waits for what is under way
    with step.whole_parameters():
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


def _alike(flat: torch.Tensor) -> bool:
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    return all(torch.equal(flat, other) for other in found)
