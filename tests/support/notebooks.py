"""Execute the notebooks and store their outputs: ``python -m tests.support.notebooks [FILE ...]``.

What is stored is what cells print and show, without log lines, which hold times, and without metadata of the run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from tests.support.paths import ROOT

__all__ = ["NOTEBOOKS", "execute", "main"]

NOTEBOOKS = ROOT / "notebooks"

_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

_QUIET: dict[str, Any] = {"timeout": 300, "record_timing": False, "extra_arguments": ["--log-level=ERROR"]}


def execute(path: Path) -> Any:
    """The notebook in a file as it is after every cell has run, without traces of the run itself."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as figures:
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GRAPHOPT_CACHE": figures, "COLUMNS": "100"}
        settings |= {"GRAPHOPT_CACHE_PROGRAMS": "0"}  # they show every program between passes
        client = NotebookClient(notebook, kernel_name=_KERNEL["name"], **_QUIET)
        client.execute(cwd=str(path.parent), env={**os.environ, **settings})
    notebook.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _stored(cell.outputs)
    return notebook


def _stored(outputs: list[Any]) -> list[Any]:
    """Outputs without log lines and without displays that are empty, as those of progress are; printed text as one."""
    kept: list[Any] = []
    for output in outputs:
        if output.get("name") == "stderr" or (output.output_type == "display_data" and not any(output.data.values())):
            continue
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main(argv: Sequence[str] | None = None) -> int:
    """Execute notebooks, and write them back with their outputs."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.notebooks", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="notebooks; all of them by default")
    for path in parser.parse_args(argv).files or sorted(NOTEBOOKS.glob("*.ipynb")):
        text = nbformat.writes(execute(path))
        path.write_text(f"{text}\n", encoding="utf-8")
        print(f"{path.name}: {len(text):,} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
