"""The sweeps: left out with all that they import where they do not run, and a table of what they found at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where no sweep is asked for, their files and the databases behind these are not imported."""
    asked = config.getoption("markexpr")
    return None if "sweep" in asked and "not sweep" not in asked else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded, below the name of their file: the rows, and the sum of all counts."""
    rows: dict[str, list[str]] = {}
    counts: dict[str, Counter[str]] = {}
    for file, name, value in _recorded(terminalreporter):
        if name == "row":
            rows.setdefault(file, []).append(value)
        if name == "counts":
            counts.setdefault(file, Counter()).update(value)
    for file in sorted({*rows, *counts}):
        terminalreporter.section(file)
        for line in sorted(rows.get(file, [])):
            terminalreporter.write_line(line)
        if file in counts:
            terminalreporter.write_line(", ".join(f"{number} {what}" for what, number in sorted(counts[file].items())))


def _recorded(terminalreporter: pytest.TerminalReporter) -> Iterator[tuple[str, str, Any]]:
    """The properties that tests recorded, each with the file of its test."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    yield report.nodeid.partition("::")[0], name, value
