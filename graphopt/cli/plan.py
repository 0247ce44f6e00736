"""``graphopt plan``: what fits into how many bytes, at what cost in time, and the plan for each budget.

With ``--world-size`` it plans the exchange of gradients instead; see ``graphopt.cli.exchange``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphopt.analysis.costs.cost import COSTS, PROFILES, CostReport, costs_of, remeasure
from graphopt.cli.exchange import exchange_arguments, exchange_plan, exchange_problem
from graphopt.cli.output import (
    check_output,
    format_of,
    output_arguments,
    report_passes,
    two_formats,
    write_output,
)
from graphopt.cli.programs import passes_argument, pipeline_of, rewritten_program, stage_argument, target_argument
from graphopt.errors import GraphoptError
from graphopt.ir.ops.values import format_bytes
from graphopt.ir.program import Program
from graphopt.ir.timeline import MemoryTimeline
from graphopt.planning.frontier import Frontier
from graphopt.report.console import terminal
from graphopt.report.console.progress_bar import progress_bar
from graphopt.report.pictures.frontier_chart import BudgetMark, frontier_svg
from graphopt.report.text.frontier_table import FrontierPoint, FrontierReport, fitted_point, frontier_report
from graphopt.rewriting.memory.budget import budget_bytes, check_budget, infeasible, within_already
from graphopt.rewriting.memory.fit import Fitted, Fitting, FittingOptions
from graphopt.rewriting.memory.summary import away_lines, decisions, plan_lines, summary_lines
from graphopt.rewriting.memory.transfer_insertion import host_lanes
from graphopt.rewriting.pipeline import Pipeline

__all__ = ["plan", "plan_arguments"]

_FITTER = "fit-memory"
"""The pass whose work this command shows; it is left out of the passes."""

_EPILOG = """\
The passes of --passes run first; what is planned is the program that they leave. Plans are what the pass fit-memory
would do. Nothing of the user's is trained or changed. Ctrl-C during the search shows the best plans found until then.

With --world-size the exchange of gradients is planned, not memory; --budget and --world-size are asked one at a time.
Its seconds are those of this device with --cost measured; the network is not measured, but as --bandwidth and --latency
describe it.

examples:
  graphopt plan examples/train_gpt.py:factory --budget 200MB --budget 60%
  graphopt plan examples/train_gpt.py:factory --budget 60% --format svg -o frontier.svg
  graphopt plan examples/train_gpt.py:factory --world-size 64 --bandwidth 1Gbit
"""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a budget gets.

    Attributes:
        text: how the user wrote the budget.
        budget: in bytes.
        fitted: the plan; None where the program fits as it is, and where nothing fits.
        reason: why there is no plan, where the program fits as it is.
        error: where nothing fits.
    """

    text: str
    budget: int
    fitted: Fitted | None = None
    reason: str = ""
    error: GraphoptError | None = None


_BUDGET_HELP = (
    "a peak to meet: bytes, 8GB, 512MiB, 60%% of the peak of the program as it is, or auto for what is free; again "
    "for several (default: the trade between bytes and time only)"
)
_COST_HELP = (
    "where the seconds of calls come from: measured here and kept (default), this device's roofline, or another's: "
    + ", ".join(COSTS)
)
_REMEASURE_HELP = "measure everything anew, and replace what was kept; with --cost measured"


def plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, and an example."""
    parser.epilog = _EPILOG
    target_argument(parser)
    parser.add_argument(
        "-b", "--budget", action="append", default=[], type=_budget, metavar="BUDGET", help=_BUDGET_HELP
    )
    passes_argument(parser)
    stage_argument(parser, ("joint", "step"))
    parser.add_argument("--time-limit", type=_seconds, metavar="S", help="end the search after S seconds")
    parser.add_argument("--cost", choices=COSTS, default="measured", metavar="COST", help=_COST_HELP)
    parser.add_argument("--remeasure", action="store_true", help=_REMEASURE_HELP)
    output_arguments(parser, ("text", "json", "svg"))
    exchange_arguments(parser)
    parser.set_defaults(verify="structure", problem=_problem)


def _problem(options: argparse.Namespace) -> str:
    """What is wrong with the arguments together; empty where nothing is."""
    if options.remeasure and options.cost in PROFILES:
        return f"--remeasure measures on this device, and --cost {options.cost} takes no time from it: leave one out"
    return two_formats(options) or exchange_problem(options)


def _budget(text: str) -> str:
    try:
        check_budget(text)
    except GraphoptError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def plan(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target or passes that are wrong; for a budget that no plan meets, after what was found has
            been written; of several such errors all but the last are printed.
    """
    if options.remeasure:
        remeasure()
    if options.world_size is not None:
        exchange_plan(options)
        return
    check_output(options)
    rewritten = rewritten_program(options, _pipeline(options))
    report_passes(rewritten)
    memory = rewritten.program.memory()
    costs = _costs(memory, options.cost)
    fitting = _search(rewritten.program, memory, costs, options.time_limit)
    report = frontier_report(fitting, options.cost, costs)
    answers = [_answer(fitting, text) for text in options.budget]
    write_output(options, _render(format_of(options), fitting, report, answers, costs))
    if report.remark and (options.output is not None or format_of(options) != "text"):
        terminal.write(f"warning: {report.remark}", sys.stderr)
    if costs.remark and (options.output is not None or not options.budget or format_of(options) != "text"):
        terminal.write(f"warning: {costs.remark}", sys.stderr)
    errors = [answer.error for answer in answers if answer.error is not None]
    for error in errors[:-1]:
        terminal.write_error(error)
    if errors:
        raise errors[-1]


