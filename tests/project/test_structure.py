"""The structure of the package: how long lists of files may be, what folders say of themselves, nothing runs up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import structure
from tests.support.paths import ROOT

MOST = 15
"""Files that a folder may have directly in it; ``passes/`` is a flat list by design."""


def test_the_table_is_put_between_its_marks(tmp_path: Path) -> None:
    document = tmp_path / "ARCHITECTURE.md"
    document.write_text((ROOT / "graphopt/ARCHITECTURE.md").read_text(encoding="utf-8"), encoding="utf-8")
    assert structure.main(["--write", str(document)]) == 0
    assert structure.structure_table() in document.read_text(encoding="utf-8")


def test_no_folder_is_a_long_list() -> None:
    assert [each.name for each in structure.folders() if each.files > MOST and each.name != "passes"] == []


def test_nothing_imports_from_above() -> None:
    assert structure.imports_up() == []


@pytest.mark.parametrize(
    "folder", [each for each in structure.folders() if each.name not in ("graphopt", "passes")], ids=lambda f: f.name
)
def test_each_folder_says_what_it_is(folder: structure.Folder) -> None:
    said = " ".join((ROOT / folder.name / "__init__.py").read_text(encoding="utf-8").split('"""')[1].split())
    listed = said.partition("In reading order: ")[2].partition(".")[0]
    files = {path.stem for path in (ROOT / folder.name).glob("*.py")} - {"__init__"}
    assert len(said) > 40
    assert len(files) < 2 or {name.strip("` ") for name in listed.split(",")} == files


def test_a_walk_names_what_it_enters() -> None:
    found = structure.walk()
    assert found.files[0].startswith("graphopt/runtime/drop_in/")
    assert "graphopt/rewriting/memory/fit/memory_planner.py" in found.files
    assert {there.split(".")[1] for _, there in found.climbs} <= {
        "report",
        "rewriting",
        "analysis",
        "runtime",
        "passes",
        "planning",
        "__init__",
    }
