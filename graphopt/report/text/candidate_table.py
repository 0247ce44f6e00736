"""The tensors that separate a network, as a table and as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from graphopt.ir.files.text import short_source
from graphopt.ir.node import Candidate
from graphopt.ir.words.columns import aligned
from graphopt.ir.words.written_units import format_bytes

__all__ = ["candidates_json", "candidates_text"]


def candidates_text(candidates: Sequence[Candidate]) -> str:
    """One line per candidate, in program order: what keeping it costs, what need not be kept before it, its line."""
    head = ("name", "keeps", "saves", "source")
    rows = [(c.name, format_bytes(c.bytes), format_bytes(c.saves), short_source(c.source)) for c in candidates]
    count = "1 checkpoint candidate" if len(rows) == 1 else f"{len(rows)} checkpoint candidates"
    return "\n".join([*aligned([head, *rows], right=(1, 2)), f"{count}; saves: bytes between the one before and it"])


def candidates_json(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The same as plain data: ``name``, ``node``, ``bytes``, ``saves`` and ``source``; sizes are bytes."""
    return [dataclasses.asdict(candidate) for candidate in candidates]
