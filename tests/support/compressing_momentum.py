"""DeepGradientCompression with the momentum of SGD, in several processes: beside a plain loop, resumed, skipped."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt import Pass
from graphopt.passes import DeepGradientCompression, ScaleLoss
from graphopt.runtime.step.train_step import TrainStep
from tests.support.compressing import (
    F64,
    Found,
    batch,
    bits,
    build,
    calls,
    flat,
    furthest,
    loss,
    made,
    same_on_all,
    touching_entries,
)  # fmt: skip

LATE: dict[str, Any] = {
    "sparsity": (0.9, 0.98), "rampup_begin_step": 2, "rampup_step": 4, "min_elements": 500
}  # fmt: skip
SOON = {**LATE, "rampup_begin_step": 0}


def momentum_sgd(model: nn.Module, of_weights: dict[str, Any], **options: Any) -> torch.optim.Optimizer:
    """A group of weights, with settings of their own, and one of biases."""
    named = list(model.named_parameters())
    weights, biases = ([p for name, p in named if name.endswith(end)] for end in ("weight", "bias"))
    return torch.optim.SGD([{"params": weights, **of_weights}, {"params": biases}], lr=0.1, **options)


class Loop:
    """Momentum correction and factor masking of all ranks in a plain loop; buffers are those of SGD."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, pass_: DeepGradientCompression) -> None:
        self.model, self.ramp, self.masking, self.clip_norm = model, pass_.rampup, pass_.masking, pass_.clip_norm
        self.group = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.world = dist.get_world_size()
        self.buffers: list[dict[str, torch.Tensor]] = [{} for _ in range(self.world)]
        self.rests: list[dict[str, torch.Tensor]] = [{} for _ in range(self.world)]

    def step(self, number: int) -> None:
        sparsity, parameters = self.ramp.at(number), dict(self.model.named_parameters())
        gradients = [
            torch.autograd.grad(loss(self.model, *batch(number, F64, rank)), list(parameters.values()))
            for rank in range(self.world)
        ]
        with torch.no_grad():
            for (name, p), parts in zip(parameters.items(), zip(*gradients, strict=True), strict=True):
                sparse = bool(sparsity) and p.numel() >= 500
                change = self._sparse(name, p, parts, sparsity) if sparse else self._dense(name, p, parts)
                p.sub_(self.group[id(p)]["lr"] * change)

    def _direction(
        self, group: dict[str, Any], buffers: dict[str, torch.Tensor], name: str, g: torch.Tensor
    ) -> torch.Tensor:
        if not group["momentum"]:
            return g
        if name not in buffers:
            buffers[name] = g.clone()
        else:
            buffers[name] = group["momentum"] * buffers[name] + (1 - group["dampening"]) * g
        return g + group["momentum"] * buffers[name] if group["nesterov"] else buffers[name]

    def _dense(self, name: str, p: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        group = self.group[id(p)]
        g = torch.stack(list(parts)).sum(0) / self.world + group["weight_decay"] * p
        first, *_ = [self._direction(group, buffers, name, g) for buffers in self.buffers]  # alike on all
        return first

    def _sparse(self, name: str, p: torch.Tensor, parts: Sequence[torch.Tensor], sparsity: float) -> torch.Tensor:
        group, total = self.group[id(p)], torch.zeros_like(p)
        for buffers, rests, part in zip(self.buffers, self.rests, parts, strict=True):
            limit = 1.0 if self.clip_norm is None else self.clip_norm * self.world**-0.5 / (part.norm().item() + 1e-6)
            g = part * min(1.0, limit)
            if group["momentum"]:
                g = g + group["weight_decay"] * p
            rest = rests.get(name, torch.zeros_like(p)) + self._direction(group, buffers, name, g)
            count = max(1, int(p.numel() * (1 - sparsity) + 1e-6))
            sent = rest.flatten().abs().topk(count).indices
            total.view(-1)[sent] += rest.view(-1)[sent]
            rest.view(-1)[sent] = 0.0
            if self.masking and group["momentum"]:
                buffers[name].view(-1)[sent] = 0.0
            rests[name] = rest
        return total / self.world if group["momentum"] else total / self.world + group["weight_decay"] * p


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "weight decay, clipping": ({"momentum": 0.9, "weight_decay": 0.01}, LATE, {"clip_norm": 0.3}),
    "nesterov": ({"momentum": 0.8, "nesterov": True}, SOON, {}),
    "dampening": ({"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}, SOON, {"masking": False}),
    "weights alone": ({"of_weights": {"momentum": 0.9, "weight_decay": 0.1}}, LATE, {}),
    "biases alone": ({"momentum": 0.9, "of_weights": {"momentum": 0.0, "weight_decay": 0.1}}, SOON, {}),
}
"""Settings of the optimizer, the ramp, and other options of the pass."""


def taken(name: str, *, changed: bool) -> Found:
    """How far parameters and buffers are from the loop's, where the momentum is changed on the way or not."""
    settings, ramp, options = CASES[name]
    ours, theirs = build(F64), build(F64)
    optimizers = [momentum_sgd(model, **{"of_weights": {}, **copy.deepcopy(settings)}) for model in (ours, theirs)]
    current = DeepGradientCompression(**ramp, **options)
    step, loop = made(ours, optimizers[0], current), Loop(theirs, optimizers[1], current)
    for number in range(8):
        if changed and number == 5:  # a schedule of the momentum
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["momentum"] *= 0.5
        step(*batch(number, F64))
        loop.step(number)
    buffers = {key: optimizers[0].state[p].get("momentum_buffer") for key, p in ours.named_parameters()}
    kept = loop.buffers[dist.get_rank()]
    assert set(kept) == {key for key, buffer in buffers.items() if buffer is not None}
    off = max([furthest(flat(ours), flat(theirs)), *(furthest(buffers[key], kept[key]) for key in kept)])
    lines = [line for line in step.records[-1].changed.lines if "momentum" in line]
    return {name + (", changed" if changed else ""): [off, same_on_all(ours), lines]}


# --- states ----------------------------------------------------------------------------------------------------------

Run = tuple[nn.Module, torch.optim.Optimizer, TrainStep]


def fp32(*passes: Pass, **options: Any) -> Run:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    return model, optimizer, made(model, optimizer, *passes)


def state_of(*owners: Any) -> Any:
    return bits([owner.state_dict() for owner in owners])


def switched() -> Found:
    """Dense steps are those of the optimizer, whose buffers go on into sparse ones and back."""
    whole, plain, other = fp32(DeepGradientCompression(**LATE)), fp32(), fp32(DeepGradientCompression(**SOON))
    for number in range(2):
        whole[2](*batch(number)), plain[2](*batch(number))
    said: Found = {"dense": state_of(*whole[:2]) == state_of(*plain[:2])}
    other[0].load_state_dict(plain[0].state_dict())
    other[1].load_state_dict(plain[1].state_dict())
    for number in range(2, 8):
        whole[2](*batch(number)), other[2](*batch(number))
    said["switched"] = state_of(*whole[:2]) == state_of(*other[:2]) and same_on_all(whole[0])
    back, eager = fp32(), fp32()
    states = [[owner.state_dict() for owner in whole[:2]]]
    dist.broadcast_object_list(states, 0)  # the state of one rank for all of them, since buffers differ
    for run in (back, eager):
        for owner, state in zip(run, states[0], strict=False):
            owner.load_state_dict(copy.deepcopy(state))
    back[2](*batch(8))
    eager[1].zero_grad()
    loss(eager[0], *batch(8)).backward()
    for p in eager[0].parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    eager[1].step()
    said["back"] = [furthest(flat(back[0]), flat(eager[0])), same_on_all(back[0])]
    return said


def resumed() -> Found:
    """In the warm-up."""
    started, again = fp32(DeepGradientCompression(**SOON)), fp32(DeepGradientCompression(**SOON))
    for number in range(3):
        started[2](*batch(number))
    for old, new in zip(started, again, strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    for number in range(3, 8):
        started[2](*batch(number)), again[2](*batch(number))
    return {"resumed": state_of(*started) == state_of(*again)}


def skipped() -> Found:
    """The first two steps, by one rank."""
    run = fp32(DeepGradientCompression(**SOON), ScaleLoss(init_scale=1.0, dynamic=False), dampening=0.3)
    model, optimizer, step = run
    before = flat(model).clone()
    for _ in range(2):
        step(*batch(0), torch.tensor(float("inf") if dist.get_rank() == 1 else 0.0))
    nothing = torch.equal(before, flat(model)) and not optimizer.state_dict()["state"]
    for number in range(3):
        step(*batch(number), torch.tensor(0.0))
    return {"skipped": [nothing, same_on_all(model), len(optimizer.state_dict()["state"])]}


def entries() -> Found:
    """A few entries of each tensor are updated at them alone."""
    with touching_entries():
        touched = fp32(DeepGradientCompression(**LATE), weight_decay=0.01)
        for number in range(8):
            touched[2](*batch(number))
    dense = fp32(DeepGradientCompression(**LATE), weight_decay=0.01)
    for number in range(8):
        dense[2](*batch(number))
    alone = any("sum_entries" in call for call in calls(touched[2]))
    return {"entries": [alone, state_of(*touched) == state_of(*dense)]}
