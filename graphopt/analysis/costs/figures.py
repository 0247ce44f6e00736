"""Figures measured on one machine, kept in memory and in a JSON file, so that nothing is measured twice.

There is one file for each device name, release of torch and number of threads. A file that cannot be read is logged,
measured again and replaced; a folder that cannot be written is logged once, and figures then live in memory only.

A figure that was taken while the machine did other work is kept with a mark: this process uses it, and the next one
measures again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import uuid
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from graphopt.analysis.costs.device_names import near_devices
from graphopt.errors import GraphoptError, did_you_mean

__all__ = ["Figure", "Figures", "cache_folder", "device_here", "device_name", "figures_of", "remeasure"]

logger = logging.getLogger(__name__)

Section = Literal["seconds", "profile", "bandwidth"]
_SECTIONS: tuple[Section, ...] = ("seconds", "profile", "bandwidth")
_FORMAT = 2


class Figure(NamedTuple):
    """A measured number, and whether it is doubtful: taken while other work disturbed every run."""

    value: float
    doubtful: bool = False

    def rate(self, work: float) -> Figure:
        """So much work for each of the seconds that this figure is."""
        return Figure(work / self.value, self.doubtful)


_Values = dict[Section, dict[str, Figure]]
_opened: dict[tuple[Path | None, str], Figures] = {}
_fresh = False


class Figures:
    """The figures of one device; every figure is a positive number.

    Args:
        path: the file; None keeps the figures in memory.
        identity: what the figures hold for; a file that says something else is not used.
        fresh: take no figure from the file; those that are measured now replace what is there.

    Attributes:
        late: the keys of seconds that this process has had no time to measure.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, str], *, fresh: bool = False) -> None:
        self._path = path
        self._identity = dict(identity)
        self.late: set[str] = set()
        self._values: _Values = {section: {} for section in _SECTIONS}
        if not fresh:
            for section, values in self._read().items():
                self._values[section] = {key: figure for key, figure in values.items() if not figure.doubtful}
        self._changed = False

    def get(self, section: Section, key: str) -> Figure | None:
        """The figure called ``key``, or None where it is not known; doubtful ones are those of this process."""
        return self._values[section].get(key)

    def put(self, section: Section, key: str, figure: Figure) -> None:
        """Remember a figure; ``save`` writes it."""
        self._values[section][key] = figure
        self._changed = True

    def once(self, section: Section, key: str, measure: Callable[[], Figure]) -> float:
        """The figure called ``key``; measured where it is not known."""
        found = self.get(section, key)
        if found is None:
            found = measure()
            self.put(section, key, found)
        return found.value

    def save(self) -> None:
        """Write all figures beside what other processes have written in the meantime; the file is replaced at once.

        A doubtful figure does not take the place of one that is not. Of two processes that save at the same moment, one
        can lose what it wrote until it saves again.
        """
        if self._path is None or not self._changed:
            return
        merged = self._read()
        for section, values in merged.items():
            for key, figure in self._values[section].items():
                if not figure.doubtful or values.get(key, figure).doubtful:
                    values[key] = figure
        try:
            _replace(self._path, json.dumps({"format": _FORMAT, **self._identity, **_as_json(merged)}, indent=1))
        except OSError as error:
            logger.warning("measured costs cannot be written to %s (%s); they are kept in memory", self._path, error)
            self._path = None
        self._changed = False

    def _read(self) -> _Values:
        found: _Values = {section: {} for section in _SECTIONS}
        if self._path is None:
            return found
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ValueError("it does not hold an object")
        except FileNotFoundError:
            return found
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("measured costs in %s cannot be read (%s); they are measured again", self._path, error)
            return found
        if {key: data.get(key) for key in ("format", *self._identity)} != {"format": _FORMAT, **self._identity}:
            logger.warning("measured costs in %s are another machine's or format's; they are replaced", self._path)
            return found
        doubtful = _doubtful_keys(data.get("doubtful"))
        for section in _SECTIONS:
            values = self._checked(data.get(section), section)
            found[section] = {key: Figure(value, key in doubtful[section]) for key, value in values.items()}
        return found

    def _checked(self, values: Any, section: Section) -> dict[str, float]:
        if not isinstance(values, dict):
            logger.warning("measured costs in %s have no %r; they are measured again", self._path, section)
            return {}
        good = {key: float(value) for key, value in values.items() if _is_figure(value)}
        if len(good) < len(values):
            wrong = len(values) - len(good)
            logger.warning("%d of the %s in %s are not positive numbers; left out", wrong, section, self._path)
        return good


