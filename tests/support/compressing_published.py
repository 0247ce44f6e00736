"""DeepGradientCompression in several processes beside a plain implementation of the published algorithm, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from graphopt import Pass
from graphopt.passes import DeepGradientCompression
from graphopt.runtime.step.train_step import TrainStep
from tests.support.compressing import (
    F64,
    NAME,
    RAMP,
    Found,
    batch,
    build,
    calls,
    flat,
    furthest,
    gathered,
    held,
    loss,
    made,
    sgd,
    touching_entries,
)  # fmt: skip

LR = 0.1


class Published:
    """All ranks at once, each tensor densely stored; the batch of every rank is known here."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.model, self.world = model, dist.get_world_size()
        plain = {"momentum": 0.9, "nesterov": False, "masking": True, "weight_decay": 0.0, "clip_norm": None}
        self.options: dict[str, Any] = {**plain, **options}
        self.u, self.v = self._zeros(), self._zeros()

    def _zeros(self) -> list[dict[str, torch.Tensor]]:
        named = dict(self.model.named_parameters())
        return [{name: torch.zeros(p.numel(), dtype=F64) for name, p in named.items()} for _ in range(self.world)]

    def step(self, number: int, sparsity: float) -> None:
        parameters = dict(self.model.named_parameters())
        gradients = [
            torch.autograd.grad(loss(self.model, *batch(number, F64, rank)), list(parameters.values()))
            for rank in range(self.world)
        ]
        for (name, p), parts in zip(parameters.items(), zip(*gradients, strict=True), strict=True):
            flattened = [part.flatten() for part in parts]
            few = not sparsity or p.numel() < RAMP["min_elements"]
            change = self._dense(name, p, flattened) if few else self._sparse(name, p, flattened, sparsity)
            with torch.no_grad():
                p.sub_(LR * change.view_as(p))

    def _direction(self, u: dict[str, torch.Tensor], name: str, g: torch.Tensor) -> torch.Tensor:
        """By momentum; with Nesterov's form a step ahead."""
        nesterov, m = self.options["nesterov"], self.options["momentum"]
        u[name] = m * (u[name] + g) if nesterov else m * u[name] + g
        return g + u[name] if nesterov else u[name]

    def _dense(self, name: str, p: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        g = torch.stack(parts).sum(0) / self.world + self.options["weight_decay"] * p.detach().flatten()
        first, *_ = [self._direction(u, name, g) for u in self.u]  # alike on all
        return first

    def _sparse(self, name: str, p: torch.Tensor, parts: list[torch.Tensor], sparsity: float) -> torch.Tensor:
        limit, total = self.options["clip_norm"], torch.zeros(p.numel(), dtype=F64)
        for u, v, part in zip(self.u, self.v, parts, strict=True):
            clipped = part if limit is None else part * min(1.0, limit * self.world**-0.5 / (part.norm().item() + 1e-6))
            g = clipped + self.options["weight_decay"] * p.detach().flatten()
            v[name] = v[name] + self._direction(u, name, g)
            count = max(1, int(p.numel() * (1 - sparsity) + 1e-6))
            sent = v[name].abs().sort(descending=True, stable=True).indices[:count]
            total[sent] += v[name][sent]
            v[name][sent] = 0.0
            if self.options["masking"]:
                u[name][sent] = 0.0
        return total / self.world


def run(
    model: nn.Module,
    steps: int,
    *passes: Pass,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model, lr=LR),
) -> TrainStep:
    step = made(model, optimizer(model), *passes)
    for number in range(steps):
        step(*batch(number, F64))
    return step


CASES: dict[str, dict[str, Any]] = {
    "masking": {"clip_norm": 0.3, "weight_decay": 0.01},
    "no masking": {"masking": False, "nesterov": True},
}


def published(name: str) -> Found:
    """How far parameters and residuals are from the reference, with dense sums and with updates of entries alone."""
    options, theirs, said = CASES[name], build(F64), {}
    reference = Published(theirs, options)
    for number in range(12):
        reference.step(number, 0.0 if number < 1 else 0.9 if number < 3 else 0.98)
    expected = reference.v[dist.get_rank()]["first.weight"]

    def tried() -> tuple[TrainStep, list[float]]:
        ours = build(F64)
        step = run(ours, 12, DeepGradientCompression(**options, **RAMP))
        residual = held(step, "residual/first.weight").popitem()[1]
        return step, [furthest(flat(ours), flat(theirs)), furthest(residual, expected)]

    said[f"published, {name}"] = tried()[1]
    with touching_entries():
        step, said[f"published, entries, {name}"] = tried()
        assert any("sum_entries" in call for call in calls(step))
    return said


KEPT: dict[str, dict[str, Any]] = {
    "momentum": {"masking": False},
    "nesterov, float16 wire": {"masking": False, "nesterov": True, "wire": "float16"},
    "feedback, bfloat16 wire": {"correction": "feedback", "wire": "bfloat16"},
}
WEIGHTS = ("first.weight", "second.weight", "last.weight")


def conserved(name: str) -> Found:
    """A rank's velocities against parameters and residuals: what is added to these is sent or kept."""
    options, model = KEPT[name], build(F64)
    always = DeepGradientCompression(sparsity=(0.9,), rampup_step=1, min_elements=1, **options)
    step = made(model, sgd(model, lr=LR), always)
    u, added = torch.zeros(3, 1024, dtype=F64), torch.zeros(3, 1024, dtype=F64)
    for number in range(20):
        found = torch.autograd.grad(loss(model, *batch(number, F64)), [model.get_parameter(name) for name in WEIGHTS])
        g = torch.stack([nn.functional.pad(part.flatten(), (0, 1024 - part.numel())) for part in found])
        if "correction" in options:
            added += g
        elif "nesterov" in options:
            u = (u + g) * 0.9
            added += u + g
        else:
            u = u * 0.9 + g
            added += u
        step(*batch(number, F64))
    residuals, worst = held(step, "residual"), 0.0
    for row, weight in zip(added, WEIGHTS, strict=True):
        v = residuals[f"{NAME}/residual/{weight}"]
        moved = build(F64).get_parameter(weight).detach() - model.get_parameter(weight).detach()
        sent, kept = moved.flatten() * dist.get_world_size() / LR, torch.stack(gathered(v)).sum(0)
        total = torch.stack(gathered(row)).sum(0)[: v.numel()]
        worst = max(worst, furthest(total, sent + kept), 0.0 if kept.any() else 1.0)
    return {f"conserved, {name}": worst}


WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no masking": ({"masking": False, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
    "masking": ({}, {}),
}


def everything_sent(name: str) -> Found:
    """Without masking that is momentum SGD, with it plain SGD."""
    options, dense = WHOLE[name]
    ours, theirs = build(F64), build(F64)
    with mock.patch.object(DeepGradientCompression, "_reason", return_value=""):  # what would keep tensors dense
        run(ours, 20, DeepGradientCompression(sparsity=(1e-12,), rampup_step=1, min_elements=1, **options))
    run(theirs, 20, optimizer=lambda model: sgd(model, lr=LR, **dense))
    return {f"density 1, {name}": furthest(flat(ours), flat(theirs))}
