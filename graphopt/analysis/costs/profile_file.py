"""Profiles of devices in files: TOML, every value checked and none evaluated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from graphopt.analysis.allocator.rules import CACHING, PLAIN, AllocatorRules
from graphopt.analysis.costs.device_names import is_profile_file
from graphopt.errors import ArgumentError, GraphoptError, shown
from graphopt.ir.files.checked_json import Field
from graphopt.ir.files.toml_text import read_toml, toml_text

__all__ = ["read_profile", "write_profile"]

_LARGEST = 1_000_000
"""Bytes of a file; a profile takes some thousand, and some hundred for each call whose temporaries it has."""

_NEEDED = ("name", "memory_bytes", "memory_bandwidth", "host_bandwidth", "overhead", "flops")
_BANDWIDTHS = ("memory_bandwidth", "host_bandwidth", "peer_bandwidth", "network_bandwidth", "disk_bandwidth")
_LATENCIES = ("network_latency", "peer_latency")
_COUNTS = ("memory_bytes", "context_bytes", "devices_per_host")
_OTHERS = ("kind", "efficiency", "allocator", "workspaces", "sources", "temporaries", "attention")
_KINDS = {"cuda": "cuda", "cpu": "cpu"}
_MOST_ITEMS, _LONGEST = 100, 1_000
_MOST_CALLS = 4_000
_LARGEST_COUNT = 2**60


def read_profile(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arguments of ``DeviceProfile`` that a file holds.

    Args:
        path: of a ``.toml`` file. Its rates and bandwidths are multiplied by its ``efficiency`` (by default 1), but
            for those of ``attention``, which are measured.

    Raises:
        GraphoptError: for a file that is not there, too large or no TOML, and for a field that is missing, unknown, of
            another type or out of range, with its place in the file.
    """
    path = Path(path)
    document = Field(_document(path))
    try:
        return _arguments(document)
    except GraphoptError as error:
        raise GraphoptError(f"{str(path)!r} is no profile of a device: {error}") from None


def write_profile(path: str | os.PathLike[str], arguments: Mapping[str, Any]) -> Path:
    """Write the arguments of ``DeviceProfile`` to a file that ``read_profile`` reads.

    Raises:
        ArgumentError: for a file whose name does not end in ``.toml``.
        GraphoptError: for a file that cannot be written.
    """
    path = Path(path)
    if not is_profile_file(path.name):
        raise ArgumentError(f"a profile is written as TOML, and {str(path)!r} does not end in .toml: name it so")
    data = {name: _plain(value) for name, value in arguments.items()}
    try:
        path.write_text(toml_text(data), encoding="utf-8")
    except OSError as error:
        raise GraphoptError(f"the file {str(path)!r} cannot be written: {error.strerror}") from None
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, AllocatorRules):
        return asdict(value)
    return dict(value) if isinstance(value, Mapping) else value


def _document(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise GraphoptError(f"{str(path)!r} is larger than the {_LARGEST:,} bytes that are read of a profile")
        return read_toml(content.decode("utf-8"))
    except FileNotFoundError:
        raise GraphoptError(f"there is no file {str(path)!r}; graphopt profile -o {path.name} writes one") from None
    except OSError as error:
        raise GraphoptError(f"the file {str(path)!r} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise GraphoptError(f"{str(path)!r} is nested too deeply") from None
    except ValueError as error:  # of which those of tomllib and of the decoder are
        raise GraphoptError(f"{str(path)!r} is not TOML: {error}") from None


def _arguments(document: Field) -> dict[str, Any]:
    given = document.parts(_NEEDED, (*_BANDWIDTHS, *_LATENCIES, *_COUNTS, *_OTHERS))
    efficiency = _efficiency(given)
    found: dict[str, Any] = {"name": _name(given["name"]), "overhead": given["overhead"].number()}
    found |= {name: efficiency * _rate(given[name]) for name in _BANDWIDTHS if name in given}
    found |= {name: _rate(given[name]) for name in _LATENCIES if name in given}
    found |= {name: given[name].whole(0, _LARGEST_COUNT) for name in _COUNTS if name in given}
    rates = given["flops"].entries(_MOST_ITEMS)
    found["flops"] = {dtype: efficiency * _rate(value) for dtype, value in rates}
    found["kind"] = given["kind"].one_of(_KINDS) if "kind" in given else "cpu"
    found["allocator"] = _allocator(given.get("allocator"), CACHING if found["kind"] == "cuda" else PLAIN)
    if "attention" in given:
        parts = given["attention"].parts((), ("forward", "backward", "tokens"))
        found["attention"] = {part: _rate(value) for part, value in parts.items()}
    if "workspaces" in given:
        sizes = given["workspaces"].entries(_MOST_ITEMS)
        found["workspaces"] = {library: size.whole(0, _LARGEST_COUNT) for library, size in sizes}
    if "temporaries" in given:
        calls = given["temporaries"].entries(_MOST_CALLS)
        found["temporaries"] = {call: size.whole(0, _LARGEST_COUNT) for call, size in calls}
    if "sources" in given:
        found["sources"] = tuple(source.text(_LONGEST) for source in given["sources"].items(_MOST_ITEMS))
    return found


def _name(field: Field) -> str:
    name = field.text(_LONGEST)
    if not name.strip() or not name.isprintable():
        raise field.error(f"a name that can be read on one line is needed, found {shown(name)}")
    return name


def _rate(field: Field) -> float:
    rate = field.number()
    if rate < 0:
        raise field.expected("a number of at least 0")
    return rate


def _efficiency(given: Mapping[str, Field]) -> float:
    if "efficiency" not in given:
        return 1.0
    share = given["efficiency"].number()
    if not 0 < share <= 1:
        raise given["efficiency"].expected("a share above 0 and up to 1")
    return share


def _allocator(field: Field | None, default: AllocatorRules) -> AllocatorRules:
    """The rules of a file; those that it leaves out are the default's."""
    if field is None:
        return default
    known = {rule.name: getattr(default, rule.name) for rule in fields(AllocatorRules)}
    given = field.parts((), tuple(known))
    switches = {name: value.truth() for name, value in given.items() if isinstance(known[name], bool)}
    pairs = {name: _pairs(value) for name, value in given.items() if isinstance(known[name], tuple)}
    rest = {name: value for name, value in given.items() if name not in switches and name not in pairs}
    least = {"max_split_size": 0}
    sizes = {name: value.whole(least.get(name, 1), _LARGEST_COUNT) for name, value in rest.items()}
    return AllocatorRules(**{**known, **switches, **sizes, **pairs})


def _pairs(field: Field) -> tuple[tuple[int, int], ...]:
    """Pairs of whole numbers: bytes, and divisions."""
    found = [[number.whole(0, _LARGEST_COUNT) for number in item.items(most=2)] for item in field.items(most=64)]
    if any(len(pair) != 2 for pair in found):
        raise field.expected("pairs of bytes and divisions")
    return tuple((start, divisions) for start, divisions in found)
