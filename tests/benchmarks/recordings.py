"""The simulated caching allocator beside what torch's allocator did: recordings of real runs, replayed.

``python tests/benchmarks/recordings.py FILE...`` takes files that ``torch.cuda.memory._dump_snapshot`` wrote.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness import make_table, show

from graphopt.analysis.allocator import compare_trace, read_recording
from graphopt.errors import GraphoptError
from graphopt.ir.words.written_units import format_bytes


def compared(file: Path) -> list[dict[str, Any]]:
    """What the simulated allocator makes of each device's trace in a file."""
    recording = read_recording(file)
    rows = []
    for device, trace in enumerate(recording.traces):
        if not trace:
            continue
        found = compare_trace(recording, device)
        rows.append(
            {
                "file": file.name,
                "device": device,
                "events": found.events,
                "requests": found.allocations,
                "same_block": found.same_place,
                "reserved": found.reserved.recorded_peak,
                "predicted": found.reserved.predicted_peak,
                "largest_distance": found.largest_share,
            }
        )
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    peaks = format_bytes(row["reserved"]), format_bytes(row["predicted"])
    return row["file"], str(row["requests"]), str(row["same_block"]), *peaks, f"{row['largest_distance']:.2%}"


def main() -> int:
    """Print a row for each trace; 1 where one is predicted more than 1 % off, or a file cannot be read."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("files", nargs="+", type=Path, metavar="FILE", help="pickles, or the same as JSON")
    arguments.add_argument("--json", action="store_true", help="print JSON in place of a table")
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    wrong = 0
    for file in options.files:
        try:
            rows += compared(file)
        except GraphoptError as error:
            print(error, file=sys.stderr)
            wrong = 1
    headings = ("recording", "requests", "same block", "reserved", "predicted", "largest distance")
    table = make_table("torch's caching allocator, simulated", headings, [_cells(row) for row in rows])
    show({"recordings": rows}, [table], as_json=options.json)
    return int(wrong or any(row["largest_distance"] > 0.01 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
