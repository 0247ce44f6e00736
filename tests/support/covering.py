"""All combinations of some values: `make test` runs as many as show every value once, `make sweep` the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["covering", "some_of"]


def covering(**axes: Mapping[str, Any] | Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations, most of which are marked ``sweep``.

    Of the longest axis every value stays, with the values of the other axes in turn.

    Args:
        axes: by the name of a parameter its values, by their ids where the values do not read well.
    """
    named = [_with_ids(values) for values in axes.values()]
    longest = max(map(len, named))
    kept = {tuple(index % len(values) for values in named) for index in range(longest)}
    made = [
        pytest.param(
            *(values[place][1] for place, values in zip(places, named, strict=True)),
            id="-".join(values[place][0] for place, values in zip(places, named, strict=True)),
            marks=() if places in kept else pytest.mark.sweep,
        )
        for places in product(*(range(len(values)) for values in named))
    ]
    return pytest.mark.parametrize(tuple(axes), made)


def _with_ids(values: Mapping[str, Any] | Sequence[Any]) -> list[tuple[str, Any]]:
    return list(values.items()) if isinstance(values, Mapping) else [(str(value), value) for value in values]


def some_of(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values for ``pytest.mark.parametrize``; all that are not ``kept`` are marked ``sweep``.

    Raises:
        ValueError: one that is kept is not among the values.
    """
    known = list(values)
    if unknown := [value for value in kept if value not in known]:
        raise ValueError(f"{unknown} are not among {known}")
    return [pytest.param(value, marks=() if value in kept else pytest.mark.sweep) for value in known]
