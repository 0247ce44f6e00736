"""``graphopt plan``: what fits into how many bytes, at what cost in time, and the plan for each budget.

With ``--world-size``, or with ``--devices`` and ``--network``, it plans the exchange of gradients instead; see
``graphopt.cli.exchange``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from graphopt.analysis.costs.cost import CostReport, costs_of, remeasure
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.cli.arguments import format_of
from graphopt.cli.exchange import exchange_plan
from graphopt.cli.exchange_arguments import exchange_ranks
from graphopt.cli.output import check_output, report_passes, write_output
from graphopt.cli.programs import pipeline_of, rewritten_program
from graphopt.errors import GraphoptError
from graphopt.ir.columns import filled
from graphopt.ir.ops.values import format_bytes
from graphopt.ir.program import Program
from graphopt.ir.timeline import MemoryTimeline
from graphopt.planning.frontier import Frontier
from graphopt.report.console import terminal
from graphopt.report.console.progress_bar import progress_bar
from graphopt.report.pictures.frontier_chart import BudgetMark, frontier_svg
from graphopt.report.text.frontier_table import FrontierPoint, FrontierReport, fitted_point, frontier_report
from graphopt.rewriting.memory.budget import budget_bytes, infeasible, within_already
from graphopt.rewriting.memory.fit import Fitted, Fitting, FittingOptions
from graphopt.rewriting.memory.preparation import prepared
from graphopt.rewriting.memory.summary import away_lines, decisions, plan_lines, summary_lines
from graphopt.rewriting.memory.transfer_insertion import host_lanes
from graphopt.rewriting.pipeline import Pipeline

__all__ = ["plan"]

_FITTER = "fit-memory"
"""The pass whose work this command shows; it is left out of the passes."""


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


def plan(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target or passes that are wrong; for a budget that no plan meets, after what was found has
            been written; of several such errors all but the last are printed.
    """
    if options.remeasure:
        remeasure()
    if exchange_ranks(options) is not None:
        exchange_plan(options)
        return
    check_output(options)
    rewritten = rewritten_program(options, _pipeline(options))
    report_passes(rewritten)
    plain = rewritten.program.memory()
    ready = prepared(rewritten.program, _FITTER)
    program, memory = ready.program, ready.program.memory()
    cost = options.cost or "measured"
    costs = _costs(memory, cost)
    fitting = _search(program, memory, costs, options.time_limit)
    report = frontier_report(fitting, cost, costs, rewritten.program, ready.lines)
    answers = [_answer(rewritten.program, plain, fitting, text) for text in options.budget]
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
    pipeline = pipeline_of(options, fitted=False)
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


def _answer(program: Program, plain: MemoryTimeline, fitting: Fitting, text: str) -> _Answer:
    """What a budget gets, which may be a share of what the program takes as it is."""
    budget = budget_bytes(text, plain, reserved_where_cached(program, plain))
    reason = within_already(fitting.memory, budget, fitting.reserved)
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
    return filled("\n".join([report.to_text(), *(_answer_text(fitting, answer, costs) for answer in answers)]))


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


def _reserved_json(fitting: Fitting, answer: _Answer) -> dict[str, int | None]:
    """What the device's allocator reserves; nothing where that is what is alive."""
    if fitting.reserved is None:
        return {}
    plain = fitting.reserved.reserved_peak_bytes
    return {"reserved_bytes": plain if answer.fitted is None else answer.fitted.reserved_bytes}


def _answer_json(fitting: Fitting, answer: _Answer) -> dict[str, Any]:
    data: dict[str, Any] = {"budget": answer.text, "budget_bytes": answer.budget, "feasible": answer.error is None}
    if answer.error is not None:
        return {**data, "error": str(answer.error), "notes": list(getattr(answer.error, "__notes__", ()))}
    fitted, names = answer.fitted, fitting.planning.problem.names
    return {
        **data,
        **asdict(_point(fitting, answer)),
        **_reserved_json(fitting, answer),
        "decisions": [asdict(decision) for decision in decisions(fitting, fitted.simulated)] if fitted else [],
        "offloaded": [{"name": names[item.value], "bytes": item.copy.bytes} for item in fitted.away] if fitted else [],
    }
