"""The structure of the package in figures: files and lines by folder, imports that run up, the walk of a program.

``python -m tests.project.structure`` prints the tables, ``--write graphopt/ARCHITECTURE.md`` puts the first one between
its marks there. ``--walk`` counts which files one ``optimize`` enters, and how
often a call goes from a file back into one of a higher floor.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.catalogue import replace_table
from tests.support.paths import ROOT

__all__ = ["Folder", "Walk", "folders", "imports_up", "main", "structure_table", "walk"]

START, END = "<!-- structure -->", "<!-- /structure -->"
_LONG = 450
"""Lines above which a file is named."""


@dataclass(frozen=True)
class Folder:
    """One folder of the source.

    Attributes:
        name: below the root.
        files: of Python directly in it, without ``__init__.py``.
        below: files in it and in its folders.
        lines: of these.
    """

    name: str
    files: int
    below: int
    lines: int


def folders() -> list[Folder]:
    """The package and the passes, folder by folder, with what is in them."""
    paths = [ROOT / "graphopt", *(path.parent for path in sorted((ROOT / "graphopt").rglob("__init__.py"))[1:])]
    found = [path for path in paths if "passes" not in path.relative_to(ROOT).parts[1:]]
    return [_folder(path) for path in (*found, ROOT / "passes")]


def structure_table() -> str:
    """Markdown: a row for each folder one level below the package, and for the longest lists of files."""
    rows = folders()
    top = [row for row in rows if row.name.count("/") <= 1]
    lines = ["| folder | files | lines | most files in one folder |", "| --- | --- | --- | --- |"]
    for row in top:
        inside = [other for other in rows if f"{other.name}/".startswith(f"{row.name}/")]
        widest = max(inside, key=lambda other: other.files)
        lines.append(f"| `{row.name}/` | {row.below} | {row.lines:,} | {widest.files} in `{widest.name}/` |")
    whole = [row for row in rows if row.name in ("graphopt", "passes")]
    lines.append(f"| all | {sum(row.below for row in whole)} | {sum(row.lines for row in whole):,} | |")
    long = [f"`{path}` {count}" for path, count in _longest() if count > _LONG]
    return "\n".join([*lines, "", f"Imports that run up: {len(imports_up())}. Above {_LONG} lines: {', '.join(long)}."])


def imports_up() -> list[tuple[str, str]]:
    """Imports from a lower floor of ``pyproject.toml`` to a higher one, as pairs of modules."""
    floors = _floors()
    found = []
    for path in _sources():
        here = _module(path)
        for there in _imported(path):
            if there.startswith("graphopt.") and floors.get(_room(there), -99) > floors.get(_room(here), 99):
                found.append((here, there))
    return found


@dataclass
class Walk:
    """What one call enters.

    Attributes:
        files: of the package, in the order of their first call.
        climbs: calls from a file into one of a higher floor, as pairs of modules.
    """

    files: list[str] = field(default_factory=list)
    climbs: list[tuple[str, str]] = field(default_factory=list)


def walk() -> Walk:
    """Follow ``optimize(model, "fit-memory{budget=60%}")`` through its first call and backward."""
    import torch

    import graphopt

    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)))
    optimized = graphopt.optimize(model, "fit-memory{budget=60%}")
    found, floors, root = Walk(), _floors(), f"{ROOT}/"
    own = f"{root}graphopt/", f"{root}passes/"
    seen: set[str] = set()

    def follow(frame: FrameType, event: str, _: Any) -> None:
        here = frame.f_code.co_filename
        if event != "call" or not here.startswith(own) or frame.f_back is None:
            return
        if here not in seen:
            seen.add(here)
            found.files.append(here[len(root) :])
        there = frame.f_back.f_code.co_filename
        if there != here and there.startswith(own):
            pair = _module(Path(there)), _module(Path(here))
            if floors.get(_room(pair[1]), 0) > floors.get(_room(pair[0]), 0):
                found.climbs.append(pair)

    sys.setprofile(follow)
    try:
        optimized(torch.ones(512, 32)).sum().backward()
    finally:
        sys.setprofile(None)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.project.structure", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into FILE")
    parser.add_argument("--walk", action="store_true", help="follow one program through the package")
    options = parser.parse_args(argv)
    if options.walk:
        found = walk()
        print(*found.files, sep="\n")
        print(f"{len(found.files)} files entered, {len(found.climbs)} calls into a higher floor")
        return 0
    if options.write is None:
        print(structure_table())
    else:
        text = options.write.read_text(encoding="utf-8")
        options.write.write_text(replace_table(text, structure_table(), START, END), encoding="utf-8")
    return 0


def _folder(path: Path) -> Folder:
    below = [file for file in path.rglob("*.py") if "__pycache__" not in file.parts]
    if path == ROOT / "graphopt":
        below = [file for file in below if "passes" not in file.relative_to(path).parts]
    direct = [file for file in path.glob("*.py") if file.name != "__init__.py"]
    return Folder(str(path.relative_to(ROOT)), len(direct), len(below), sum(map(_lines, below)))


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _sources() -> Iterator[Path]:
    for path in sorted((ROOT / "graphopt").rglob("*.py")):
        if "passes" not in path.relative_to(ROOT).parts[1:2]:
            yield path
    yield from sorted((ROOT / "passes").glob("*.py"))


def _longest() -> Iterable[tuple[str, int]]:
    counts = {str(path.relative_to(ROOT)): _lines(path) for path in _sources()}
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))


def _floors() -> dict[str, int]:
    """How high each room stands, by the layers of ``pyproject.toml``."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {room.strip(): -number for number, layer in enumerate(layers) for room in layer.split("|")}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "graphopt" else ("graphopt", *parts))


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


if __name__ == "__main__":
    sys.exit(main())
