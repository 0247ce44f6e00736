"""A plan for one budget beside the plans of the most thorough search for all budgets, budget by budget.

GPTs of three depths and models of ``transformers`` at tiny sizes, forward and backward or a whole step, and computation
graphs that Kusumoto et al. published; seconds by the roofline of an A100, so that the problems are the same on every
machine. Points are per cent of the program's own seconds: how many more recomputed than in the thorough search's plan,
on average and at most, and how many more than at a smaller budget. Less than in that search's counts as negative.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt
from graphopt.analysis.costs.cost import costs_of
from graphopt.planning import Problem
from graphopt.planning.frontier import Frontier
from graphopt.planning.planner import find_frontier
from graphopt.planning.search.refinement import Refinement
from graphopt.planning.simulation.schedule import Scheduler
from graphopt.rewriting.memory.recompute.planning_problem import planning_problem

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.planning_graphs import published_problem
from tests.support.zoo import ZOO, own_loss

models = example_models()

COST = "a100-80gb"


def of_program(program: graphopt.Program) -> Problem:
    """What there is to plan in a program."""
    return planning_problem(program, costs_of(program.memory(measure=False), COST).seconds).problem


def gpt(layers: int, width: int, *, step: bool) -> Problem:
    """Forward and backward of a GPT with its loss, or its whole step with AdamW."""
    torch.manual_seed(0)
    config = models.GPTConfig(vocab=128, context=64, d=width, layers=layers, heads=2)
    model, batch = models.GPT(config), tuple(torch.randint(config.vocab, (2, 8, config.context)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if step else None
    return of_program(graphopt.capture(model, batch, loss=models.next_token_loss, optimizer=optimizer))


def tiny(name: str) -> Problem:
    """Forward and backward of a model of ``transformers``, of 32 rows."""
    model, batches = ZOO[name].build(1)
    rows = {key: tensor.repeat(16, *[1] * (tensor.dim() - 1)) for key, tensor in batches[0].items()}
    return of_program(graphopt.capture(model, (rows,), loss=own_loss))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "GPT, 2 layers of 64": lambda: gpt(2, 64, step=False),
    "GPT, 2 layers of 64, step": lambda: gpt(2, 64, step=True),
    "GPT, 12 layers of 128": lambda: gpt(12, 128, step=False),
    "GPT, 12 layers of 128, step": lambda: gpt(12, 128, step=True),
    "GPT, 48 layers of 32": lambda: gpt(48, 32, step=False),
    **{name: lambda name=name: tiny(name) for name in ("BERT", "GPT-2", "Llama", "T5", "ViT")},  # type: ignore[misc]
    "GoogLeNet, as published": lambda: published_problem("googlenet"),
    "U-Net, as published": lambda: published_problem("unet"),
}


@dataclass(frozen=True)
class Compared:
    """One problem: percentages of its seconds recomputed, and seconds of searches."""

    operations: int
    more: list[float]
    """Than in the thorough search's plan, from the smallest budget on."""
    than_at_less: float
    seconds: list[float]
    thorough: float


def least_again(problem: Problem, frontier: Frontier, budget: int) -> float:
    """The fewest seconds recomputed within a budget, as ``FitMemory`` takes its plan."""
    near = [frontier.within(budget), *Refinement(Scheduler(problem), frontier).around(budget)]
    return min(point.again for point in near if point is not None and point.peak <= budget)


def compare(problem: Problem, count: int) -> Compared:
    """Plans for budgets in the middle of equal parts of the range from the lowest peak to the program's own."""
    started = time.process_time()
    every = find_frontier(problem)
    thorough = time.process_time() - started
    low, high = every.lowest.peak, Scheduler(problem).evaluate(frozenset()).peak
    again: list[float] = []
    more: list[float] = []
    seconds: list[float] = []
    for number in range(count):
        budget = low + (high - low) * (2 * number + 1) // (2 * count)
        started = time.process_time()
        frontier = find_frontier(problem, budget=budget)
        seconds.append(time.process_time() - started)
        if frontier.within(budget) is None:  # FitMemory searches for all budgets then
            frontier, seconds[-1] = every, seconds[-1] + thorough
        again.append(100 * least_again(problem, frontier, budget) / problem.seconds)
        more.append(again[-1] - 100 * least_again(problem, every, budget) / problem.seconds)
    rises = [later - earlier for place, earlier in enumerate(again) for later in again[place:]]
    return Compared(len(problem.operations), more, max(rises), seconds, thorough)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--problems", nargs="+", choices=[*PROBLEMS], help="default: all; the first with --quick")
    options.add_argument("--budgets", type=int, help="how many of each problem (default: 16; 4 with --quick)")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    names = given.problems or ([*PROBLEMS][:1] if given.quick else [*PROBLEMS])
    results: dict[str, Any] = {}
    rows = []
    for name in names:
        found = compare(PROBLEMS[name](), given.budgets or (4 if given.quick else 16))
        results[name] = vars(found)
        mean, most = sum(found.more) / len(found.more), max(found.more)
        average, longest = sum(found.seconds) / len(found.seconds), max(found.seconds)
        points = (f"{mean:+.2f}", f"{most:+.2f}", f"{found.than_at_less:.2f}")
        rows.append(
            (name, str(found.operations), *points, f"{average:.2f} s", f"{longest:.2f} s", f"{found.thorough:.1f} s")
        )
    headings = ("", "ops", "points more", "at most", "than at less", "search", "at most", "thorough")
    show({"results": results}, [make_table("A plan for one budget beside all", headings, rows)], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
