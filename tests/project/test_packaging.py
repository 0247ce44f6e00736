"""The folder passes/ as the package graphopt.passes, what a wheel holds, and which way imports point."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import graphopt
from tests.support.paths import ROOT

CORE = sorted(path for path in (ROOT / "graphopt").rglob("*.py") if "passes" not in path.relative_to(ROOT).parts)
PASSES = sorted((ROOT / "passes").glob("*.py"))


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, also inside of functions, with the names taken from it."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} has a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def attributes(path: Path) -> Iterator[tuple[str, int]]:
    """Every dotted name that a file reads."""
    for node in _nodes(path):
        parts, current = [], node
        while isinstance(current, ast.Attribute):
            parts.append(current.attr)
            current = current.value
        if parts and isinstance(current, ast.Name):
            yield ".".join([current.id, *reversed(parts)]), node.lineno


# --- the link --------------------------------------------------------------------------------------------------------


def test_the_folder_passes_is_the_package() -> None:
    link = ROOT / "graphopt" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")
    import graphopt.passes

    assert Path(graphopt.passes.__file__).resolve() == ROOT / "passes" / "__init__.py"


def test_plain_passes_cannot_be_imported() -> None:
    done = run("-c", "import passes", cwd=ROOT)
    assert done.returncode == 1
    assert "ImportError: import graphopt.passes, not passes" in done.stderr


# --- the distribution ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the files that packaging reads."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("graphopt", "passes"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    done = run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), cwd=folder)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_the_passes_and_nothing_else_beside_graphopt(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {f"graphopt/passes/{path.name}" for path in PASSES} <= names
    assert {str(path.relative_to(ROOT)) for path in CORE} <= names
    assert {name.split("/")[0] for name in names} == {"graphopt", f"graphopt-{graphopt.__version__}.dist-info"}
    assert all(wheel.read(f"graphopt/passes/{path.name}") == path.read_bytes() for path in PASSES)


def test_the_wheel_is_typed_versioned_and_licensed(wheel: zipfile.ZipFile) -> None:
    info = f"graphopt-{graphopt.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {graphopt.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "graphopt/py.typed" in wheel.namelist()
    assert any("LICENSE" in name for name in wheel.namelist())
    assert "recompute = graphopt.passes.recompute:Recompute" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_wheel_works_where_there_is_no_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import graphopt, graphopt.passes\n"
        "print(graphopt.__file__, graphopt.passes.__file__, graphopt.passes.Recompute('a'))"
    )
    done = run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(tmp_path / "graphopt" / "__init__.py"),
        str(tmp_path / "graphopt" / "passes" / "__init__.py"),
        "recompute{checkpoints=a}",
    ]


def test_the_installed_version_is_the_packages() -> None:
    assert version("graphopt") == graphopt.__version__


def test_every_pass_is_registered_and_exported() -> None:
    import graphopt.passes

    registered = {entry.value for entry in entry_points(group="graphopt.passes") if entry.dist.name == "graphopt"}
    exported = {getattr(graphopt.passes, name) for name in graphopt.passes.__all__}
    assert registered == {f"{cls.__module__}:{cls.__name__}" for cls in exported}


# --- which way imports point -----------------------------------------------------------------------------------------


def found(paths: list[Path], wrong: Callable[[str], bool]) -> list[str]:
    """``file:line: name`` of every import and dotted name that is wrong."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in paths for name, line in (*imports(path), *attributes(path)) if wrong(name)
    ]  # fmt: skip


def private(name: str) -> bool:
    """Whether a dotted name goes through a private module of torch."""
    parts = name.split(".")
    return parts[0] == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts[1:3])


def test_the_core_knows_no_particular_pass() -> None:
    assert len(CORE) > 20
    assert found(CORE, lambda name: name.startswith("graphopt.passes")) == []


def test_a_pass_imports_no_other_pass() -> None:
    assert found([p for p in PASSES if p.name != "__init__.py"], lambda name: name.startswith("graphopt.passes")) == []


def test_torchs_private_modules_are_used_in_one_folder() -> None:
    inside = [path for path in CORE if ROOT / "graphopt" / "_torch" in path.parents]
    assert found(inside, private)
    assert found([path for path in (*CORE, *PASSES) if path not in inside], private) == []


def test_an_older_torch_is_refused_before_what_it_lacks_is_imported() -> None:
    code = "import sys, torch; torch.__version__ = '2.10.1'; sys.modules['torch._functorch.aot_autograd'] = None"
    done = run("-c", f"{code}; import graphopt; graphopt.optimize", cwd=ROOT)
    assert done.stderr.splitlines()[-1].startswith("ImportError: graphopt needs torch >= 2.11, and 2.10.1 is installed")


@pytest.mark.sweep
def test_importing_graphopt_imports_no_pass_and_no_command_line() -> None:
    code = "import sys, graphopt; print([m for m in sys.modules if m.startswith(('graphopt.passes', 'graphopt.cli'))])"
    assert run("-c", code, cwd=ROOT).stdout.strip() == "[]"


WRONG_IMPORTS = {
    "up, inside a function": ("ir/names.py", "def f():\n    from graphopt.analysis import liveness as liveness\n"),
    "up, for type checking": (
        "planning/search/cuts.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from graphopt.ir.program import Program as Program\n",
    ),
    "in a circle": ("ir/node.py", "def f():\n    from graphopt.ir import program as program\n"),
    "the package for users": ("report/register.py", "import graphopt as graphopt\n"),
    "a pass by the framework": (
        "cli/commands/plan.py",
        "def f():\n    import graphopt.passes.recompute as recompute\n",
    ),
    "torch by the planner": ("planning/problem.py", "import torch as torch\n"),
}


_ALSO = [pytest.param(wrong, marks=pytest.mark.sweep) for wrong in list(WRONG_IMPORTS)[1:]]


@pytest.mark.sweep(cases=("None",))
@pytest.mark.parametrize("wrong", [None, next(iter(WRONG_IMPORTS)), *_ALSO])
def test_lint_checks_which_way_imports_run(tmp_path: Path, wrong: str | None) -> None:
    for name in ("graphopt", "passes", "pyproject.toml"):
        source, copy = ROOT / name, tmp_path / name
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    if wrong is not None:
        file, text = WRONG_IMPORTS[wrong]
        path = tmp_path / "graphopt" / file
        path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (wrong is None), done.stdout
    assert ("broken" in done.stdout) or "KEPT" in done.stdout


def test_a_file_is_found_by_its_name_alone() -> None:
    names = [path.name for path in (*CORE, *PASSES) if path.name != "__init__.py"]
    assert [name for name in names if names.count(name) > 1] == []


def test_the_root_of_the_package_stays_small() -> None:
    beside = {"__pycache__", "py.typed", "passes", "ARCHITECTURE.md", "README.md"}
    entries = {path.name for path in (ROOT / "graphopt").iterdir()} - beside
    assert len(entries) <= 13, entries
