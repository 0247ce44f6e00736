"""What a budget is, as a number or as text; nothing here needs torch, so that the command line answers at once."""

from __future__ import annotations

import math
import re

from graphopt.errors import ArgumentError, wrong_argument
from graphopt.ir.words.written_units import parse_bytes

__all__ = ["PERCENT", "check_budget", "is_what_is_free"]

PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
"""A share of the peak, as text."""

_FORMS = "a number of bytes, text such as 8GB or 60%, or auto"
_WRITE = ": write a number such as 8_000_000_000, or text such as '8GB' or '60%'"
_NUMBER = re.compile(r"\s*\d*\.?\d*\s*")
_FEWEST = 256
"""Bytes below which a number is meant otherwise: no program is so small that a budget for it is a question."""


def is_what_is_free(budget: object) -> bool:
    """Whether a budget is ``"auto"``, which depends on the moment at which it is asked for."""
    return isinstance(budget, str) and budget.strip().lower() == "auto"


def check_budget(budget: object) -> None:
    """Refuse what is no budget: a number of bytes, ``"8GB"``, ``"512MiB"``, ``"60%"`` or ``"auto"``.

    Raises:
        ArgumentError: for a number that no program can be kept within, and for text of another form.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise wrong_argument("budget", budget, _FORMS)
    if not isinstance(budget, str):
        _check_number(budget)
    elif not is_what_is_free(budget):
        percent = PERCENT.fullmatch(budget)
        try:
            count = float(percent[1]) if percent else parse_bytes(budget)
        except ValueError as error:
            raise ArgumentError(f"budget={budget!r}: {error}, 60% (of the peak), or auto (what is free)") from None
        if percent and count == 0:
            raise ArgumentError(f"budget={budget!r} is nothing: no program runs in no bytes; write 60%")
        if not percent:
            _check_number(float(budget) if _NUMBER.fullmatch(budget) and "." in budget else count)


def _check_number(budget: float) -> None:
    """Refuse a number of bytes that is none, or that no program can be kept within."""
    meant = ""
    if 0 < budget <= 1 and isinstance(budget, float):
        meant = f"; did you mean '{budget:.0%}' of the peak?"
    elif 0 < budget < _FEWEST:
        meant = f"; did you mean '{budget:g}GB'?"
    if isinstance(budget, int) and budget >= 2**63:
        raise ArgumentError("budget is a number of bytes, and this one is more than any memory has")
    if not math.isfinite(budget) or budget < _FEWEST:
        raise ArgumentError(f"budget={budget!r} is no number of bytes that a program fits into{meant or _WRITE}")
    if budget != int(budget):
        raise ArgumentError(f"budget={budget!r}: bytes come in whole numbers{_WRITE}")
