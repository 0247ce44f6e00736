"""What the planner is given, checked where it enters: types, signs, and what to write in place of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from graphopt.errors import check_type, whole_number, wrong_argument

__all__ = ["check_budget_bytes", "check_indices", "check_quantity", "check_seconds", "check_sizes"]


def check_indices(argument: str, value: object) -> None:
    """Refuse what is no tuple of indices.

    Raises:
        ArgumentError: with how to write one.
    """
    if not isinstance(value, tuple):
        hint = f"write ({value},)" if isinstance(value, int) else ""
        raise wrong_argument(argument, value, "a tuple of indices, such as (0, 1)", hint)
    for item in value:
        if type(item) is not int:
            whole_number(f"an index in {argument}", item)


def check_quantity(argument: str, value: object) -> None:
    """Refuse what is no number of bytes.

    Raises:
        ArgumentError: for a negative number as well.
    """
    if type(value) is not int or value < 0:
        check_type(argument, value, int, "a whole number of bytes")
        whole_number(argument, value, of="bytes")


def check_seconds(argument: str, value: object) -> None:
    """Refuse what is no number of seconds: text, negative numbers, infinity.

    Raises:
        ArgumentError: with what it got.
    """
    if type(value) is not float or not 0 <= value < math.inf:
        check_type(argument, value, (int, float), "a number of seconds")
        assert isinstance(value, (int, float))
        if not 0 <= value < math.inf:
            raise wrong_argument(argument, value, "a number of seconds of at least 0")


def check_sizes(sizes: object, held: object) -> None:
    """Refuse sizes and ends of life of another form.

    Raises:
        ArgumentError: naming the value.
    """
    if not isinstance(sizes, tuple):
        raise wrong_argument("Problem's sizes", sizes, "a tuple of bytes, one for each value")
    for value, size in enumerate(sizes):
        check_quantity(f"Problem's sizes[{value}]", size)
    hint = "write held={value: operation}"
    check_type("Problem's held", held, Mapping, "a dict of values and the operations that they live for", hint)


def check_budget_bytes(argument: str, value: object) -> int:
    """A budget of a plan.

    Raises:
        ArgumentError: for text, negative numbers and fractions of a byte.
    """
    if isinstance(value, str):
        raise wrong_argument(argument, value, "a whole number of bytes", "8GB is 8 * 10**9")
    return whole_number(argument, value, of="bytes")
