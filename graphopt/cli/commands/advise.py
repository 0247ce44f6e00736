"""``graphopt advise``: the passes for a machine, chosen among all by what is predicted of each."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import replace

from graphopt.capture.call.batch_rows import Arguments
from graphopt.cli.arguments.arguments import format_of
from graphopt.cli.arguments.exit_codes import wrong_use
from graphopt.cli.target.output import json_data, write_output
from graphopt.cli.target.programs import joined_profile, loaded_target
from graphopt.report.formats.advice_page import advice_page
from graphopt.report.pictures.advice_chart import advice_svg
from graphopt.report.text.advice_plot import advice_plot
from graphopt.runtime.advice.choose_passes import advise_capture
from graphopt.runtime.advice.evaluation import SharedCapture
from graphopt.runtime.advice.machine import Machine
from graphopt.runtime.advice.recommendation import Advice

__all__ = ["advise"]


def advise(options: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        GraphoptError: for a target that gives no program, a machine that is not known, and where nothing fits.
    """
    with contextlib.redirect_stdout(sys.stderr):
        with wrong_use():
            profile = None if options.device is None else joined_profile(options)
        target = loaded_target(options)
        with wrong_use():
            machine = Machine.of(options.devices, profile, options.memory, target.model)

        def captured(batch: Arguments) -> SharedCapture:
            args, kwargs = batch
            return replace(target, args=args, kwargs=kwargs).session_of(SharedCapture, profile)

        example = (target.args, target.kwargs)
        found = advise_capture(captured, example, machine, options.numerics, options.global_batch)
    write_output(options, _written(found, format_of(options)))


def _written(found: Advice, form: str) -> str:
    """An answer in a format; as text with the picture behind what can be read by the line."""
    if form == "json":
        return json.dumps(json_data(found.to_json()), indent=2)
    if form == "text":
        return f"{found}\n\n{advice_plot(found)}"
    return advice_svg(found) if form == "svg" else advice_page(found)
