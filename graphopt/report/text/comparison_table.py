"""How far a rewritten program is from the original, and what was found to be kept in float32, as text and as data."""

from __future__ import annotations

import math
from typing import Any

from graphopt.ir.ops.values import DTYPE_NAMES
from graphopt.ir.words.columns import aligned
from graphopt.runtime.comparison.bisect import Denied
from graphopt.runtime.comparison.granularity import By
from graphopt.runtime.comparison.tensor_errors import Comparison, TensorError

__all__ = ["SCHEMA_VERSION", "comparison_json", "comparison_text", "denied_json", "denied_text"]

SCHEMA_VERSION = 1
"""Of what ``comparison_json`` and ``denied_json`` return."""

_HEAD = ("tensor", "kind", "type", "max error", "relative", "overflow", "underflow")
_NORM = "relative errors are ‖after - before‖ / ‖before‖ in the 2-norm"
_SHOWN_SKIPPED = 5


def comparison_text(comparison: Comparison, limit: int | None = None) -> str:
    """A table, worst first; shares that are zero are left blank.

    Args:
        comparison: what to show.
        limit: how many tensors are listed; all by default.
    """
    rows = comparison.tensors
    if not rows:
        return "no tensors were compared\n" + _skipped(comparison)
    equal = sum(row.bitwise for row in rows)
    if comparison.bitwise:
        head = f"all {len(rows)} tensors are bitwise equal"
    else:
        head = f"{_count(len(rows), 'tensor')}, worst first, {equal} of them bitwise equal; {_NORM}"
    shown = rows[:limit]
    cells = [_row(row) for row in shown]
    titles = tuple(title if any(row[column] for row in cells) else "" for column, title in enumerate(_HEAD))
    lines = [head, "", *aligned([titles, *cells], right=(3, 4, 5, 6))] if cells else [head]
    lines += [f"and {len(rows) - len(shown)} more, none of them worse"] if len(shown) < len(rows) else []
    return "\n".join(lines) + "\n" + _skipped(comparison)


def _row(row: TensorError) -> tuple[str, ...]:
    errors = ("0", "bitwise equal") if row.bitwise else (_number(row.max_error), _number(row.relative_error))
    return (row.name, row.kind, _types(row), *errors, _share(row.overflow), _share(row.underflow))


def _types(row: TensorError) -> str:
    before, after = (DTYPE_NAMES.get(d, str(d).removeprefix("torch.")) for d in (row.before, row.after))
    sizes = ", ".join(map(str, row.shape))
    return f"{before}[{sizes}]" if before == after else f"{before} -> {after}[{sizes}]"


def _number(value: float) -> str:
    return f"{value:.2e}" if value and math.isfinite(value) else f"{value:g}"


def _share(value: float) -> str:
    if not value:
        return ""
    return f"{value:.1%}" if value >= 0.0005 else "<0.1%"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _skipped(comparison: Comparison) -> str:
    lines = [f"  {line}" for line in comparison.skipped[:_SHOWN_SKIPPED]]
    if not lines:
        return ""
    rest = len(comparison.skipped) - len(lines)
    more = [f"  and {rest} more"] if rest else []
    return "\n".join(["", "not compared", *lines, *more]) + "\n"


def comparison_json(comparison: Comparison, limit: int | None = None) -> dict[str, Any]:
    """The same for machines, worst first.

    Returns:
        plain data: ``version``, ``bitwise``, ``compared`` (how many tensors), ``tensors`` (the first ``limit`` of them)
        and ``skipped``. Errors are numbers, or the text ``inf``; shares are from 0 to 1.
    """
    return {
        "version": SCHEMA_VERSION,
        "bitwise": comparison.bitwise,
        "compared": len(comparison.tensors),
        "tensors": [_row_json(row) for row in comparison.tensors[:limit]],
        "skipped": list(comparison.skipped),
    }


def _row_json(row: TensorError) -> dict[str, Any]:
    return {
        "name": row.name,
        "kind": row.kind,
        "shape": list(row.shape),
        "dtype_before": str(row.before).removeprefix("torch."),
        "dtype_after": str(row.after).removeprefix("torch."),
        "max_error": _plain(row.max_error),
        "relative_error": _plain(row.relative_error),
        "overflow": row.overflow,
        "underflow": row.underflow,
        "bitwise": row.bitwise,
    }


def _plain(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "inf"


# --- what is kept in float32 -----------------------------------------------------------------------------------------


def denied_text(denied: Denied, candidates: int, by: By, tolerance: float, passes: str, what: str) -> str:
    """What to deny, how sure that is, and the passes to paste.

    Args:
        denied: what was found.
        candidates: how many there were to choose from.
        by: what the entries are.
        tolerance: on the relative error.
        passes: the text of the passes with these entries denied, quoted for a shell.
        what: which tensors are within the tolerance, in words.
    """
    trials = _count(denied.trials, "trial")
    kept = f"{what} within {tolerance:g}: {len(denied.entries)} of {_count(candidates, by)} in float32 ({trials})"
    if denied.interrupted:
        sure = "interrupted: a smaller set may do; this one was tried and holds the tolerance"
    elif denied.entries:
        sure = "verified: allowing any one of them again breaks the tolerance"
    else:
        sure = "nothing has to be kept in float32"
    return "\n".join([kept, sure, *(f"  {entry}" for entry in denied.entries), "", f"--passes {passes}"]) + "\n"


def denied_json(denied: Denied, candidates: int, by: By, tolerance: float, passes: str) -> dict[str, Any]:
    """The same for machines; ``passes`` is their text, not quoted, and comes back as ``passes_with_deny``."""
    return {
        "version": SCHEMA_VERSION,
        "by": by,
        "tolerance": tolerance,
        "candidates": candidates,
        "deny": list(denied.entries),
        "trials": denied.trials,
        "minimal": denied.minimal,
        "interrupted": denied.interrupted,
        "passes_with_deny": passes,
    }
