"""Where the files are that tests read or run."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""

SUPPORT = ROOT / "tests" / "support"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "tests" / "benchmarks"
