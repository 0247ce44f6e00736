"""Optimizers that take whole matrices, with shards of all of them on each rank: what their tests run on ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import graphopt
from graphopt.passes import ClipGradients, DataParallel, FitMemory, MixedPrecision, OffloadState
from graphopt.passes.shard_optimizer import ShardOptimizer
from graphopt.passes.shard_parameters import ShardParameters
from graphopt.rewriting.pass_ import Pass


class Matrices(nn.Module):
    """Tall, square and wide ones; three of one shape, so that ranks get different numbers of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 25, bias=False), nn.Linear(25, 5, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(25, 25, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x) * factor


class Mixed(Matrices):
    """With biases and gains, which no optimizer of matrices takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(super().forward(x, factor)))


class Orthogonal(torch.optim.Optimizer):
    """The momenta of matrices made orthogonal by Newton and Schulz's iteration, and RMSprop for everything else."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        parameters = list(parameters)
        matrices = [parameter for parameter in parameters if parameter.ndim == 2]
        others = [parameter for parameter in parameters if parameter.ndim != 2]
        super().__init__([{"params": matrices, "whole": True}, {"params": others, "whole": False}], {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        matrices, others = self.param_groups
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.state[parameter]["average"] = torch.zeros_like(parameter)
        for parameter in matrices["params"]:
            average = self.state[parameter]["average"].lerp_(parameter.grad, 0.05)
            update = parameter.grad.lerp(average, 0.95)
            matrix = update / (update.norm() + 1e-7)
            for _ in range(3):
                matrix = 1.5 * matrix - 0.5 * (matrix @ matrix.T) @ matrix
            parameter.mul_(0.999).add_(matrix, alpha=-matrices["lr"])
        gradients = [parameter.grad for parameter in others["params"]]
        averages = [self.state[parameter]["average"] for parameter in others["params"]]
        torch._foreach_mul_(averages, 0.9)
        torch._foreach_addcmul_(averages, gradients, gradients, value=0.1)
        steps = torch._foreach_div(gradients, torch._foreach_add(torch._foreach_sqrt(averages), 1e-8))
        torch._foreach_add_(others["params"], steps, alpha=-0.01)


class Scaled(torch.optim.Optimizer):
    """Gradients of length one: what is read whole is the gradient itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class ByShape(torch.optim.Optimizer):
    """Another rule for matrices than for everything else, by what shape a parameter has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                parameter.sub_(gradient if parameter.ndim == 2 else gradient.sign(), alpha=group["lr"])


def square(model: nn.Module, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return model(x, factor).square().mean()


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.05)


class Run:
    """A model and its step on this rank's batches."""

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], *passes: Pass, bad: Sequence[int] = (), every: int = 1
    ) -> None:
        self.model = Matrices() if make in (muon, Scaled) else Mixed()
        self.optimizer = make(self.model.parameters())
        self.step = graphopt.optimize_step(
            self.model,
            self.optimizer,
            [DataParallel(bucket_mb=0.01), *passes],
            loss=square,
            verify=False,
        )
        self.step.accumulate(every)
        self.bad, self.done = bad, 0

    def __call__(self, steps: int) -> Run:
        for number in range(self.done, self.done + steps):
            self.step(*self.batch(number))
        self.done += steps
        return self

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
        factor = float("inf") if number in self.bad and dist.get_rank() else 1.0
        return torch.randn(8, 12, generator=generator), torch.tensor(factor)

    def parameters(self) -> list[torch.Tensor]:
        sharded = any(current.name == "shard-parameters" for current in self.step.pipeline.passes)
        with self.step.whole_parameters() if sharded else contextlib.nullcontext():
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    @property
    def elements(self) -> int:
        """Of the optimizer's state on this rank."""
        return sum(value.numel() for kept in self.optimizer.state.values() for value in kept.values())


SHARDED: tuple[Pass, ...] = (ShardOptimizer(), ShardParameters(min_bytes=0))

CASES: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[Pass, ...], dict[str, Any]]] = {
    "Muon": (muon, (), {}),
    "Muon, accumulated": (muon, (), {"every": 2}),
    "Muon, clipped": (muon, (ClipGradients(0.05),), {}),
    "Muon, a step skipped": (muon, (MixedPrecision(dtype="float16"),), {"bad": (0, 3)}),
    "Muon, state moved": (muon, (OffloadState(min_bytes=1),), {}),
    "two kinds of updates": (Orthogonal, (), {}),
    "two kinds, low precision": (Orthogonal, (MixedPrecision(level="O2"),), {}),
    "two kinds, within a budget": (Orthogonal, (FitMemory("100%"),), {}),
    "gradients by their norms": (Scaled, (), {}),
    "by the number of dimensions": (ByShape, (), {}),
}


