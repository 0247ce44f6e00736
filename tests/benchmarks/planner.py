"""The planner against published plans and against optimal ones.

The published ones are those of Kusumoto et al.'s approximate dynamic programme on four of their graphs, simulated with
every value freed after its last use: once with the lowest peak that it finds over all its budgets, and once with the
fewest seconds at the smallest budget that it can keep. The optimal ones come from the integer program, for random
training-like graphs of 12 to 24 operations and random budgets; since ``plan`` asks the integer program itself for
graphs of this size, the search that larger ones depend on is compared alone. Last, deep programs: how the time to plan
grows with identical layers.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt
from graphopt.analysis.costs.cost import PROFILES, cost_report
from graphopt.planning import Plan, Problem, simulate
from graphopt.planning.planner import InfeasibleError, find_frontier, plan
from graphopt.planning.search.lower_bound import fewest_seconds_again
from graphopt.planning.search.milp import optimum, smallest_peak
from graphopt.planning.simulation.schedule import Scheduler
from graphopt.rewriting.memory.recompute.planning_problem import planning_problem

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.planning_graphs import PUBLISHED, PUBLISHED_PLANS, published_problem, seeded_problem

SMALL = ("googlenet", "unet")


def published(name: str) -> dict[str, Any]:
    """One published graph: the planner's plans at the peaks of the published ones, and its lowest peak."""
    problem = published_problem(name)
    forward = sum(operation.seconds for operation in problem.operations[: problem.boundary])
    started = time.perf_counter()
    frontier = find_frontier(problem)
    seconds = time.perf_counter() - started
    rows = []
    plain = Scheduler(problem).evaluate(frozenset())
    for theirs in PUBLISHED_PLANS[name]:
        point = frontier.within(theirs.peak)
        rows.append(
            {
                "budget": theirs.peak,
                "theirs_again": theirs.again,
                "again": None if point is None else point.again / forward,
                "at_least": fewest_seconds_again(problem, plain, theirs.peak) / forward,
            }
        )
    lowest = frontier.lowest
    return {
        "graph": name,
        "operations": len(problem.operations),
        "plain_peak": simulate(problem, Plan(tuple(range(len(problem.operations))))).peak,
        "plans": rows,
        "lowest_peak": lowest.peak,
        "lowest_again": lowest.again / forward,
        "seconds": seconds,
    }


@dataclass(frozen=True)
class Case:
    """A random graph with a budget: what was found against the optimum, in seconds of all steps.

    Attributes:
        seed: of the graph.
        budget: bytes.
        optimum: of the integer program.
        found: by the search alone; None for nothing.
        planned: by ``plan``; None for nothing.
        kept: whether both keep the budget.
        seconds: that the search took.
    """

    seed: int
    budget: int
    optimum: float
    found: float | None
    planned: float | None
    kept: bool
    seconds: float

    @property
    def ratio(self) -> float:
        return float("inf") if self.found is None else self.found / self.optimum


