"""torchft's DiLoCo beside the pass, with a manager of one fixed group in place of its server's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft.local_sgd import DiLoCo as Theirs

from graphopt.passes import DiLoCo
from graphopt.rewriting.distributed.outer_step import fragments_of
from tests.support.outer_steps import batch, build, inner, loss_of, step_with


class FixedRanks:
    """What torchft asks of its manager, where all ranks are there all the time."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.rounds = 0

    def register_state_dict_fn(self, *_: object) -> None:
        """States are not exchanged."""

    disallow_state_dict_read = allow_state_dict_read = start_quorum = lambda self: None

    def current_step(self) -> int:
        return self.rounds

    def should_commit(self) -> bool:
        self.rounds += 1
        return True

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        assert not should_quantize
        return dist.all_reduce(tensor.mul_(1.0 / dist.get_world_size()), async_op=True)


class Fragment(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)


def furthest(options: Mapping[str, Any], steps: int) -> float:
    """How far parameters are from torchft's at most, behind any of some steps."""
    pass_ = DiLoCo(**options)
    (model, step), other = step_with(pass_), build()
    named, optimizer = dict(other.named_parameters()), inner(other)
    parts = fragments_of([(name, parameter.nbytes) for name, parameter in named.items()], pass_.fragments)
    fragments = [Fragment([named[name] for name in part]) for part in parts]
    outer = [
        torch.optim.SGD(part.parameters(), lr=pass_.outer_lr, momentum=pass_.outer_momentum, nesterov=True)
        for part in fragments
    ]
    way = {"fragment_sync_delay": pass_.delay, "fragment_update_alpha": 1 - pass_.mix}
    far = 0.0
    with Theirs(FixedRanks(), fragments, optimizer, outer, pass_.every, **way):  # type: ignore[arg-type]
        for number in range(steps):
            step(*batch(number, model))
            loss_of(other, *batch(number, other)).backward()
            optimizer.step()
            optimizer.zero_grad()
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            far = max(far, *(float((one - two).abs().max()) for one, two in pairs))
    step.state_dict()
    return far
