"""The tables of passes and devices, made from classes and files.

``python -m tests.support.catalogue --check passes/README.md``, and ``graphopt/README.md`` alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphopt.analysis.costs.profiles import PROFILES, DeviceProfile
from graphopt.capture.border import BORDER
from graphopt.errors import GraphoptError
from graphopt.report.text.pass_table import passes_json
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.registry import available_passes

__all__ = [
    "border_table", "brought_up_to_date", "devices_table", "main", "passes_table", "replace_table",
]  # fmt: skip

START, END = "<!-- passes -->", "<!-- /passes -->"

DEVICES = ("<!-- devices -->", "<!-- /devices -->")

_PASSES = ("pass", "as text", "rewrites", "numerics", "what it does")


def passes_table(passes: Iterable[type[Pass]]) -> str:
    """A Markdown table with one row for each pass class, in the order given."""
    return _table(_PASSES, [_row(data) for data in passes_json(passes)])


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *escaped))


def _class(data: dict[str, Any]) -> str:
    return f"`{data['class'].rpartition('.')[2]}`"


def _row(data: dict[str, Any]) -> list[str]:
    return [_class(data), f"`{data['name']}`", data["stage"], data["numerics"], data["summary"]]


def devices_table() -> str:
    """A Markdown table of the devices whose figures are published, with the rates that programs get."""
    return _table(_HEADINGS, [_device(profile) for profile in PROFILES.values()])


def _device(profile: DeviceProfile) -> list[str]:
    links = [profile.host_bandwidth, profile.peer_bandwidth, profile.network_bandwidth]
    return [
        f"`{profile.name}`",
        f"{profile.memory_bytes / 1e9:.1f} GB",
        f"{profile.memory_bandwidth / 1e9:,.0f}",
        f"{profile.flops['float32'] / 1e12:,.4g}",
        f"{profile.flops['bfloat16'] / 1e12:,.4g}" if "bfloat16" in profile.flops else "",
        *(f"{rate / 1e9:,.4g}" if rate else "" for rate in links),
    ]


_HEADINGS = ("device", "memory", "its GB/s", "TFLOP/s float32", "bfloat16", "GB/s to the host", "to a peer", "network")


def border_table() -> str:
    """The table of what is at the border of a capture, behind both doors."""
    rows = [
        (row.what, row.how, row.note, ": ".join(filter(None, (row.compiled or "alike", row.compiled_note))))
        for row in BORDER
    ]
    return _table(("what", "how", "", '`torch.compile(backend="graphopt")`'), rows)


def replace_table(text: str, table: str, start: str = START, end: str = END) -> str:
    """``text`` with ``table`` between two markers.

    Raises:
        GraphoptError: where a marker is missing or given twice, or they are in the wrong order.
    """
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise GraphoptError(f"a table goes between {start} and {end}, each once and in this order")
    before, rest = text.split(start)
    return f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"


def brought_up_to_date(text: str) -> str:
    """``text`` with the tables that it has, of built-in passes and of devices, as classes and files say.

    Raises:
        GraphoptError: where it has neither; as ``replace_table`` raises it.
    """
    own = [cls for cls in available_passes().values() if cls.__module__.startswith("graphopt.passes.")]
    made = {(START, END): lambda: passes_table(own), DEVICES: devices_table}
    for place in [place for place in made if any(mark in text for mark in place)] or made:
        text = replace_table(text, made[place](), *place)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Check or write the tables of the built-in passes; returns 1 where a check finds others."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.catalogue", description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, metavar="FILE", help="say whether the tables in FILE are current")
    action.add_argument("--write", type=Path, metavar="FILE", help="bring the tables in FILE up to date")
    options = parser.parse_args(argv)
    path: Path = options.check or options.write
    try:
        text = path.read_text(encoding="utf-8")
        current = brought_up_to_date(text)
    except (OSError, GraphoptError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    if options.write and current != text:
        path.write_text(current, encoding="utf-8")
    elif current != text:
        print(f"{path}: its tables are not current: {parser.prog} --write {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
