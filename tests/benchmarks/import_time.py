"""What graphopt's imports cost on top of torch's, and what a wrong command line costs beside them.

Each figure is the fewest CPU seconds of several processes of their own, all of which have compiled code to read.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from harness import make_table, parser, show

NAMES = {
    "import graphopt": "import graphopt",
    "optimize, optimize_step, passes": "from graphopt import optimize, optimize_step, passes",
    "FitMemory, Recompute as well": "from graphopt import optimize, optimize_step\n"
    "from graphopt.passes import FitMemory, Recompute",
    "all passes": "from graphopt.passes import *",
}
WRONG = ("plan", "examples/train_gtp.py:factory", "--budget", "60%")

_CODE = """
import sys, time
started = time.process_time()
import torch
imported = time.process_time()
exec(sys.argv[1])
print(imported - started, time.process_time() - imported)
"""
_COMMAND = """
import sys, time
started = time.process_time()
from graphopt.cli.main import main
assert main(sys.argv[1:]) == 2
print(time.process_time() - started)
"""


def seconds(code: str, *arguments: str) -> list[float]:
    """What a process of its own that runs ``code`` prints."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def fewest(rounds: int, code: str, *arguments: str) -> list[float]:
    """The fewest of each figure; a first process, which may write compiled code, does not count."""
    seconds(code, *arguments)
    return [min(column) for column in zip(*(seconds(code, *arguments) for _ in range(rounds)), strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5, help="processes for each figure (default 5)")
    given = options.parse_args(argv)
    rounds = 1 if given.quick else given.rounds
    result: dict[str, Any] = {}
    for name, code in NAMES.items():
        torch, ours = fewest(rounds, _CODE, code)
        result[name] = {"torch": torch, "graphopt": ours, "ratio": ours / torch}
    torch = min(row["torch"] for row in result.values())
    (wrong,) = fewest(rounds, _COMMAND, *WRONG)
    result["a wrong command line"] = {"torch": torch, "graphopt": wrong, "ratio": wrong / torch}
    rows = [
        (name, f"{row['torch']:.2f} s", f"{row['graphopt']:.2f} s", f"×{row['ratio']:.2f}")
        for name, row in result.items()
    ]
    table = make_table("CPU seconds of imports", ("what", "import torch", "on top of it", "ratio"), rows)
    show(result, [table], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