def _pipeline(options: argparse.Namespace) -> Pipeline:
    """The passes that run before; the one whose plans are shown is left out, and the user is told."""
    pipeline = pipeline_of(options)
    left_out = [current for current in pipeline.passes if current.name == _FITTER]
    for current in left_out:
        terminal.write(f"{current} does not run: its plans are what is shown; see --budget and --cost", sys.stderr)
    return Pipeline([current for current in pipeline.passes if current not in left_out]) if left_out else pipeline


def _costs(memory: MemoryTimeline, cost: str) -> CostReport:
    with progress_bar("measuring the calls") as show:
        return costs_of(memory, cost, progress=lambda done, total: show(done / total, f"{done} of {total}"))


def _search(program: Program, memory: MemoryTimeline, costs: CostReport, time_limit: float | None) -> Fitting:
    with progress_bar("searching plans") as show:

        def progress(share: float, frontier: Frontier) -> None:
            show(share, f"smallest peak {format_bytes(frontier.lowest.peak)}; Ctrl-C takes the best plans so far")

        options = FittingOptions(time_limit, progress, lambda planning: host_lanes(planning, None), interruptible=True)
        return Fitting(program, memory, costs.seconds, options)


def _answer(fitting: Fitting, text: str) -> _Answer:
    budget = budget_bytes(text, fitting.memory)
    reason = within_already(fitting.memory, budget)
    if reason:
        return _Answer(text, budget, reason=reason)
    fitted = fitting.within(budget)
    if fitted is None:
        return _Answer(text, budget, error=infeasible(fitting, budget))
    return _Answer(text, budget, fitted)


# --- what is written -------------------------------------------------------------------------------------------------


def _render(form: str, fitting: Fitting, report: FrontierReport, answers: Sequence[_Answer], costs: CostReport) -> str:
    if form == "svg":
        return frontier_svg(report, [_mark(fitting, answer) for answer in answers])
    if form == "json":
        budgets = [_answer_json(fitting, answer) for answer in answers]
        return json.dumps({**report.to_json(), "budgets": budgets}, indent=2)
    return "\n".join([report.to_text(), *(_answer_text(fitting, answer, costs) for answer in answers)])


def _mark(fitting: Fitting, answer: _Answer) -> BudgetMark:
    if answer.error is not None:
        return BudgetMark(answer.text, answer.budget, None)
    return BudgetMark(answer.text, answer.budget, _point(fitting, answer))


def _point(fitting: Fitting, answer: _Answer) -> FrontierPoint:
    """The plan of a budget that can be met; without one, the program as it is."""
    if answer.fitted is None:
        return FrontierPoint(fitting.memory.peak_bytes, 0.0, 1.0, 0)
    return fitted_point(fitting, answer.fitted)


def _answer_text(fitting: Fitting, answer: _Answer, costs: CostReport) -> str:
    head = f"==== budget {answer.text} ({answer.budget} bytes)"
    if answer.error is not None:
        return f"{head}\nno plan was found within it\n"
    if answer.fitted is None:
        return f"{head}\n{answer.reason}\n"
    summary = summary_lines(fitting, answer.fitted, answer.budget, costs)
    moved, kept = away_lines(fitting, answer.fitted), plan_lines(fitting, answer.fitted.simulated)
    return "\n".join([head, *summary, *(["", *moved] if moved else []), "", *kept]) + "\n"


def _answer_json(fitting: Fitting, answer: _Answer) -> dict[str, Any]:
    data: dict[str, Any] = {"budget": answer.text, "budget_bytes": answer.budget, "feasible": answer.error is None}
    if answer.error is not None:
        return {**data, "error": str(answer.error), "notes": list(getattr(answer.error, "__notes__", ()))}
    fitted, names = answer.fitted, fitting.planning.problem.names
    return {
        **data,
        **asdict(_point(fitting, answer)),
        "decisions": [asdict(decision) for decision in decisions(fitting, fitted.simulated)] if fitted else [],
        "offloaded": [{"name": names[item.value], "bytes": item.copy.bytes} for item in fitted.away] if fitted else [],
    }