def _as_json(values: _Values) -> dict[str, Any]:
    """The figures by section, and the keys of the doubtful ones."""
    numbers: dict[str, Any] = {
        section: {key: figure.value for key, figure in found.items()} for section, found in values.items()
    }
    marked = {section: [key for key, figure in found.items() if figure.doubtful] for section, found in values.items()}
    return {**numbers, "doubtful": {section: keys for section, keys in marked.items() if keys}}


def _doubtful_keys(marked: Any) -> dict[Section, set[str]]:
    """The keys of the doubtful figures that a file lists; what is not a list of texts marks nothing."""
    lists = marked if isinstance(marked, dict) else {}
    return {
        section: {key for key in lists[section] if isinstance(key, str)}
        if isinstance(lists.get(section), list)
        else set()
        for section in _SECTIONS
    }


def _is_figure(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value)) and value > 0
    except OverflowError:  # a whole number beyond all floats
        return False


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.stem}-{uuid.uuid4().hex}.tmp")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise


def cache_folder() -> Path | None:
    """Where the files are: ``$GRAPHOPT_CACHE``, else ``$XDG_CACHE_HOME/graphopt``, else ``~/.cache/graphopt``.

    None where there is no home directory either.
    """
    if chosen := os.environ.get("GRAPHOPT_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore other values
        return Path(base) / "graphopt"
    try:
        return Path.home() / ".cache" / "graphopt"
    except RuntimeError:
        return None


def figures_of(device: torch.device, *, cache: bool = True) -> Figures:
    """The figures of a device of this machine, as it is used now (number of threads).

    Args:
        device: cpu or a CUDA device.
        cache: False gives an empty collection that is not kept.
    """
    name = device_name(device)
    if not cache:
        return Figures(None, {})
    identity = {"device": name, "torch": torch.__version__, "threads": str(torch.get_num_threads())}
    slug = "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in identity.values())
    folder = cache_folder()
    path = None if folder is None else folder / f"{slug}.json"
    key = (path, slug)
    if key not in _opened:
        _opened[key] = Figures(path, identity, fresh=_fresh)
    return _opened[key]


def remeasure() -> None:
    """Measure anew from now on: this process takes no figure that was measured before, and replaces those it needs.

    For a machine that has changed, or figures that were taken while it had other work.
    """
    global _fresh
    _fresh = True
    _opened.clear()


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_here(device: torch.device | str) -> torch.device:
    """The device of that name, which can be measured.

    Raises:
        GraphoptError: for a device that this machine does not have, or of a kind other than cpu and cuda.
    """
    try:
        place = torch.device(device)
    except RuntimeError as error:
        here = ["cpu", *(f"cuda:{index}" for index in range(_gpus()))]
        near = did_you_mean(device, [*here, "cuda"]) or f"devices here are {', '.join(here)}"
        known = near_devices(str(device))
        figures = f"; figures of {', '.join(known)} come with graphopt, for --device and cost=" if known else ""
        raise GraphoptError(f"{device!r} is not a device that is here; {near}{figures}") from error
    cuda = _gpus() if place.type == "cuda" else 0
    if place.type != "cpu" and (place.index or 0) >= cuda:
        raise GraphoptError(
            f"nothing can be measured on {str(place)!r} here: only this machine's cpu and cuda devices can be; give "
            "the profile of the device instead (graphopt.analysis.costs.cost.PROFILES, or a DeviceProfile of your own)"
        )
    return place


def device_name(device: torch.device) -> str:
    """What a device is called; measured figures hold for devices of the same name."""
    place = device_here(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else _cpu_name()


@cache
def _cpu_name() -> str:
    model = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{found.group(1) if found else model} {torch.backends.cpu.get_cpu_capability()} {os.cpu_count()} cores"
