"""``graphopt plan``: what fits into how many bytes, at what cost in time, and the plan for each budget.

For several ranks, with what they exchange; without a budget and passes that exchange something, ``--world-size`` (or
``--devices`` with ``--network``) compares the ways to exchange gradients: see ``graphopt.cli.commands.exchange``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from graphopt.analysis.costs.cost import CostReport, costs_of, remeasure
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.cli.arguments.arguments import format_of
from graphopt.cli.arguments.exchange_arguments import exchange_ranks, joint_problem
from graphopt.cli.arguments.exit_codes import UsageError, wrong_use
from graphopt.cli.commands.exchange import EXCHANGERS, exchange_plan
from graphopt.cli.target.output import report_passes, write_output
from graphopt.cli.target.programs import pipeline_of, ranks, rewritten_program
from graphopt.errors import GraphoptError
from graphopt.ir.context import PlanStore
from graphopt.ir.memory.timeline import ReservedMemory
from graphopt.ir.node import Phase
from graphopt.ir.program import Program
from graphopt.ir.words.columns import filled
from graphopt.ir.words.written_units import format_bytes
from graphopt.planning.frontier import Frontier
from graphopt.report.console import terminal
from graphopt.report.console.progress_bar import progress_bar
from graphopt.report.pictures.frontier_chart import BudgetMark, frontier_svg
from graphopt.report.text.frontier_table import FrontierPoint, FrontierReport, fitted_point, frontier_report
from graphopt.rewriting.distributed.prediction.predicted_step import PredictedStep, predicted_step
from graphopt.rewriting.memory.fit.budget import BudgetError, budget_bytes, infeasible, within_already
from graphopt.rewriting.memory.fit.decision import own_segments
from graphopt.rewriting.memory.fit.fitting import Fitted, Fitting, FittingOptions
from graphopt.rewriting.memory.fit.memory_planner import MemoryPlanner, MemoryPlannerOptions
from graphopt.rewriting.memory.fit.preparation import prepared
from graphopt.rewriting.memory.fit.summary import away_lines, decisions, plan_lines, summary_lines
from graphopt.rewriting.memory.recompute.checkpoint_segments import Segments
from graphopt.rewriting.memory.transfers.transfer_insertion import host_lanes, lift_gathers, lift_swaps, nodes_of
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.advice.evaluation import step_of_long_run

__all__ = ["plan"]

_FITTER = "fit-memory"
"""The pass whose work this command shows; it is left out of the passes."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a budget gets.

    Attributes:
        text: how the user wrote the budget.
        budget: in bytes.
        peak_bytes: of the program that fits without a plan.
        reserved_bytes: what the device's allocator reserves; None where that is what is alive.
        fitted: the plan; None where none is needed, and where nothing fits.
        fitting: the search that the plan is of.
        reason: why there is no plan, where none is needed; what else there is to say about a plan.
        error: where nothing fits.
        step: how the plan runs on several ranks; None for one.
        around: what a plan around copies, or gathers, of inputs takes; None for one without these.
    """

    text: str
    budget: int
    peak_bytes: int = 0
    reserved_bytes: int | None = None
    fitted: Fitted | None = None
    fitting: Fitting | None = None
    reason: str = ""
    error: GraphoptError | None = None
    step: PredictedStep | None = None
    around: FrontierPoint | None = None


class _Searches:
    """The searches for plans: of the program with what is done first; below all of its plans, in the given order.

    Copies and gathers of inputs that reside elsewhere are taken out for it, and put in around the plan of each budget.

    Args:
        program: is only read.
        options: of the command.

    Attributes:
        plain: the timeline of the unmodified program.
        ready: the program with what is done first.
        first: what that is, for people.
        costs: how long its calls take.
        fitting: its plans.
    """

    def __init__(self, program: Program, options: argparse.Namespace) -> None:
        self.program = program
        self.plain = program.memory()
        lifted = program.copy()
        away = [found for found in (lift_swaps(lifted), lift_gathers(lifted)) if found is not None]
        names = frozenset(node.name for node in nodes_of(lifted, away))
        offloaded = replace(lifted.context.offloaded, names=lifted.context.offloaded.names | names)
        lifted.context = replace(lifted.context, offloaded=offloaded)
        self.lifted = lifted if away else program
        self.cost = options.cost or "measured"
        self.ranks = int(options.devices)
        self.ready = prepared(self.lifted, _FITTER)
        segments = self.ready.segments
        self.first = (*([] if segments is None else [segments.line()]), *self.ready.lines)
        self._time_limit: float | None = options.time_limit
        self.costs, self.fitting = self._search(self.ready.program)

    @cached_property
    def given(self) -> Fitting:
        """The plans in the given order."""
        return self._search(prepared(self.lifted, _FITTER, reorder=False).program)[1]

    def _search(self, program: Program) -> tuple[CostReport, Fitting]:
        memory = program.memory()
        with progress_bar(f"measuring the ops of {program.title}") as show:
            costs = costs_of(memory, self.cost, progress=lambda done, total: show(done / total, f"{done} of {total}"))
        with progress_bar(f"searching plans of {program.title}") as show:

            def progress(share: float, frontier: Frontier) -> None:
                show(share, f"smallest peak {format_bytes(frontier.lowest.peak)}; Ctrl-C: best so far")

            options = FittingOptions(
                self._time_limit,
                progress,
                lambda planning: host_lanes(planning, None),
                interruptible=True,
                thorough=True,
            )
            return costs, Fitting(program, memory, costs.seconds, options)

    def step(self, program: Program) -> PredictedStep | None:
        """How a program runs on several ranks; None where there is one."""
        return predicted_step(program, self.cost, self.ranks) if self.ranks > 1 else None

    def answer(self, text: str) -> _Answer:
        """What a budget gets, which may be a share of what the program takes as it is."""
        if self.lifted is not self.program:
            return self._around(text)
        answer = self._answer(text)
        if self.ranks == 1 or answer.error is not None:
            return answer
        program = self.ready.program.copy()
        if answer.fitted is not None and answer.fitting is not None:
            program = answer.fitting.program.copy()
            answer.fitting.apply(program, answer.fitted, origin=_FITTER)
        return replace(answer, step=self.step(program))

    def _around(self, text: str) -> _Answer:
        """What a budget gets where inputs reside elsewhere: as ``FitMemory`` has it, planning around their copies."""
        budget = budget_bytes(text, self.plain, reserved_where_cached(self.program, self.plain))
        program = self.program.copy()
        program.context = replace(program.context, plans=PlanStore())
        limit = self._time_limit
        options = MemoryPlannerOptions(_FITTER, budget, None, ("recompute", "offload"), self.cost, "default", limit)
        try:
            done = MemoryPlanner(options).plan(program)
        except BudgetError as error:
            return _Answer(text, budget, error=error.in_shares(text))
        memory = program.memory()
        before, after = (sum(costs_of(found, self.cost).seconds) for found in (self.plain, memory))
        point = FrontierPoint(
            memory.peak_bytes, after - before, after / before, len(list(program.phase_nodes(Phase.RECOMPUTE)))
        )
        reserved = _reserved_bytes(reserved_where_cached(program, memory))
        said = [
            f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(budget)} allowed",
            "" if done else done.reason,
            *done.lines,
        ]
        reason = "\n".join(filter(None, said))
        step = self.step(program)
        return _Answer(text, budget, memory.peak_bytes, reserved, reason=reason, step=step, around=point)

    def _answer(self, text: str) -> _Answer:
        reserved = reserved_where_cached(self.program, self.plain)
        budget = budget_bytes(text, self.plain, reserved)
        reason = within_already(self.plain, budget, reserved)
        if reason and self.ready.segments is None:
            return _Answer(text, budget, self.plain.peak_bytes, _reserved_bytes(reserved), reason=reason)
        memory, reserved = self.fitting.memory, self.fitting.reserved
        if within_already(memory, budget, reserved):
            reason = (
                f"with what is done first the peak is {format_bytes(memory.peak_bytes)}: nothing has to be recomputed"
            )
            return _Answer(text, budget, memory.peak_bytes, _reserved_bytes(reserved), reason=reason)
        answer = self._planned(text, budget)
        return answer if self.ready.segments is None else self._with_segments(answer, self.ready.segments)

    def _with_segments(self, answer: _Answer, segments: Segments) -> _Answer:
        """The same, or the model's own segments as they are where no plan is faster."""
        fitted, fitting = answer.fitted, answer.fitting
        own = own_segments(self.program, answer.budget, self.cost, _FITTER)
        if own is not None and (fitted is None or fitting is None or own.seconds <= fitted.seconds):
            memory = own.program.memory()
            reserved = reserved_where_cached(own.program, memory)
            reason = own.decision.note
            return _Answer(answer.text, answer.budget, memory.peak_bytes, _reserved_bytes(reserved), reason=reason)
        if fitted is None or fitting is None:
            return answer
        line = segments.line(fitting.named(fitted).again)
        return replace(answer, reason=f"{answer.reason}\n{line}" if answer.reason else line)

    def _planned(self, text: str, budget: int) -> _Answer:
        errors = []
        for reordered in (True, False) if self.ready.done.reordered else (True,):
            fitting = self.fitting if reordered else self.given
            fitted = fitting.within(budget)
            if fitted is not None:
                reason = "" if reordered else "in the given order of ops: in the other one no plan was found for it"
                return _Answer(text, budget, 0, fitted.reserved_bytes, fitted, fitting, reason)
            errors.append(infeasible(fitting, budget))
        return _Answer(text, budget, error=min(errors, key=lambda error: error.smallest_bytes).in_shares(text))


