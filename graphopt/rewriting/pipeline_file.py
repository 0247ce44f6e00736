"""Pipelines in files: TOML, JSON and YAML, each value checked and none evaluated.

Files may come from strangers: what a pass writes goes nowhere that the user has not named.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from graphopt.errors import ArgumentError, GraphoptError, PipelineError, check_type, did_you_mean
from graphopt.ir.files.toml_text import read_toml, toml_text
from graphopt.rewriting.registry import find_pass
from graphopt.rewriting.text.pass_data import passes_from_data, passes_to_data
from graphopt.rewriting.text.spec import option_fields
from graphopt.rewriting.text.yaml_text import read_yaml, yaml_text

__all__ = ["SUFFIXES", "check_writes", "passes_as_text", "read_document", "read_passes"]

_LARGEST = 1_000_000
"""Bytes of a file; a pipeline takes some hundred."""

SUFFIXES = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""Which format a file has, by the end of its name."""


def read_passes(path: str | os.PathLike[str], *, allow_write: str | os.PathLike[str] | None = None) -> list[Any]:
    """The passes that a file describes, in its order.

    Args:
        path: of a ``.toml``, ``.json``, ``.yaml`` or ``.yml`` file.
        allow_write: as for ``check_writes``.

    Raises:
        PipelineError: listing everything that is wrong, each with its path in the file and, where that is clear, its
            line; for a place to write to that is not allowed.
        GraphoptError: for a file that is not there, too large, of another kind, or not of the form its name says.
    """
    path = Path(path)
    form = _form(str(path), path.suffix)
    text = _text_of(path, form)
    document = _parsed(text, path, form)
    try:
        passes = passes_from_data(document, find_pass)
    except PipelineError as error:
        problems = _indented(_with_lines(str(error), text))
        raise PipelineError(f"{str(path)!r} is not a pipeline:\n{problems}{_elsewhere(document)}") from None
    check_writes(passes, str(path), allow_write, _HOW)
    return passes


_HOW = "graphopt.configs.load(..., allow_write=FOLDER) or, on the command line, --allow-write FOLDER"


def check_writes(passes: Iterable[Any], source: str, allow_write: str | os.PathLike[str] | None, how: str) -> None:
    """Refuse passes from a file that write where the user has not said that files may go.

    Args:
        passes: as a file describes them.
        source: the file.
        allow_write: a folder in which and below which they may write, beside that of ``GRAPHOPT_DUMP``.
        how: what the user writes to allow one.

    Raises:
        ArgumentError: where ``allow_write`` is no path.
        PipelineError: naming the pass, its option and the place, links and ``..`` followed.
    """
    if allow_write is not None:
        check_type("allow_write", allow_write, (str, os.PathLike), "the path of a folder")
    run = os.environ.get("GRAPHOPT_DUMP")
    named = [os.fspath(folder) for folder in (run, allow_write) if folder]
    allowed = [os.path.realpath(folder) for folder in named]
    for item, option, given in _written(passes):
        try:
            place = os.path.realpath(given)
        except ValueError as error:
            raise PipelineError(f"{source!r}: {item.name}'s {option}={given!r} is no path: {error}") from None
        if not any(Path(place).is_relative_to(folder) for folder in allowed):
            there = "" if place == given else f", which is {place!r}"
            below = f"; allowed is what is below {' and '.join(map(repr, named))}" if named else ""
            raise PipelineError(
                f"{source!r}: {item.name} is to write to {option}={given!r}{there}, and a file does not say where "
                f"files go{below}\n  what to do: allow a folder with {how}, or set GRAPHOPT_DUMP to one"
            )


def _written(passes: Iterable[Any]) -> Iterator[tuple[Any, str, str]]:
    """The places that options of passes name to be written to: the pass, its option, the place."""
    for item in passes:
        for option in option_fields(type(item)):
            value = getattr(item, option.field)
            if option.writes and value:
                yield from ((item, option.name, each) for each in (value if isinstance(value, tuple) else (value,)))


