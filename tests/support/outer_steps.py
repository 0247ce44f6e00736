"""DiLoCo in a plain loop, as its papers have it, beside a step with the pass: what its tests run on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import checkpoint
from graphopt.ir.ops.storage.quantize import dequantize, quantize
from graphopt.passes import DataParallel, DiLoCo
from graphopt.rewriting.distributed.outer_step import fragments_of
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.training_pass import Clock

Batch = tuple[torch.Tensor, torch.Tensor]


def build(kind: str = "plain") -> nn.Module:
    torch.manual_seed(0)
    if kind == "images":
        first = nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Unflatten(2, (2, 2)), nn.Conv2d(2, 4, 2), nn.Flatten())
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4))
        return model.to(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    if kind == "frozen":
        model[2].requires_grad_(False)
    if kind == "tied":
        model[2].weight = nn.Parameter(torch.randn(16, 16) / 4)
        model.insert(3, nn.Linear(16, 16))
        model[3].weight = model[2].weight
    return model.to(torch.bfloat16 if kind == "bfloat16" else torch.float64 if kind == "float64" else torch.float32)


def batch(number: int, model: nn.Module) -> Batch:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    x = torch.randn(8, 8, generator=generator).to(next(model.parameters()).dtype)
    return x, torch.randint(4, (8,), generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y)


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


@dataclass
class Reference:
    """Training in a plain loop with the options of ``DiLoCo``; ``fragments`` are names, the pass's own."""

    options: DiLoCo
    fragments: Sequence[Sequence[str]]
    kind: str = "plain"
    done: int = 0
    residuals: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = build(self.kind)
        self.optimizer = inner(self.model)
        named = dict(self.model.named_parameters())
        self.own = [[named[name] for name in fragment] for fragment in self.fragments]
        self.common = [[p.detach().clone() for p in fragment] for fragment in self.own]
        momentum = self.options.outer_momentum
        self.outer = [
            torch.optim.SGD(common, lr=self.options.outer_lr, momentum=momentum, nesterov=momentum > 0)
            for common in self.common
        ]
        self.rounds = 0

    def step(self) -> torch.Tensor:
        loss = loss_of(self.model, *batch(self.done, self.model))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        interval = self.options.every // self.options.fragments
        turn, within = divmod(self.done - 1, interval)
        place = turn % len(self.own)
        if within + 1 == interval - self.options.delay:
            self.exchange(place)
        if within + 1 == interval:
            self.outer[place].step()
            for common, own in zip(self.common[place], self.own[place], strict=True):
                own.data.lerp_(common, self.options.mix) if self.options.mix < 1 else own.data.copy_(common)
        return loss.detach()

    @torch.no_grad()
    def exchange(self, place: int) -> None:
        differences = [common - own for common, own in zip(self.common[place], self.own[place], strict=True)]
        if self.options.bits < 16:
            means = self.mean_of_codes(place, differences)
        elif self.options.sparsity:
            means = [self.mean_of_largest(own, d) for own, d in zip(self.own[place], differences, strict=True)]
        else:
            means = [self.mean(difference) for difference in differences]
        for common, mean in zip(self.common[place], means, strict=True):
            common.grad = mean
        self.rounds += 1

    def mean(self, difference: torch.Tensor) -> torch.Tensor:
        wire = torch.bfloat16 if self.options.bits == 16 else difference.dtype
        sent = difference.to(wire) * (1.0 / dist.get_world_size())
        dist.all_reduce(sent)
        return sent.to(difference.dtype)

    def mean_of_codes(self, place: int, differences: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([difference.flatten() for difference in differences]).float()
        codes = quantize(flat, torch.tensor(self.rounds), place, self.options.bits, 256, False)
        total = torch.zeros_like(flat)
        for other in gathered(codes):
            total += dequantize(other, self.options.bits, 256, False, flat.shape, (1,), torch.float32)
        parts = (total * (1.0 / dist.get_world_size())).split([difference.numel() for difference in differences])
        pairs = zip(parts, differences, strict=True)
        return [part.to(difference.dtype).view_as(difference) for part, difference in pairs]

    def mean_of_largest(self, own: torch.Tensor, difference: torch.Tensor) -> torch.Tensor:
        """SparseLoCo, algorithm 1, with the largest entries of the whole tensor."""
        waiting = self.residuals.get(own, torch.zeros_like(difference).flatten())
        waiting = waiting * self.options.error_decay + difference.flatten()
        largest = waiting.abs().topk(max(1, int(waiting.numel() * (1 - self.options.sparsity) + 1e-6))).indices
        sent = torch.zeros_like(waiting)
        sent[largest] = waiting[largest]
        if self.options.bits == 16:
            sent = sent.bfloat16().to(sent.dtype)
        self.residuals[own] = waiting - sent
        total = torch.zeros_like(sent)
        for other in gathered(sent):
            total += other * (1.0 / dist.get_world_size())
        return total.view_as(difference)


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found


def step_with(options: DiLoCo, kind: str = "plain", *more: Pass, **given: Any) -> tuple[nn.Module, Any]:
    """A model, and its step with the pass."""
    model = build(kind)
    return model, graphopt.optimize_step(
        model, inner(model), [DataParallel(buffers="local"), options, *more], loss=loss_of, **given
    )


def beside_reference(options: Mapping[str, Any], kind: str, steps: int) -> list[int]:
    """The numbers of the steps behind which loss or parameters are not those of the plain loop."""
    pass_ = DiLoCo(**options)
    trained = [(name, p.nbytes) for name, p in build(kind).named_parameters() if p.requires_grad]
    fragments = fragments_of(trained, pass_.fragments)
    reference, (model, step) = Reference(pass_, fragments, kind), step_with(pass_, kind)
    wrong = []
    for number in range(steps):
        loss, expected = step(*batch(number, model)), reference.step()
        pairs = [(loss, expected), *zip(model.parameters(), reference.model.parameters(), strict=True)]
        if not all(torch.equal(one, other) for one, other in pairs):
            wrong.append(number)
    step.state_dict()  # waits for what is under way
    return wrong


def peaks(options: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """By what a call does, after two rounds: its peak as predicted and as measured.

    Threads of an exchange may let go of what they sent a moment after it has arrived: the least of four runs counts.
    """
    pass_ = DiLoCo(**options)
    model, step = step_with(pass_)
    for number in range(2 * pass_.every):
        step(*batch(number, model))
    found: dict[str, tuple[int, int]] = {}
    for number in range(2 * pass_.every, 6 * pass_.every):
        given = batch(number, model)
        measured = graphopt.measure_peak(lambda given=given: step(*given)).allocated_peak_bytes
        form = pass_.form(Clock(number))
        program = step.programs["update" + (f", diloco: {form}" if form else "")]
        least = min(measured, found.get(form, (0, measured))[1])
        found[form] = program.memory().allocated_peak_bytes, least
    step.state_dict()
    return found


def resumed(options: Mapping[str, Any], at: int, steps: int, folder: Path) -> bool:
    """Whether training that goes on from what a step has saved, while an exchange is under way, is the same."""
    pass_ = DiLoCo(**options)
    model, step = step_with(pass_)
    for number in range(at):
        step(*batch(number, model))
    checkpoint.save(folder, {"step": step})
    other, later = step_with(pass_)
    checkpoint.load(folder, {"step": later})
    for number in range(at, steps):
        step(*batch(number, model))
        later(*batch(number, model))
    for one in (step, later):
        one.state_dict()
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def synchronized(options: Mapping[str, Any], steps: int) -> list[bool]:
    """Whether ranks differ before ``synchronize``, have the mean behind it, and train as before from there on."""
    pass_ = DiLoCo(**options)
    (model, step), (other, alone) = step_with(pass_), step_with(pass_)
    for number in range(steps):
        step(*batch(number, model))
        alone(*batch(number, other))
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = torch.stack(gathered(own)).mean(0)
    step.synchronize()
    found = torch.cat([p.detach().flatten() for p in model.parameters()])
    differed = not all(torch.equal(own, rank) for rank in gathered(own))
    alike = all(torch.equal(found, rank) for rank in gathered(found))
    for one in (step, alone):
        one.state_dict()
    return [differed, alike, torch.allclose(found, mean, atol=1e-6)]