def _reserved_bytes(reserved: ReservedMemory | None) -> int | None:
    return None if reserved is None else reserved.reserved_peak_bytes


def plan(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target or passes that are wrong; for a budget that no plan meets, after what was found has
            been written; of several such errors all but the last are printed.
    """
    if options.remeasure:
        remeasure()
    pipeline = _pipeline(options)
    if exchange_ranks(options) is not None and not (options.budget or _exchanges(options, pipeline)):
        exchange_plan(options)
        return
    if exchange_ranks(options) is not None and (problem := joint_problem(options)):
        raise UsageError(problem)
    options.devices = max(options.devices, options.world_size or 1)
    with wrong_use():
        joined = ranks(options)
    with joined:
        _plan(options, pipeline)


def _exchanges(options: argparse.Namespace, pipeline: Pipeline) -> bool:
    """Whether the exchange is that of the passes; ``--world-size`` by itself compares others with it."""
    return options.world_size is None and any(current.name in EXCHANGERS for current in pipeline.passes)


def _plan(options: argparse.Namespace, pipeline: Pipeline) -> None:
    rewritten = rewritten_program(options, pipeline)
    report_passes(rewritten)
    searches = _Searches(rewritten.program, options)
    costs = searches.costs
    report = frontier_report(searches.fitting, searches.cost, costs, rewritten.program, searches.first)
    answers = [searches.answer(text) for text in options.budget]
    step = step_of_long_run(rewritten, searches.cost, searches.ranks) if searches.ranks > 1 else None
    write_output(options, _render(format_of(options), report, answers, costs, step))
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


# --- what is written -------------------------------------------------------------------------------------------------


def _render(
    form: str, report: FrontierReport, answers: Sequence[_Answer], costs: CostReport, step: PredictedStep | None
) -> str:
    if form == "svg":
        return frontier_svg(report, [_mark(answer) for answer in answers])
    if form == "json":
        budgets = [_answer_json(answer) for answer in answers]
        whole = {} if step is None else {"step": step.to_json()}
        return json.dumps({**report.to_json(), **whole, "budgets": budgets}, indent=2)
    head = [] if step is None else [*step.lines(), ""]
    return filled("\n".join([report.to_text(), *head, *(_answer_text(answer, costs) for answer in answers)]))


def _mark(answer: _Answer) -> BudgetMark:
    return BudgetMark(answer.text, answer.budget, None if answer.error is not None else _point(answer))


def _point(answer: _Answer) -> FrontierPoint:
    """The plan of a budget that can be met; without one, the program that fits without."""
    if answer.fitted is None or answer.fitting is None:
        return answer.around or FrontierPoint(answer.peak_bytes, 0.0, 1.0, 0)
    return fitted_point(answer.fitting, answer.fitted)


def _answer_text(answer: _Answer, costs: CostReport) -> str:
    head = f"==== budget {answer.text} ({answer.budget} bytes)"
    if answer.error is not None:
        return f"{head}\nno plan was found within it\n"
    if answer.fitted is None or answer.fitting is None:
        said = [head, answer.reason, *([] if answer.step is None else answer.step.lines())]
        return "\n".join(said) + "\n"
    fitting, fitted = answer.fitting, answer.fitted
    summary = summary_lines(fitting, fitted, answer.budget, costs)
    moved, kept = away_lines(fitting, fitted), plan_lines(fitting, fitted.simulated)
    order = [answer.reason] if answer.reason else []
    order += [] if answer.step is None else answer.step.lines()
    return "\n".join([head, *summary, *order, *(["", *moved] if moved else []), "", *kept]) + "\n"


def _answer_json(answer: _Answer) -> dict[str, Any]:
    data: dict[str, Any] = {"budget": answer.text, "budget_bytes": answer.budget, "feasible": answer.error is None}
    if answer.error is not None:
        return {**data, "error": str(answer.error), "notes": list(getattr(answer.error, "__notes__", ()))}
    data |= asdict(_point(answer))
    if answer.reserved_bytes is not None:
        data["reserved_bytes"] = answer.reserved_bytes
    if answer.step is not None:
        data["step"] = answer.step.to_json()
    if answer.around is not None:
        data["notes"] = answer.reason.splitlines()
    if answer.fitted is None or answer.fitting is None:
        return {**data, "decisions": [], "offloaded": []}
    fitting, fitted = answer.fitting, answer.fitted
    names = fitting.planning.problem.names
    return {
        **data,
        "decisions": [asdict(decision) for decision in decisions(fitting, fitted.simulated)],
        "offloaded": [{"name": names[item.value], "bytes": item.copy.bytes} for item in fitted.away],
    }
