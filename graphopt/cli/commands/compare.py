"""``graphopt compare``: how far the results of a rewritten program are from the original's, tensor by tensor."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from typing import Any, Literal, cast

from graphopt.cli.target.output import print_json, print_report, program_title
from graphopt.cli.target.programs import pipeline_of, stage_to_show
from graphopt.cli.target.target import load_target
from graphopt.errors import GraphoptError
from graphopt.report.console.progress_bar import progress_bar
from graphopt.report.text.comparison_table import comparison_json, comparison_text, denied_json, denied_text
from graphopt.report.text.snapshots import records_json
from graphopt.rewriting.instruments import LogPasses
from graphopt.rewriting.pass_ import record_lines
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.precision.scaling import scaling_of
from graphopt.rewriting.progress import working
from graphopt.runtime.comparison.bisect import Denied, deniable, denying, precision_pass, smallest_denied
from graphopt.runtime.comparison.granularity import By
from graphopt.runtime.comparison.lockstep import Kind
from graphopt.runtime.comparison.tensor_errors import Comparison
from graphopt.runtime.comparison.trial import Outcome, Trial

__all__ = ["compare"]

_RESULTS: tuple[Kind, ...] = ("loss", "output", "gradient")


def compare(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target or passes that are wrong, or a pattern that names nothing; after the table, where a
            tensor exceeds ``--tolerance``; where no set keeps results within ``--bisect``.
    """
    pipeline = pipeline_of(options)
    if options.bisect is not None:
        precision_pass(pipeline)
    with contextlib.redirect_stdout(sys.stderr), working(f"capturing {options.target}"):
        trial = _trial(options, pipeline)
        outcome = trial.rewrite(pipeline, instruments=[LogPasses()])
    if options.bisect is not None:
        _bisect(options, pipeline, trial, outcome)
        return
    with working("running the original and the rewritten program"):
        comparison = trial.compare(outcome.program, tensors=options.match)
    _show(options, outcome, comparison)


def _trial(options: argparse.Namespace, pipeline: Pipeline) -> Trial:
    target = load_target(options.target)
    stage = stage_to_show(options.stage, target, pipeline)
    return Trial(target.session(), cast(Literal["joint", "step"], stage), options.seed)


def _show(options: argparse.Namespace, outcome: Outcome, comparison: Comparison) -> None:
    over = comparison.exceeding(options.tolerance) if options.tolerance is not None else ()
    if options.json:
        bound: dict[str, Any] = {} if options.tolerance is None else {"tolerance": options.tolerance}
        bound |= {"exceeding": [row.name for row in over]} if bound else {}
        print_json({**_head(outcome), **bound, **comparison_json(comparison, options.limit)})
    else:
        print_report(_records(outcome), comparison_text(comparison, options.limit))
    if over:
        count = "1 tensor is" if len(over) == 1 else f"{len(over)} tensors are"
        raise GraphoptError(
            f"{count} not within the tolerance of {options.tolerance:g}; the worst is {over[0].name!r} with a relative "
            f"error of {over[0].relative_error:.3g}"
        )


def _head(outcome: Outcome) -> dict[str, Any]:
    return {**program_title(outcome.program), "passes": records_json(outcome.records)}


def _records(outcome: Outcome) -> str:
    return "\n".join(f"# {line}" for record in outcome.records for line in record_lines(record))


# --- what to keep in float32 -----------------------------------------------------------------------------------------


def _bisect(options: argparse.Namespace, pipeline: Pipeline, trial: Trial, outcome: Outcome) -> None:
    by: By = options.by or "module"
    tolerance: float = options.bisect
    entries = deniable(trial.original.forward, outcome.forward, by)

    kinds = () if options.match else _RESULTS

    scaling = scaling_of(pipeline.passes)
    settle = scaling is not None and scaling.dynamic

    def within(denied: tuple[str, ...]) -> bool:
        program = trial.rewrite(denying(pipeline, denied), verify=False).program
        return trial.within(program, tolerance, tensors=options.match, kinds=kinds, settle=settle)

    with contextlib.redirect_stdout(sys.stderr), progress_bar(f"looking for the smallest set to deny, by {by}") as show:
        denied = smallest_denied(entries, within, progress=show)
    if denied is None:
        program = trial.rewrite(denying(pipeline, entries), verify=False).program
        worst = trial.compare(program, tensors=options.match, kinds=kinds).worst
        assert worst is not None
        raise GraphoptError(
            f"with all that can be denied ({len(entries)} by {by}) the relative error of {worst.name!r} is still "
            f"{worst.relative_error:.3g}, more than {tolerance:g}: allow a larger error, or leave out other passes "
            "that change it"
        )
    _show_denied(options, outcome, denied, len(entries), denying(pipeline, denied.entries))


def _show_denied(
    options: argparse.Namespace, outcome: Outcome, denied: Denied, candidates: int, pipeline: Pipeline
) -> None:
    by: By = options.by or "module"
    if options.json:
        print_json({**_head(outcome), **denied_json(denied, candidates, by, options.bisect, str(pipeline))})
        return
    what = ", ".join(options.match) or "the loss and all gradients"
    print_report(denied_text(denied, candidates, by, options.bisect, shlex.quote(str(pipeline)), what))
