"""The parser of the command line, whose errors begin like all others and name what was probably meant."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, NoReturn

from graphopt.analysis.costs.device_names import DEVICES, near_devices
from graphopt.errors import did_you_mean
from graphopt.report.console import terminal

__all__ = ["CommandParser", "commands_of"]

_CHOICE = re.compile(r"invalid choice: '?(?P<given>[^']*?)'? \(choose from (?P<known>.*)\)")
_NEGATIVE = re.compile(r"-\.?\d")
_UNKNOWN = re.compile(r"unrecognized arguments: (?P<given>--?[\w-]+)")


class _Paragraphs(argparse.HelpFormatter):
    """Fills paragraphs to the width of the terminal; lines that are indented, and what heads them, stay."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = []
        for paragraph in text.split("\n\n"):
            lines = paragraph.splitlines()
            whole = any(line.startswith(" ") for line in lines)
            filled.append("\n".join(lines) if whole else textwrap.fill(" ".join(lines), width))
        return "\n\n".join(filled)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are ``graphopt: error: …`` with the near words, and where to read more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _Paragraphs, **kwargs})
        self._negative_number_matcher = _NEGATIVE  # a value such as -5GB is no option, and refused as what it is

    def error(self, message: str) -> NoReturn:
        """Write what is wrong to stderr and exit with 2."""
        hint = self._near(message)
        words = self.prog.split()
        terminal.write_problem(f"{message}{hint and f'; {hint}'}\n  see: {' '.join([words[0], 'help', *words[1:]])}")
        sys.exit(2)

    def _near(self, message: str) -> str:
        choice, unknown = _CHOICE.search(message), _UNKNOWN.search(message)
        if choice is not None:
            known = re.findall(r"[^\s,']+", choice["known"])
            near = near_devices(choice["given"]) if set(DEVICES) <= set(known) else []
            return did_you_mean(choice["given"], known) or (f"did you mean {', '.join(near)}?" if near else "")
        if unknown is not None:
            return did_you_mean(unknown["given"], self._option_string_actions)
        return ""


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of a parser's commands, by their names."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}
