"""``graphopt help`` and ``graphopt completion``: words alone, for which torch is not imported."""

from __future__ import annotations

import argparse
import sys

from graphopt.cli.arguments.command_line import command_line
from graphopt.cli.arguments.command_parser import commands_of
from graphopt.cli.arguments.completion import completion_script
from graphopt.report.console import terminal

__all__ = ["completion", "help_"]


def help_(options: argparse.Namespace) -> None:
    """Explain a command, or list all."""
    parser = command_line()
    about = commands_of(parser)[options.about] if options.about else parser
    terminal.write(about.format_help(), sys.stdout, style=terminal.line_style)


def completion(options: argparse.Namespace) -> None:
    """Print a script for a shell."""
    terminal.write(completion_script(options.shell, commands_of(command_line())), sys.stdout)
