"""Training the same model on the same batches in several ways, and showing them side by side."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import graphopt

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

MEASURED = 1
"""The step whose memory is measured: the first one makes the optimizer's state, which the later ones find there."""

FEWEST_STEPS = MEASURED + 2
"""One step to warm up, one that is measured, at least one that is timed."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        name: for the table.
        captured: whether graphopt runs the step.
        passes: with which passes.
        exact: whether results have to equal the first way's to the last bit.
    """

    name: str
    captured: bool
    passes: Sequence[graphopt.Pass] = ()
    exact: bool = True


@dataclass(frozen=True)
class Run:
    """What one way of training gave.

    Attributes:
        way: how it was trained.
        losses: the loss of every step.
        state: everything that training changes, by name: parameters, buffers, the optimizer's state, the generator.
        predicted_bytes: the peak of a step above persistent memory, as the program predicts it; None for eager PyTorch.
        measured_bytes: the same, as the allocator reports it.
        step_seconds: the median over the steps that were not measured.
        capture_seconds: capture, passes, verification and code generation; 0 for eager PyTorch.
        program: the rewritten program; None for eager PyTorch.
        step: what ran it; None for eager PyTorch.
    """

    way: Way
    losses: list[torch.Tensor]
    state: dict[str, torch.Tensor]
    predicted_bytes: int | None
    measured_bytes: int
    step_seconds: float
    capture_seconds: float
    program: graphopt.Program | None
    step: graphopt.TrainStep | None


def argument_parser(description: str | None, *, steps: int, out: Path) -> argparse.ArgumentParser:
    """A parser with the options of every comparison, whose defaults are given; those of the model are to be added."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=_enough_steps, default=steps, help="training steps each way")
    parser.add_argument("--seed", type=int, default=0, help="of everything random: weights, batches, dropout")
    parser.add_argument("--out", type=Path, default=out, help="folder for the rewritten program")
    return parser


def _enough_steps(text: str) -> int:
    if not text.isdecimal() or int(text) < FEWEST_STEPS:
        raise argparse.ArgumentTypeError(
            f"take at least {FEWEST_STEPS}, not {text!r}: one step warms up, one is measured, the others are timed"
        )
    return int(text)


def progress_bar(console: Console) -> Progress:
    """A bar of steps for each way of training."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> Step:
    """The training step that everyone writes."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss(model, x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def train(way: Way, build: Build, loss: Loss, batches: Sequence[Batch], *, seed: int, progress: Progress) -> Run:
    """Train a new model, one step for each batch."""
    if len(batches) < FEWEST_STEPS:
        raise ValueError(f"{len(batches)} steps are too few to measure and time: take at least {FEWEST_STEPS}")
    torch.manual_seed(seed)
    model, optimizer = build()
    task = progress.add_task(way.name, total=len(batches))
    program, captured, started = None, None, time.perf_counter()
    if way.captured:
        captured = graphopt.optimize_step(model, optimizer, way.passes, loss=loss).prepare(*batches[0])
        step: Step = captured
        program = captured.program
    else:
        step = eager_step(model, optimizer, loss)
    capture_seconds = time.perf_counter() - started
    losses, seconds, measured = [], [], 0
    for number, (x, y) in enumerate(batches):
        if number == MEASURED:
            peak = graphopt.measure_peak(lambda x=x, y=y: step(x, y))
            losses.append(peak.result)
            measured = peak.allocated_peak_bytes
        else:
            started = time.perf_counter()
            losses.append(step(x, y))
            seconds.append(time.perf_counter() - started)
        progress.advance(task)
    return Run(
        way, losses, _state(model, optimizer), program.memory().allocated_peak_bytes if program else None, measured,
        statistics.median(seconds[1:]), capture_seconds if program else 0.0, program, captured,
    )  # fmt: skip


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    for index, values in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{key}": v.clone() for key, v in values.items() if isinstance(v, torch.Tensor)}
    return found | {"generator": torch.get_rng_state()}


def differences(reference: Run, other: Run) -> list[str]:
    """The names of all values of two runs that are not equal to the last bit: losses by step, then the final state."""
    first, second = ({f"loss {n}": v for n, v in enumerate(run.losses)} | run.state for run in (reference, other))
    return [
        name
        for name in dict.fromkeys([*first, *second])
        if name not in first or name not in second or not torch.equal(first[name], second[name])
    ]


def comparison_table(runs: Sequence[Run], title: str) -> Table:
    """One row for each run; the first is what the others are compared with."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("predicted\npeak", "measured\npeak", "\nratio", "step\ntime", "\nratio", "last\nloss"):
        table.add_column(heading, justify="right", no_wrap=True)
    first = runs[0]
    for run in runs:
        table.add_row(
            run.way.name,
            "–" if run.predicted_bytes is None else f"{run.predicted_bytes / 1e6:.3f} MB",
            f"{run.measured_bytes / 1e6:.3f} MB",
            f"×{run.measured_bytes / first.measured_bytes:.2f}",
            f"{run.step_seconds * 1e3:.0f} ms",
            f"×{run.step_seconds / first.step_seconds:.2f}",
            f"{run.losses[-1].item():.6f}",
        )
    return table


