"""What a call costs where the kernels cost nothing: 20 tiny layers in eager mode, with graphopt and with torch.compile.

All ways take turns, and CPU time is counted, so that other work on the machine matters little. What ranks spend on
knowing that all of them run the same program is mostly waiting, and is measured on the clock: steps with and without it
take turns.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import make_table, paired_ratio, parser, show
from torch import nn
from torch.multiprocessing import spawn

import graphopt
from graphopt.passes import DataParallel
from graphopt.runtime.ranks.agreement import Agreement, Round

CALLS = 40
"""How many calls are timed at once."""

LAYERS = 20

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "AdamW(fused=True)": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "SGD(foreach=True)": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, foreach=True),
}


def tiny() -> nn.Module:
    """Layers of 8 features, each behind a ReLU."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(LAYERS)))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(model(x), y)


def whole_steps(name: str, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Forward, loss, backward and update, in eager mode and as one program."""
    model, other = tiny(), tiny()
    optimizer = OPTIMIZERS[name](model.parameters())
    step = graphopt.optimize_step(other, OPTIMIZERS[name](other.parameters()), loss=loss_of)

    def eager() -> None:
        loss_of(model, *batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {f"{name}, eager": eager, f"{name}, optimize_step": lambda: step(*batch)}


def drop_ins(batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Forward, loss and backward, with the loop as it is."""

    def training(model: nn.Module) -> Callable[[], None]:
        parameters = list(model.parameters())

        def run() -> None:
            loss_of(model, *batch).backward()
            for parameter in parameters:
                parameter.grad = None

        return run

    compiled: Any = torch.compile(tiny(), backend="aot_eager")
    return {
        "forward and backward, eager": training(tiny()),
        "forward and backward, optimize": training(graphopt.optimize(tiny())),
        "forward and backward, aot_eager": training(compiled),
    }


def microseconds(ways: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, Any]]:
    """For each way the median of its CPU time per call, and its ratio to the first one's in the same round."""
    for action in ways.values():
        for _ in range(3):
            action()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, action in ways.items():
            started = time.process_time_ns()
            for _ in range(CALLS):
                action()
            found[name].append((time.process_time_ns() - started) / CALLS / 1e3)
    reference = next(iter(found.values()))
    return [
        {"way": name, "cpu_us": statistics.median(times), "ratio": paired_ratio(times, reference)}
        for name, times in found.items()
    ]


def agreement(rank: int, world: int, store: str, rounds: int, found: Any) -> None:
    """Microseconds of a step of one of several ranks with what they say before it, and without, by turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = tiny()
    optimizer = OPTIMIZERS["AdamW(fused=True)"](model.parameters())
    step = graphopt.optimize_step(model, optimizer, [DataParallel()], loss=loss_of)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    agreeing, times = step._runner.agreement, dict[str, list[float]](asked=[], alone=[])
    silent = Agreement()
    for number in range(2 * rounds + 2):
        name = ("asked", "alone")[number % 2]
        step._runner.agreement = agreeing if name == "asked" else silent
        silent.begin = lambda plan, **_: Round((), plan)  # type: ignore[method-assign]
        step(*batch)
        dist.barrier()
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            step(*batch)
        if number >= 2:
            times[name].append((time.perf_counter_ns() - started) / CALLS / 1e3)
    if rank == 0:
        found.update(times)
    dist.barrier()
    dist.destroy_process_group()


def between_ranks(worlds: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """For each number of ranks the medians of what ``agreement`` finds on the first one."""
    rows = []
    for world in worlds:
        with multiprocessing.Manager() as manager, tempfile.TemporaryDirectory() as folder:
            found = manager.dict()
            spawn(agreement, (world, f"{folder}/store", rounds, found), nprocs=world)
            asked, alone = found["asked"], found["alone"]
        cost = statistics.median(mine - other for mine, other in zip(asked, alone, strict=True))
        rows.append({"ranks": world, "step_us": statistics.median(alone), "agreement_us": cost})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    rounds = 3 if given.quick else 31
    batch = torch.randn(4, 8), torch.randn(4, 8)
    ways = [*(whole_steps(name, batch) for name in OPTIMIZERS), drop_ins(batch)]
    results = [row for group in ways for row in microseconds(group, rounds)]
    rows = [(row["way"], f"{row['cpu_us']:.0f} us", f"x{row['ratio']:.3f}") for row in results]
    table = make_table(f"A call of {LAYERS} tiny layers", ("", "CPU time", "of eager"), rows)
    ranks = between_ranks((2,) if given.quick else (2, 4), rounds)
    columns = ("ranks", "step without it", "that all run the same")
    rows = [(str(row["ranks"]), f"{row['step_us']:.0f} us", f"{row['agreement_us']:.0f} us") for row in ranks]
    other = make_table("A step of the same layers with data-parallel over gloo, on the clock", columns, rows)
    show({"results": results, "ranks": ranks}, [table, other], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
