"""Calls whose Python values change from one to the next, each of which needs a capture: which, and what to write."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from graphopt.capture.guards.named_values import attribute_values, values_in

__all__ = ["ChangingValues"]

_TOLD_AT = 3
"""The number of different values of one argument at which a user hears of it."""

_NAMED, _SHOWN, _LONGEST = 8, 5, 30
"""How many places are named, how many values of each are shown, and the most letters of one."""


class ChangingValues:
    """Notes what is no tensor in each call that is captured, and says of each argument once that its values change."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, object]] = {}
        self._seconds = 0.0
        self._captures = 0
        self._told: set[str] = set()
        self._variables: set[str] = set()
        self._attributes: set[str] = set()

    def note(
        self,
        names: Sequence[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        variables: Mapping[str, object],
        model: nn.Module,
        seconds: float,
    ) -> str:
        """Note a capture; what to tell the user at the third value of an argument, and nothing otherwise.

        Args:
            names: of the positional arguments, as far as they have names.
            args: positional arguments of the call.
            kwargs: those given by keyword.
            variables: that the code reads beside them.
            model: whose attributes are read as well.
            seconds: that the capture took.
        """
        self._seconds += seconds
        self._captures += 1
        called = [*names[: len(args)], *(f"argument {place}" for place in range(len(names), len(args)))]
        self._variables.update(variables)
        attributes = dict(attribute_values(model))
        self._attributes.update(attributes)
        given = {**dict(zip(called, args, strict=True)), **kwargs}
        found = itertools.chain.from_iterable(values_in(value, name) for name, value in given.items())
        for place, value in (*found, *variables.items(), *attributes.items()):
            self._seen.setdefault(place, {}).setdefault(_written(value), value)
        changing = [
            place for place, values in self._seen.items() if len(values) >= _TOLD_AT and place not in self._told
        ]
        self._told.update(changing)
        if not changing:
            return ""
        listed = "; ".join(f"{place} was {self._listed(place)}" for place in changing[:_NAMED])
        listed += f"; and {len(changing) - _NAMED} more" if len(changing) > _NAMED else ""
        return (
            f"{self._captures} captures took {self._seconds:.1f} s so far, and values of Python change, each of which "
            f"is a program of its own: {listed}; {self._advice(changing)}"
        )

    def _listed(self, place: str) -> str:
        values = list(self._seen[place])
        rest = len(values) - _SHOWN
        return ", ".join(values[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")

    def _advice(self, changing: Sequence[str]) -> str:
        """A tensor in the place of a number; of other values there have to be few."""
        attributes = [place for place in changing if place in self._attributes]
        if attributes:
            where = attributes[0]
            return f"change {where} less often, or compute with a buffer of the model, whose values one program serves"
        variables = [place for place in changing if place in self._variables]
        if variables:
            where = variables[0]
            return f"hand {where} over in the call, as a tensor, whose values one program serves, and compute with it"
        numbers = [place for place in changing if all(_is_number(value) for value in self._seen[place].values())]
        if not numbers:
            return "keep to a few values, or take what depends on them out of the call"
        place = numbers[0]
        return f"give {place} as a tensor (torch.tensor({place})), whose values one program serves, and compute with it"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _written(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