def report(console: Console, runs: Sequence[Run], title: str) -> bool:
    """Print the table, and what differs from the first run; returns whether everything is equal to the last bit."""
    console.print()
    console.print(comparison_table(runs, title))
    console.print("A peak counts bytes above parameters, optimizer state and the batch; step time is the median.")
    spent = ", ".join(f"{run.capture_seconds:.1f} s" for run in runs if run.program)
    console.print(f"Capture, passes, verification and code generation took {spent}, once.")
    same = True
    for run in [run for run in runs[1:] if run.way.exact]:
        wrong = differences(runs[0], run)
        same = same and not wrong
        if wrong:
            shown = ", ".join(wrong[:5])
            console.print(f"{run.way.name}: {len(wrong)} values differ from {runs[0].way.name}: {shown}", style="red")
    others = [run for run in runs[1:] if not run.way.exact]
    if same:
        console.print(
            f"After {len(runs[0].losses)} steps all losses, and all {len(runs[0].state)} tensors of the model, of the "
            "optimizer's state and of the random generator's, are equal to the last bit"
            + ("." if not others else f"; {' and '.join(repr(run.way.name) for run in others)} rounds.")
        )
    return same


def compare(
    console: Console, ways: Sequence[Way], build: Build, loss: Loss, batches: Sequence[Batch], *, seed: int, title: str
) -> tuple[list[Run], bool]:
    """Train in every way and print the report; returns the runs, and whether all are equal to the last bit."""
    with progress_bar(console) as progress:
        runs = [train(way, build, loss, batches, seed=seed, progress=progress) for way in ways]
    return runs, report(console, runs, title)


def show_program(console: Console, run: Run, folder: Path) -> None:
    """Write the program of a run into ``folder``, and say how to open it.

    Raises:
        ValueError: for a run without graphopt.
    """
    if run.program is None:
        raise ValueError(f"{run.way.name} has no program to show: give a run of a way with captured=True")
    say_how_to_open(console, write_dump(run.program, folder))


def write_dump(program: graphopt.Program, folder: Path) -> list[Path]:
    """Write a program as a picture, as text and as JSON into ``folder``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "step.svg": program.to_svg(),
        "step.txt": program.to_text(),
        "step.json": json.dumps(program.to_json()),
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [folder / name for name in contents]


def say_how_to_open(console: Console, files: Sequence[Path]) -> None:
    """Name the files that ``write_dump`` wrote, and what opens each."""
    picture, text, data = (str(path) for path in files)
    console.print("The rewritten program:")
    console.print(f"  {picture}  the picture: open it in a web browser", soft_wrap=True)
    console.print(f"  {text}  every call with its type, phase and origin: open it in an editor", soft_wrap=True)
    console.print(f"  {data}  for programs: graphopt.Program.from_json(json.load(open(...)))", soft_wrap=True)
