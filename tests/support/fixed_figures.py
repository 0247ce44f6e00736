"""Figures of a machine for all tests, so that no plan depends on how fast, or how busy, the one is that runs them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from graphopt.analysis.costs.figures import Figure, Section, figures_of

__all__ = ["FIGURES", "keep_figures"]

FIGURES: Mapping[Section, Mapping[str, float]] = {
    "profile": {
        "flops torch.float32": 120e9,
        "flops torch.float64": 60e9,
        "flops torch.bfloat16": 240e9,
        "flops torch.float16": 120e9,
        "memory_bandwidth": 16e9,
        "overhead": 2.5e-6,
    },
    "bandwidth": {"host": 8e9, f"disk {Path(tempfile.gettempdir()).resolve()}": 1e9},
}
"""Per second: floating-point operations and bytes; ``overhead`` in seconds. One thread of a CPU, and its disk."""


def keep_figures() -> None:
    """Write ``FIGURES`` where those of this machine's CPU would be, for this process and those that it starts."""
    figures = figures_of(torch.device("cpu"))
    for section, values in FIGURES.items():
        for key, value in values.items():
            figures.put(section, key, Figure(value))
    figures.save()
