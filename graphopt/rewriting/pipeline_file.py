"""Pipelines in files: TOML, JSON and YAML, each value checked and none evaluated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from graphopt.errors import ArgumentError, GraphoptError, PipelineError, did_you_mean
from graphopt.ir.toml_text import read_toml, toml_text
from graphopt.rewriting.pass_data import passes_from_data, passes_to_data
from graphopt.rewriting.registry import find_pass
from graphopt.rewriting.yaml_text import read_yaml, yaml_text

__all__ = ["SUFFIXES", "passes_as_text", "read_document", "read_passes"]

_LARGEST = 1_000_000
"""Bytes of a file; a pipeline takes some hundred."""

SUFFIXES = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""Which format a file has, by the end of its name."""


def read_passes(path: str | os.PathLike[str]) -> list[Any]:
    """The passes that a file describes, in its order.

    Args:
        path: of a ``.toml``, ``.json``, ``.yaml`` or ``.yml`` file.

    Raises:
        PipelineError: listing everything that is wrong, each with its path in the file.
        GraphoptError: for a file that is not there, too large, of another kind, or not of the form its name says.
    """
    path = Path(path)
    document = read_document(path)
    try:
        return passes_from_data(document, find_pass)
    except PipelineError as error:
        raise PipelineError(
            f"{str(path)!r} is not a pipeline:\n{_indented(str(error))}{_elsewhere(document)}"
        ) from None


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
    try:
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise GraphoptError(f"{str(path)!r} has {path.stat().st_size:,} bytes; at most {_LARGEST:,} are read")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise GraphoptError(f"there is no file {str(path)!r}") from None
    except OSError as error:
        raise GraphoptError(f"the file {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise GraphoptError(f"{str(path)!r} is not {form}: it is no text in UTF-8 ({error.reason})") from None
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
