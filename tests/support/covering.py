"""Combinations of some values: `make test` runs as many as show every value once, `make sweep` every pair of values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["covering", "some_of"]


def covering(**axes: Mapping[str, Any] | Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over combinations that hold every pair of values, most of which are marked ``sweep``.

    Of the longest axis every value runs by default, with the values of the other axes in turn. Defects that need three
    values at once are rare (Kuhn, Wallace & Gallo, "Software Fault Interactions and Implications for Software Testing",
    2004), so that of three axes or more all pairs are run, not all combinations.

    Args:
        axes: by the name of a parameter its values, by their ids where the values do not read well.
    """
    named = [_with_ids(values) for values in axes.values()]
    longest = max(map(len, named))
    kept = list(dict.fromkeys(tuple(index % len(values) for values in named) for index in range(longest)))
    made = [
        pytest.param(
            *(values[place][1] for place, values in zip(places, named, strict=True)),
            id="-".join(values[place][0] for place, values in zip(places, named, strict=True)),
            marks=() if places in kept else pytest.mark.sweep,
        )
        for places in _with_all_pairs([len(values) for values in named], kept)
    ]
    return pytest.mark.parametrize(tuple(axes), made)


def _with_all_pairs(lengths: Sequence[int], kept: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """``kept``, and combinations that hold the pairs of values which these do not, the fullest first; in order."""
    chosen = set(kept)
    held = {pair for places in chosen for pair in _pairs(places)}
    left = [places for places in product(*map(range, lengths)) if places not in chosen]
    while left:
        fullest = max(left, key=lambda places: len(_pairs(places) - held))
        if not _pairs(fullest) - held:
            break
        held |= _pairs(fullest)
        chosen.add(fullest)
        left.remove(fullest)
    return sorted(chosen)


def _pairs(places: Sequence[int]) -> set[tuple[tuple[int, int], ...]]:
    """Which two values stand together; the one value itself where there is a single axis."""
    return set(combinations(enumerate(places), min(2, len(places))))


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
