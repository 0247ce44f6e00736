"""What the trace of an optimizer's update depends on: the settings of its groups, with numbers apart from the rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["NO_SETTINGS", "Number", "UpdateSettings", "group_settings", "number_getter", "number_target"]

Number = tuple[int, str, int]
"""Where a number is: the group, its key there, and the place in a tuple under the key; -1 for a number by itself."""

NO_SETTINGS = ("params", "lr", "initial_lr")
"""What stands in a group and is an input of the update, or nothing to it."""


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of an optimizer.

    Attributes:
        others: hooks, and all of the groups that is no number.
        numbers: momentum, weight decay and the like.
    """

    others: tuple[Any, ...]
    numbers: Mapping[Number, float]

    def serves(self, now: UpdateSettings, read: Collection[Number]) -> bool:
        """Whether a trace for these settings is one for others.

        Args:
            now: the others.
            read: the numbers that the program reads at each run: only whether they are 0 is part of the trace.
        """
        if self.others != now.others or self.numbers.keys() != now.numbers.keys():
            return False
        if self.numbers == now.numbers:
            return True
        return all(number in read and bool(was) == bool(now.numbers[number]) for number, was in self._changes(now))

    def changed(self, now: UpdateSettings) -> list[Number]:
        """The numbers that differ; none where something else does."""
        same = self.others == now.others and self.numbers.keys() == now.numbers.keys()
        return [number for number, _ in self._changes(now)] if same else []

    def _changes(self, now: UpdateSettings) -> Iterator[tuple[Number, float]]:
        return ((number, was) for number, was in self.numbers.items() if now.numbers[number] != was)


def group_settings(groups: list[dict[str, Any]], hooks: str) -> UpdateSettings:
    """The settings of an optimizer's groups, without parameters and learning rates.

    Args:
        groups: its ``param_groups``.
        hooks: what is said of the hooks of its step.
    """
    others: list[Any] = [hooks]
    numbers: dict[Number, float] = {}
    for index, group in enumerate(groups):
        others.append(tuple(map(id, group["params"])))
        for key in sorted(group):
            value = group[key]
            if key in NO_SETTINGS:
                continue
            if _is_number(value):
                numbers[index, key, -1] = value
            elif type(value) is tuple and all(map(_is_number, value)):
                numbers |= {(index, key, place): item for place, item in enumerate(value)}
                others.append((key, len(value)))
            else:
                others.append((key, value))
    return UpdateSettings(tuple(others), numbers)


def number_target(number: Number) -> str:
    """What the input for a number is called: ``momentum[0]``, ``betas[0].1``."""
    group, key, place = number
    return f"{key}[{group}]" + (f".{place}" if place >= 0 else "")


def number_getter(optimizer: torch.optim.Optimizer, target: str) -> Callable[[], float]:
    """Fetches the number of an input that ``number_target`` has named."""
    match = re.fullmatch(r"(\w+)\[(\d+)\](?:\.(\d+))?", target)
    assert match is not None
    key, group, place = match[1], int(match[2]), None if match[3] is None else int(match[3])

    def number() -> float:
        value = optimizer.param_groups[group][key]
        return float(value if place is None else value[place])

    return number


def _is_number(value: object) -> bool:
    return type(value) in (float, int)