def beside_whole(names: Sequence[str]) -> dict[str, list[float]]:
    """By the case: how far parameters are from those of DataParallel alone, for each way to shard."""
    found = {}
    for name in names:
        make, passes, options = CASES[name]
        expected = Run(make, *passes, **options)(6).parameters()
        runs = [Run(make, sharded, *passes, **options)(6).parameters() for sharded in SHARDED]
        found[name] = [
            max(float((one - other).abs().max()) for one, other in zip(run, expected, strict=True)) for run in runs
        ]
    return found


def of_torch() -> dict[str, list[str]]:
    """By the optimizer of ``torch.optim``: equal bits for both ways to shard, or the first line of an error."""
    found: dict[str, list[str]] = {}
    classes = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    for kind in classes:
        if issubclass(kind, torch.optim.Optimizer) and kind not in (torch.optim.Optimizer, torch.optim.SparseAdam):
            make = muon if kind is torch.optim.Muon else kind
            found[kind.__name__] = [_beside(make, sharded) for sharded in SHARDED]
    return found


def _beside(make: Callable[..., torch.optim.Optimizer], sharded: Pass) -> str:
    try:
        run = Run(make, sharded)(3)
    except graphopt.GraphoptError as error:
        return str(error).partition("\n")[0]
    same = all(map(torch.equal, run.parameters(), Run(make)(3).parameters()))
    return "equal" if same else "differs"


def resumed() -> list[bool]:
    """Whether a run that is saved and loaded goes on as the one that was not, for each way to shard."""
    found = []
    for sharded in SHARDED:
        first = Run(muon, sharded)(3)
        second = Run(muon, sharded)
        names = [name for name, _ in first.model.named_parameters()]
        second.model.load_state_dict(dict(zip(names, first.parameters(), strict=True)))
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        second.step.load_state_dict(first.step.state_dict())
        second.done = 3
        one, other = first(3).parameters(), second(3).parameters()
        found.append(all(map(torch.equal, one, other)))
    return found


def counted() -> list[int]:
    """Elements of state on this rank, products of matrices in the update, and the peak as predicted and as measured."""
    run = Run(muon, ShardOptimizer())(2)
    program = run.step.program
    products = [node for node in program.phase_nodes(graphopt.Phase.UPDATE) if "mm" in str(node.target)]
    given = run.batch(2)
    peaks = [graphopt.measure_peak(lambda: run.step(*given)).allocated_peak_bytes for _ in range(4)]
    measured = min(peaks)  # threads of an exchange may let go of what they sent a moment after it has arrived
    return [run.elements, len(products), program.memory().allocated_peak_bytes, measured]


def after_fully_shard(*optimizers: Callable[..., torch.optim.Optimizer]) -> list[bool]:
    """For each of these: whether a whole step after ``fully_shard`` trains as one process would."""
    found = []
    for make in optimizers:
        model, sharded = (Matrices() if make is muon else Mixed() for _ in range(2))
        for block in sharded.blocks:
            fully_shard(block)
        fully_shard(sharded)
        optimizer, own = make(model.parameters()), make(sharded.parameters())
        step = graphopt.optimize_step(sharded, own, loss=square)
        for number in range(4):
            generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
            given = torch.randn(8, 12, generator=generator), torch.tensor(1.0)
            square(model, *given).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())
            optimizer.step()
            optimizer.zero_grad()
            step(*given)
        whole = [parameter.full_tensor() for parameter in sharded.parameters()]
        state = [value for kept in own.state.values() for value in kept.values()]
        peaks = [graphopt.measure_peak(lambda: step(*given)).allocated_peak_bytes for _ in range(12)]  # noqa: B023
        found += [
            all(map(torch.equal, whole, model.parameters())),
            all(value.placements == parameter.placements for value, parameter in zip(state, own.state, strict=True)),
            min(peaks) == step.program.memory().allocated_peak_bytes,
        ]
    return found
