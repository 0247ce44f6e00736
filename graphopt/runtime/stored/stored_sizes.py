"""Which sizes a stored capture serves, as plain data: its symbols with their ranges, conditions on them, its inputs.

A program whose sizes vary holds under conditions that torch has met while it was traced. They are written as text, and
read by a small parser (``ir/files/size_expressions.py``); nothing of them is evaluated as Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.context import Context
from graphopt.ir.files.checked_json import Field
from graphopt.ir.files.deserialization import read_tensor
from graphopt.ir.files.serialization import tensor_to_json
from graphopt.ir.files.size_expressions import read_condition
from graphopt.runtime.calls.size_rules import OpenInputs, SizeRules, Target, targets
from graphopt.runtime.stored.stable_form import NoStableFormError

__all__ = ["StoredSizes", "describe_sizes", "read_sizes", "write_sizes"]

_MOST_SYMBOLS = 1_000
_MOST_CONDITIONS = 10_000
_LARGEST = 2**40


@dataclass(frozen=True)
class StoredSizes:
    """The sizes that a stored capture serves.

    Attributes:
        inputs: what it takes, with the conditions on it.
        sizes: the values of its symbols that it was planned for; none where no pass has a limit.
        largest: the largest that had come up then.
    """

    inputs: OpenInputs
    sizes: Mapping[str, int]
    largest: Mapping[str, int]

    def rules(self, *, declared: bool) -> SizeRules:
        """The same as what calls are compared with; see ``SizeRules`` for ``declared``."""
        return SizeRules(self.inputs, declared=declared)

    def rank(self, tensors: Sequence[torch.Tensor], target: Target | None, *, declared: bool) -> int | None:
        """How well the capture serves a call, 0 the best; None where it does not.

        Args:
            tensors: of the call.
            target: the sizes that are planned for once more; only a capture that was planned for these serves then.
            declared: see ``SizeRules``.
        """
        rules = self.rules(declared=declared)
        values = None
        if len(self.inputs.tensors) == len(tensors):
            with contextlib.suppress(GraphoptError):  # for sizes that are outside of what was declared
                values = rules.match(tensors)
        if values is None:
            return None
        wanted = targets(rules, values if target is None else target.sizes, target or Target(values, values))
        places = [place for place, each in enumerate(wanted) if dict(each.sizes) == dict(self.sizes)]
        return places[0] if places else len(wanted) if target is None else None

    @property
    def mode(self) -> _torch.FakeTensorMode:
        """The mode that all programs of the capture are read in, so that they share their symbols."""
        return self.inputs.mode


def write_sizes(rules: SizeRules, context: Context) -> dict[str, Any] | None:
    """The sizes that a capture serves as plain data; None for one whose sizes are fixed.

    Args:
        rules: of the capture.
        context: of its program, which says what was planned for.

    Raises:
        NoStableFormError: for a condition that cannot be read back.
    """
    if not rules or rules.inputs is None:
        return None
    symbols = _torch.open_symbols(rules.inputs.mode)
    conditions = [*(condition.text for condition in rules.inputs.conditions), *_torch.guard_texts(rules.inputs.mode)]
    for text in conditions:
        try:
            read_condition(Field(text), symbols.keys())
        except GraphoptError as error:
            raise NoStableFormError(f"the condition {text:.80} on its sizes cannot be written: {error}") from error
    return {
        "symbols": {name: [symbol.hint, symbol.low, symbol.high] for name, symbol in symbols.items()},
        "conditions": conditions,
        "inputs": [[name, tensor_to_json(tensor)] for name, tensor in rules.inputs.tensors],
        "planned for": dict(context.sizes.planned),
        "largest": dict(context.sizes.largest),
    }


def read_sizes(field: Field, values: Mapping[str, int] | None = None) -> StoredSizes | None:
    """The sizes that ``write_sizes`` described; None for a capture whose sizes are fixed.

    Args:
        field: the data.
        values: of symbols in the call at hand, in place of those of the captured one: what a compiler fixes is right
            then.

    Raises:
        GraphoptError: for anything else, with its place.
    """
    if field.value is None:
        return None
    parts = field.parts(("symbols", "conditions", "inputs", "planned for", "largest"))
    symbols = {
        Field(name, parts["symbols"].path).identifier(): _symbol(item)
        for name, item in parts["symbols"].entries(most=_MOST_SYMBOLS)
    }
    taken = {name: value for name, value in (values or {}).items() if name in symbols}
    mode = _torch.fake_mode(symbols | {name: replace(symbols[name], hint=value) for name, value in taken.items()})
    conditions = [read_condition(item, symbols.keys()) for item in parts["conditions"].items(most=_MOST_CONDITIONS)]
    tensors = []
    for item in parts["inputs"].items():
        pair = list(item.items(most=2))
        if len(pair) != 2:
            raise item.expected("the name and the form of a tensor")
        tensors.append((pair[0].text(), read_tensor(pair[1], mode)))
    planned, largest = (_values(parts[name], symbols) for name in ("planned for", "largest"))
    return StoredSizes(OpenInputs(tensors, mode, conditions), planned, largest)


def describe_sizes(sizes: StoredSizes | None) -> str:
    """The dimensions that vary, each with its range, for people; empty where all are fixed."""
    if sizes is None:
        return ""
    rules = SizeRules(sizes.inputs)
    found = ", ".join(f"{rule.place}: {rule.bounds}" for rule in rules.axes)
    planned = {str(rule.size): sizes.sizes[str(rule.size)] for rule in rules.axes if str(rule.size) in sizes.sizes}
    return found + (f"; planned for {', '.join(map(str, planned.values()))}" if planned else "")


def _symbol(field: Field) -> _torch.SymbolRange:
    """An example value, the smallest and the largest one, or None for no bound."""
    parts = list(field.items(most=3))
    if len(parts) != 3:
        raise field.expected("an example value and a range")
    low = parts[1].whole(0, _LARGEST)
    high = None if parts[2].value is None else parts[2].whole(low, _LARGEST)
    return _torch.SymbolRange(parts[0].whole(low, _LARGEST if high is None else high), low, high)


def _values(field: Field, symbols: Mapping[str, object]) -> dict[str, int]:
    """Values of symbols by name."""
    return {
        Field(name, field.path).one_of({known: known for known in symbols}): item.whole(0, _LARGEST)
        for name, item in field.entries(most=_MOST_SYMBOLS)
    }
