"""Other people's configurations as plain data: from a mapping, or from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptError, check_type
from graphopt.rewriting.pipeline_file import SUFFIXES, read_document

__all__ = ["configuration"]

_DEEPEST = 100


def configuration(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """A configuration as objects and lists.

    Args:
        config: a mapping, or the path of a file: TOML or YAML where its name says so, else JSON.

    Raises:
        GraphoptError: for a file that cannot be read, and for one that holds no object.
    """
    if isinstance(config, Mapping):
        plain: dict[str, Any] = _plain(config)
        return plain
    check_type("config", config, (str, os.PathLike), "a mapping, or the path of a file")
    path = Path(config)
    found = read_document(path, SUFFIXES.get(path.suffix.lower(), "JSON"))
    if not isinstance(found, dict):
        raise GraphoptError(f"{str(path)!r} holds a {type(found).__name__}, and must hold an object")
    return found


def _plain(value: Any, depth: int = 0) -> Any:
    """A value with lists for tuples and objects for mappings, as a file would hold it."""
    if depth > _DEEPEST:
        raise GraphoptError(f"the configuration is nested more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        return {name: _plain(item, depth + 1) for name, item in value.items()}
    return [_plain(item, depth + 1) for item in value] if isinstance(value, (list, tuple)) else value
