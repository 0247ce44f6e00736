"""What a command line names, looked at before torch is imported: targets, and files to read and to write."""

from __future__ import annotations

import argparse
import importlib.util
import pkgutil
import sys
from pathlib import Path

from graphopt.analysis.costs.device_names import is_profile_file
from graphopt.cli.arguments.exit_codes import UsageError
from graphopt.errors import did_you_mean

__all__ = ["KEYS", "PREFIX", "RETURNS", "check_named", "near_modules", "place_of"]

PREFIX = "hf:"
"""How a target that is a configuration begins."""

KEYS = ("model", "example_inputs", "kwargs", "loss", "optimizer", "dynamic_shapes")
"""Of the dict that a factory may return."""

RETURNS = f"(model, example_inputs), or a dict with the keys {', '.join(KEYS)} (all but model optional)"


def check_named(options: argparse.Namespace) -> None:
    """Refuse a target, a file to read or a folder to write to that is not there, before there is work to lose.

    Raises:
        UsageError: with the near names, or what to write.
    """
    target = getattr(options, "target", None)
    for text in (*([] if target is None else [target]), *getattr(options, "calls", ())):
        _check_target(text)
    config = getattr(options, "config", None)
    if config is not None:
        _check_file(config)
    for text in (getattr(options, "device", None), getattr(options, "cost", None)):
        if text is not None and is_profile_file(text):
            _check_file(Path(text), f"graphopt profile -o {Path(text).name} writes one")
    output = getattr(options, "output", None)
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"cannot write {output}: there is no folder {output.parent}")
    if output is not None and output.is_dir():
        raise UsageError(f"cannot write {output}: it is a folder")


def place_of(text: str) -> tuple[str, bool, str]:
    """Where a target is: a module or a file, whether it is a file, and the name of the factory there.

    Raises:
        UsageError: for text of another form, and for a file that is not there.
    """
    place, colon, factory = text.rpartition(":")
    if not (colon and place and factory):
        raise UsageError(
            f"{text!r} names no factory: write pkg.module:factory or path/file.py:factory, where factory is a function "
            f"without arguments that returns {RETURNS}"
        )
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    if is_file:
        _check_file(Path(place), f"the working directory is {Path.cwd()}", near="*.py")
        if importlib.util.spec_from_file_location("target", place) is None:
            raise UsageError(f"{place!r} is no Python file: its name must end in .py")
    return place, is_file, factory


def near_modules(name: str) -> str:
    """The modules that were probably meant by a name that is none, or where modules are looked for."""
    parent = name.rpartition(".")[0]
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else [str(Path.cwd())]
    if folders is None:
        return f"{parent!r} is a module, not a package"
    near = did_you_mean(name, [f"{parent}.{found.name}".lstrip(".") for found in pkgutil.iter_modules(folders)])
    return near or f"modules are looked for in {', '.join(map(str, folders))} and among the installed packages"


def _check_target(text: str) -> None:
    if text.startswith(PREFIX):
        _check_file(Path(text.removeprefix(PREFIX)), "write hf:FILE.json", near="*.json")
        return
    place, is_file, _ = place_of(text)
    package = place.partition(".")[0]
    here = Path(package).is_dir() or Path(f"{package}.py").is_file()
    if not (is_file or here or package in sys.modules or _is_installed(package)):
        raise UsageError(f"there is no module {package!r}; {near_modules(package)}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # no name of a module; importing it says what is wrong
        return True


def _check_file(path: Path, hint: str = "", near: str = "") -> None:
    """Refuse a file that is not there.

    Args:
        path: of the file.
        hint: what to write, or where files are looked for.
        near: the files beside it whose names may have been meant, as a glob.
    """
    if path.exists() and not (near and path.is_dir()):
        return
    beside = [file.name for file in path.parent.glob(near)] if near and path.parent.is_dir() else []
    hint = did_you_mean(path.name, beside) or hint
    raise UsageError(f"there is no file {str(path)!r}{hint and f'; {hint}'}")
