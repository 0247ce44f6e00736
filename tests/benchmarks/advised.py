"""The pipeline that ``graphopt.advise`` chooses beside the best of a grid of all, model by machine by network.

The grid has every precision, way to exchange gradients and way to take less memory, each without a plan and with plans
that may recompute, move activations to the host, and move the optimizer's state. Every cell is rewritten and simulated
as it would run; only what fits counts. The memory of each machine is a share of what data parallel training takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import example_models, make_table, parser, show
from torch import nn

from graphopt.analysis.costs.profiles import device_profile
from graphopt.capture.devices.for_device import without_data_for
from graphopt.ir.context import Context
from graphopt.rewriting.distributed.prediction.link import parse_bandwidth
from graphopt.rewriting.pass_ import Numerics
from graphopt.runtime.advice.candidate_pipelines import candidates, with_less_memory, within_budget
from graphopt.runtime.advice.choose_passes import advise_session
from graphopt.runtime.advice.evaluation import Evaluated, Evaluator, SharedCapture
from graphopt.runtime.advice.machine import Machine

models = example_models()


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that needs no targets."""
    return model(x).square().mean()  # type: ignore[no-any-return]


def gpt(layers: int, width: int) -> tuple[nn.Module, tuple[Any, ...], Callable[..., Any]]:
    """A GPT with its loss, on 16 rows of 256 tokens."""
    config = models.GPTConfig(vocab=4096, context=256, d=width, layers=layers, heads=width // 64)
    tokens = torch.randint(config.vocab, (16, config.context))
    return models.GPT(config), (tokens, tokens), models.next_token_loss


def encoder() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Any]]:
    """Layers of attention with wide MLPs."""
    layer = nn.TransformerEncoderLayer(512, 8, 4096, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 4), (torch.zeros(16, 256, 512),), square


def perceptron() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Any]]:
    """Wide layers and few rows: memory is state, and a step is mostly its exchange."""
    layers = [module for _ in range(6) for module in (nn.Linear(4096, 4096), nn.GELU())]
    return nn.Sequential(*layers), (torch.zeros(256, 4096),), square


@dataclass(frozen=True)
class Case:
    """One model on one machine."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple[Any, ...], Callable[..., Any]]]
    device: str
    devices: int
    network: str
    share: float
    numerics: Numerics = "bitwise"


CASES = (
    Case("GPT, 4 layers of 512", lambda: gpt(4, 512), "a100-80gb", 1, "", 0.6),
    Case("GPT, 8 layers of 256", lambda: gpt(8, 256), "h100-80gb", 8, "", 0.7, "tolerant"),
    Case("GPT, 4 layers of 512", lambda: gpt(4, 512), "h100-80gb", 16, "400Gbit", 0.6),
    Case("GPT, 4 layers of 512", lambda: gpt(4, 512), "a100-80gb", 16, "10Gbit", 0.8, "changes"),
    Case("encoder, 4 layers of 512", encoder, "h100-80gb", 16, "100Gbit", 0.7),
    Case("encoder, 4 layers of 512", encoder, "rtx-4090", 4, "10Gbit", 0.8, "tolerant"),
    Case("perceptron, 6 of 4096", perceptron, "h100-80gb", 8, "", 0.6),
    Case("perceptron, 6 of 4096", perceptron, "a100-80gb", 16, "25Gbit", 0.5, "changes"),
)
ALLOWED = ("recompute", "recompute,offload", "recompute,offload,state")


def grid(evaluate: Evaluator, machine: Machine, numerics: Numerics) -> Iterator[Evaluated]:
    """Every pipeline, with and without a plan; what fits, and gathers no parameters, is the same with one."""
    for plain in candidates(machine.devices, machine.hosts, numerics, "AdamW"):
        for one in (plain, *with_less_memory(plain, numerics)):
            yield (found := evaluate(one))
            if not found.fits or one.gathers:
                yield from (evaluate(within_budget(one, machine.budget, allowed)) for allowed in ALLOWED)


def row(case: Case) -> list[str]:
    """The choice and the best of the grid."""
    torch.manual_seed(0)
    model, batch, loss = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    profile = device_profile(case.device)
    if case.network:
        profile = replace(profile, network_bandwidth=parse_bandwidth(case.network))
    twins = without_data_for(profile, model, optimizer, batch, {})
    session = SharedCapture(twins.model, twins.args, twins.kwargs, loss=loss, optimizer=twins.optimizer)
    machine = Machine.of(case.devices, profile, None, model)
    evaluate = Evaluator(session, "step", Context(device=profile), "measured", case.devices, machine.budget)
    plain = candidates(machine.devices, machine.hosts, "bitwise", "AdamW")[0]
    with machine.ranks():
        machine = replace(machine, budget=int(case.share * evaluate(plain).taken))
    began = time.process_time()
    advice = advise_session(session, machine, case.numerics)
    took = time.process_time() - began
    evaluate = replace(evaluate, budget=machine.budget)
    with machine.ranks():
        cells = list(grid(evaluate, machine, case.numerics))
    fitting = [one for one in cells if one.fits]
    assert advice.chosen.fits
    best = min(one.seconds for one in fitting)
    return [
        case.name,
        f"{case.devices} x {case.device}{case.network and f', {case.network}'}",
        case.numerics,
        f"{case.share:.0%}",
        f"`{advice.pipeline}`",
        f"x{advice.step.seconds / best:.3f}",
        f"{len(fitting)} of {len(cells)}",
        f"{took:.0f} s",
    ]


def main() -> None:
    """Print the table."""
    options = parser(__doc__).parse_args()
    head = ["model", "machine", "numerics", "memory", "choice", "step over the grid's best", "cells that fit", "took"]
    rows = []
    for case in CASES[:1] if options.quick else CASES:
        rows.append(row(case))
        print(rows[-1], file=sys.stderr, flush=True)
    result = {"rows": [dict(zip(head, found, strict=True)) for found in rows]}
    show(result, [make_table("chosen passes", head, rows)], as_json=options.json)


if __name__ == "__main__":
    main()