def passes_as_text(passes: Iterable[Any], suffix: str) -> str:
    """What a file with this suffix holds to describe passes.

    Raises:
        GraphoptError: for another suffix, and for a pass that would not be found by its name.
    """
    form = _form(f"*{suffix}", suffix)
    data = passes_to_data(list(passes), find_pass, null=form != "TOML")
    if form == "TOML":
        return toml_text(data)
    return yaml_text(data) if form == "YAML" else json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def read_document(path: Path, form: str = "") -> Any:
    """The plain data in a file: objects, lists, texts, numbers, truth values and nothing.

    Args:
        path: of the file.
        form: ``TOML``, ``JSON`` or ``YAML``; by default what the end of its name says.

    Raises:
        GraphoptError: for a file that is not there, cannot be read, is too large, of another kind, not of the form that
            its name says, or nested too deeply.
    """
    form = form or _form(str(path), path.suffix)
    return _parsed(_text_of(path, form), path, form)


def _text_of(path: Path, form: str) -> str:
    """What a file holds, which is to be of a form."""
    try:
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise GraphoptError(f"{str(path)!r} has {path.stat().st_size:,} bytes; at most {_LARGEST:,} are read")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GraphoptError(f"there is no file {str(path)!r}") from None
    except OSError as error:
        raise GraphoptError(f"the file {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise GraphoptError(f"{str(path)!r} is not {form}: it is no text in UTF-8 ({error.reason})") from None


def _parsed(text: str, path: Path, form: str) -> Any:
    try:
        return _READERS[form](text)
    except RecursionError:
        raise GraphoptError(f"{str(path)!r} is nested too deeply") from None
    except ValueError as error:  # of which those of json and tomllib are
        raise GraphoptError(f"{str(path)!r} is not {form}: {error}") from None


def _form(name: str, suffix: str) -> str:
    form = SUFFIXES.get(suffix.lower())
    if form is None:
        hint = did_you_mean(suffix, SUFFIXES) or f"known are {', '.join(SUFFIXES)}"
        raise ArgumentError(f"{name!r}: the end of its name says which format a configuration file has; {hint}")
    return form


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_entries)


def _entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r:.80} stands twice in one object")
    return found


_READERS: dict[str, Callable[[str], Any]] = {"TOML": read_toml, "JSON": _read_json, "YAML": read_yaml}


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


_PLACE = re.compile(r"""\$(?:\.\w+|\[\d+\]|\['[^']*'\]|\["[^"]*"\])*""")
_LAST_NAME = re.compile(r"""(?:\.(\w+)|\['([^']*)'\])(?:\[\d+\])*$""")


def _with_lines(problems: str, text: str) -> str:
    """Problems with the line of the text behind their paths, where the last name of a path stands in one line only."""
    lines = text.splitlines()

    def located(match: re.Match[str]) -> str:
        found = _LAST_NAME.search(match[0])
        name = re.escape((found[1] or found[2]) if found else "")
        stands = re.compile(rf"(?<![\w-]){name}(?![\w-])") if name else None
        at = [number for number, line in enumerate(lines, 1) if stands is not None and stands.search(line)]
        return f"{match[0]} (line {at[0]})" if len(at) == 1 < len(lines) else match[0]

    return "\n".join(_PLACE.sub(located, problem, count=1) for problem in problems.splitlines())


def _elsewhere(document: Any) -> str:
    """The door for what others call a configuration."""
    if not isinstance(document, dict) or "passes" in document:
        return ""
    marks = {
        "from_deepspeed": {"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "fp16", "bf16"},
        "from_paddle": {"recompute_configs", "amp_configs", "dgc_configs", "localsgd_configs", "sharding_configs"},
    }
    for name, fields in marks.items():
        if fields & set(document):
            return f"\n  graphopt.configs.{name} reads such a file"
    return ""