@contextmanager
def silent() -> Iterator[None]:
    """Nothing on the standard output meanwhile: the solver prints remarks there, past Python."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def small(seed: int) -> Case | None:
    """A random small graph with a random budget; None where nothing can lower its peak."""
    problem = seeded_problem(seed)
    plain = simulate(problem, Plan(tuple(range(len(problem.operations)))))
    with silent():
        least = smallest_peak(problem)
        if least == plain.peak:
            return None
    budget = random.Random(seed).randint(least, plain.peak - 1)
    started = time.perf_counter()
    point = find_frontier(problem).within(budget)
    seconds = time.perf_counter() - started
    found = None if point is None else Scheduler(problem).evaluate(point.drops)
    try:
        with silent():
            planned = simulate(problem, plan(problem, budget).plan)
    except InfeasibleError:
        planned = None
    best = best_seconds(problem, budget, sweeps=1)
    if found is not None and found.seconds < best:  # in an order between two first runs that one sweep leaves out
        best = best_seconds(problem, budget, sweeps=2)
    kept = all(each is None or each.peak <= budget for each in (found, planned))
    took = [None if each is None else each.seconds for each in (found, planned)]
    return Case(seed, budget, best, took[0], took[1], kept, seconds)


def best_seconds(problem: Problem, budget: int, *, sweeps: int) -> float:
    """Seconds of the optimal plan within a budget that some plan keeps."""
    with silent():
        best = optimum(problem, budget, sweeps=sweeps)
    assert best is not None
    return simulate(problem, best).seconds


def summary(cases: Sequence[Case], trivial: int) -> dict[str, Any]:
    """How often plans are optimal, and how far off the others are."""
    found = [case for case in cases if case.found is not None]
    missed = [case for case in cases if case.ratio > 1 + 1e-9]
    return {
        "graphs": len(cases),
        "without_choice": trivial,
        "optimal": len(cases) - len(missed),
        "not_found": len(cases) - len(found),
        "below_the_optimum": sum(case.ratio < 1 - 1e-9 for case in cases),
        "worst_ratio": max((case.ratio for case in found), default=1.0),
        "mean_ratio": sum(case.ratio for case in found) / max(1, len(found)),
        "plan_optimal": sum(case.planned is not None and case.planned <= case.optimum + 1e-9 for case in cases),
        "budget_violated": sum(not case.kept for case in cases),
        "planner_seconds": sum(case.seconds for case in cases),
        "missed": [vars(case) for case in missed],
    }


def deep(layers: int) -> dict[str, Any]:
    """A GPT of so many layers by the roofline of an A100: the time to plan it, and two plans."""
    models = example_models()
    model = models.GPT(models.GPTConfig(vocab=2048, layers=layers))
    tokens = torch.zeros(8, 256, dtype=torch.long)
    program = graphopt.capture(model, (tokens, tokens), loss=models.next_token_loss)
    memory = program.memory()
    report = cost_report(memory.nodes, method="roofline", profile=PROFILES["a100-40gb"])
    problem = planning_problem(program, report.seconds).problem
    started = time.perf_counter()
    frontier = find_frontier(problem)
    seconds = time.perf_counter() - started
    plain = max(point.peak for point in frontier)
    shares = {}
    for share in (0.5, 0.25):
        point = frontier.within(int(plain * share))
        shares[str(share)] = None if point is None else point.again / problem.seconds
    return {
        "layers": layers,
        "nodes": len(program.graph.nodes),
        "operations": len(problem.operations),
        "seconds": seconds,
        "again": shares,
        "lowest": frontier.lowest.peak / plain,
    }


def tables(
    graphs: Sequence[dict[str, Any]], random_graphs: dict[str, Any], depths: Sequence[dict[str, Any]]
) -> list[Any]:
    """The figures for people."""
    rows = []
    for graph in graphs:
        for kind, row in zip(("lowest peak", "fewest seconds"), graph["plans"], strict=True):
            ours = "not found" if row["again"] is None else f"{row['again']:.1%}"
            lowest = f"{graph['lowest_peak'] / 1e9:.3f} at {graph['lowest_again']:.1%}"
            rows.append(
                (
                    f"{graph['graph']}, {kind}",
                    f"{row['budget'] / 1e9:.3f}",
                    f"{row['theirs_again']:.1%}",
                    ours,
                    f"{row['at_least']:.1%}",
                    lowest,
                    f"{graph['seconds']:.1f} s",
                )
            )
    grown = [
        (
            str(one["layers"]), f"{one['nodes']:,}", f"{one['operations']:,}", f"{one['seconds']:.1f} s",
            *("not found" if again is None else f"{again:.1%}" for again in one["again"].values()),
        )
        for one in depths
    ]  # fmt: skip
    headings = (
        "published plan",
        "peak, GB",
        "again, theirs",
        "again, ours",
        "any plan, at least",
        "our lowest peak",
        "search",
    )
    figures = [(key.replace("_", " "), f"{value:.4g}") for key, value in random_graphs.items() if key != "missed"]
    return [
        make_table("Forward seconds recomputed at the published peaks", headings, rows),
        make_table("Random graphs, against optima", ("", "figure"), figures),
        make_table("Deep programs", ("layers", "nodes", "operations", "search", "again at 50 %", "at 25 %"), grown),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--graphs", type=int, help="random graphs (default: 1000; 20 with --quick)")
    options.add_argument("--misses", type=Path, help="also write the cases that are not optimal to this file")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    graphs = [published(name) for name in (SMALL if given.quick else PUBLISHED)]
    cases = [small(seed) for seed in range(given.graphs or (20 if given.quick else 1000))]
    solved = [case for case in cases if case is not None]
    random_graphs = summary(solved, len(cases) - len(solved))
    if given.misses is not None:
        given.misses.write_text("".join(f"{case}\n" for case in random_graphs["missed"]))
    depths = [deep(layers) for layers in ((6, 12) if given.quick else (6, 12, 24, 48, 96))]
    result = {"published": graphs, "random": random_graphs, "deep": depths}
    show(result, tables(graphs, random_graphs, depths), as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
