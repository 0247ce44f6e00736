"""Programs in the formats of other viewers, by the names that the command line gives them."""

from __future__ import annotations

import json

from graphopt.ir.program import Program
from graphopt.report.formats.model_explorer import to_model_explorer
from graphopt.report.formats.perfetto import to_perfetto

__all__ = ["EXPORTS", "export"]

EXPORTS = {"perfetto": to_perfetto, "model-explorer": to_model_explorer}
"""What makes the data of each format."""


def export(program: Program, form: str) -> str:
    """A program as JSON for another viewer.

    Args:
        program: of any stage.
        form: one of ``EXPORTS``.
    """
    return json.dumps(EXPORTS[form](program), separators=(",", ":"))
