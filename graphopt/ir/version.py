"""Which graphopt this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]


def _installed() -> str:
    try:
        return version("graphopt")
    except PackageNotFoundError:
        return "unknown"  # a checkout on the path that was never installed


VERSION = _installed()
"""The version of the installed package; ``unknown`` where it runs from a folder without being installed."""
