"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

from graphopt.cli.arguments.arguments import budget_problem
from graphopt.cli.arguments.command_line import command_line
from graphopt.cli.arguments.exit_codes import exit_code
from graphopt.cli.arguments.named_files import check_named
from graphopt.cli.interruption import INTERRUPTED, SAID, end_at_once, raised
from graphopt.errors import GraphoptError
from graphopt.ir.words.columns import table_width
from graphopt.report.console import terminal

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; the process's own by default.

    Returns:
        0 where all went well, else what ``EXIT_CODES`` says; the message is on stderr.
    """
    if argv is None:
        end_at_once()
    try:
        options = _parse(argv)
    except SystemExit as stop:  # argparse has printed help, the version or what is wrong
        return stop.code if isinstance(stop.code, int) else 0
    try:
        check_named(options)
        with _warnings_on_stderr():
            _command(options)
        sys.stdout.flush()
    except GraphoptError as error:
        if options.traceback:
            traceback.print_exception(error)
        else:
            terminal.write_error(error)
        return exit_code(error)
    except BrokenPipeError:
        _leave_stdout()
    except KeyboardInterrupt:
        terminal.write(SAID, sys.stderr)
        return INTERRUPTED
    return 0


def _command(options: argparse.Namespace) -> None:
    """Run the command; its module, and with it torch, is imported now."""
    module, _, name = options.command.partition(":")
    width = None if getattr(options, "output", None) is not None else terminal.shown_width(sys.stdout)
    with table_width(width):
        command = getattr(importlib.import_module(f"graphopt.cli.commands.{module}"), name)
        with raised():
            command(options)


def _leave_stdout() -> None:
    """Whoever read stdout has closed it: send what is still buffered nowhere, so that the exit is silent."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """The logger's warnings, and what says that work goes on, as lines on stderr.

    Errors are left to ``main``, which prints the exception; ``GRAPHOPT_LOG`` says how much is written.
    """
    logger, work = logging.getLogger("graphopt"), logging.getLogger("graphopt.capture")
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setFormatter(terminal.LogFormatter("graphopt: warning: %(message)s"))
    warnings.addFilter(lambda record: record.levelno == logging.WARNING)
    works = logging.StreamHandler(sys.stderr)
    works.setFormatter(terminal.LogFormatter("graphopt: %(message)s"))
    works.addFilter(lambda record: record.levelno == logging.INFO)
    quiet = os.environ.get("GRAPHOPT_LOG", "").strip().lower() in ("off", "error", "warning")
    propagate, level = logger.propagate, work.level
    logger.propagate = False
    logger.addHandler(warnings)
    if not quiet:
        work.addHandler(works)
        work.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(warnings)
        work.removeHandler(works)
        work.setLevel(level)
        logger.propagate = propagate


# --- arguments -------------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits the way argparse does where the arguments are wrong."""
    options, rest = command_line().parse_known_args(argv)
    if options.command == "tensors:tensors" and not any(text.startswith("-") for text in rest):
        options.patterns += rest  # argparse leaves out patterns that come after an option
    elif rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    problem = options.problem(options) or budget_problem(options)
    if problem:
        options.parser.error(problem)
    return options
