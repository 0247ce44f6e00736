"""Sizes that change from call to call: which of them the next capture keeps open, and why some cannot be.

From the second size of an axis on, that axis is a symbol in the capture that serves the call (``VaryingAxes``), which
then serves all sizes for which it was traced alike. What is captured so has to be call by call the program that was
captured for the first sizes; where it is not, or where it cannot be captured, sizes are captured one by one, and the
user is told why.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from graphopt.capture.call.varying_axes import VaryingAxes
from graphopt.capture.joint.specialization import first_difference
from graphopt.errors import CaptureError
from graphopt.ir.program import Program
from graphopt.runtime.calls.captures import HasRules
from graphopt.runtime.calls.size_rules import SizeRules

__all__ = ["Answers", "Key", "OtherProgramError", "Served", "VaryingSizes", "open_axes"]

logger = logging.getLogger(__name__)

_LEAST = 2
"""Sizes of 0 and 1 are programs of their own: torch traces what broadcasts, or is empty, in another way."""

_MOST = 8
"""Captures for one kind of call whose sizes vary; a model that takes another path for each size has no use for more."""

_TOLD_AT = 4
"""The capture whose sizes vary at which a user hears that others did not serve a call."""

_MOST_KINDS = 256
"""The kinds of calls for which a capture with fixed sizes is kept, to compare with one whose sizes vary."""

_REMEMBERED = 4096
"""Sizes of calls for which it is remembered what serves them."""

Answers = tuple[Hashable, ...]
"""What the tensors of a call answer to the model's questions (``transformers_masks.py``), and numbers of others."""

Key = tuple[Hashable, Answers]
"""The signature of a call, and the answers for it."""

E = TypeVar("E", bound=HasRules)


class OtherProgramError(CaptureError):
    """With sizes that vary, another program is captured than for fixed ones."""


@dataclass(frozen=True, slots=True)
class Served(Generic[E]):
    """What serves a call: a capture, and the values of its symbols."""

    capture: E
    values: dict[str, int]


@dataclass
class _Kind(Generic[E]):
    """Calls that differ in sizes alone.

    Attributes:
        calls: the tensors of each call that was captured, without data.
        fixed: the joint program of the first capture, with its call.
        captures: those whose sizes vary.
        refused: the axes that have to be fixed.
        told: what users have been told.
    """

    calls: list[list[torch.Tensor]] = field(default_factory=list)
    fixed: tuple[Program, list[torch.Tensor]] | None = None
    captures: list[E] = field(default_factory=list)
    refused: VaryingAxes | None = None
    told: set[str] = field(default_factory=set)


@dataclass
class VaryingSizes(Generic[E]):
    """The captures of one model or step whose sizes vary, by kind of call."""

    _kinds: dict[Key, _Kind[E]] = field(default_factory=dict)
    _served: dict[Hashable, Served[E]] = field(default_factory=dict)
    _calls: dict[Hashable, list[list[torch.Tensor]]] = field(default_factory=dict)

    def _kind(self, kind: Key) -> _Kind[E]:
        """What is known of a kind of calls; their sizes count for all answers together."""
        if kind not in self._kinds:
            self._let_go()
            self._kinds[kind] = _Kind(calls=self._calls.setdefault(kind[0], []))
        return self._kinds[kind]

    def _let_go(self) -> None:
        """Forget the first kinds without a capture whose sizes vary, where there are too many."""
        fixed = [kind for kind, known in self._kinds.items() if not known.captures]
        for kind in fixed[: max(0, len(fixed) - _MOST_KINDS + 1)]:
            del self._kinds[kind]
            self._calls.pop(kind[0], None)

    def remembered(self, key: Hashable) -> Served[E] | None:
        """What served a call with this signature, sizes included, before."""
        return self._served.get(key)

    def find(self, key: Key, kind: Key, tensors: Sequence[torch.Tensor]) -> Served[E] | None:
        """The capture that serves a call of sizes that are new; None where there is none.

        Args:
            key: the call's signature, sizes included.
            kind: the same without sizes.
            tensors: of the call.
        """
        for capture in self._kinds[kind].captures if kind in self._kinds else ():
            values = capture.rules.match(tensors)
            if values is not None:
                return self.remember(key, Served(capture, values))
        return None

    def axes(self, kind: Key, tensors: Sequence[torch.Tensor]) -> VaryingAxes:
        """The axes that a capture for a call should keep open."""
        known = self._kind(kind)
        shapes = [[tensor.shape for tensor in call] for call in (*known.calls, tensors)]
        found = VaryingAxes.between(shapes).where(shapes[-1], _LEAST)
        if known.refused is not None:
            found = found.without(known.refused)
        return found if len(known.captures) < _MOST else VaryingAxes(tuple(frozenset() for _ in tensors))

    def add_fixed(self, kind: Key, tensors: Sequence[torch.Tensor], program: Program) -> None:
        """Note a capture with fixed sizes.

        Args:
            kind: of the call.
            tensors: of the call.
            program: of stage joint, as it was captured.
        """
        known = self._kind(kind)
        known.calls.append(_without_data(tensors))
        if known.fixed is None:
            known.fixed = program, known.calls[-1]

    def add_read(self, key: Key, kind: Key, tensors: Sequence[torch.Tensor], capture: E) -> Served[E]:
        """Keep a capture whose sizes vary that was read and not made.

        The call does not count as one that was captured: there is no program of its sizes to compare others with.
        """
        self._kind(kind).captures.append(capture)
        return self.remember(key, Served(capture, capture.rules.match(tensors) or {}))

    def add(
        self,
        key: Key,
        kind: Key,
        tensors: Sequence[torch.Tensor],
        capture: E,
        asked: VaryingAxes,
        names: Sequence[str],
    ) -> tuple[Served[E], str]:
        """Keep a capture whose sizes vary, with what to tell the user of axes that it could not keep open.

        Args:
            key: the call's signature, sizes included.
            kind: the same without sizes.
            tensors: of the call.
            capture: made for it.
            asked: the axes that were to vary.
            names: of the tensors.
        """
        known = self._kinds[kind]
        missed = [found.rules.why_not(tensors) for found in known.captures]
        known.calls.append(_without_data(tensors))
        if capture.rules:
            known.captures.append(capture)
        fixed = asked.without(open_axes(capture.rules, len(tensors)))
        values = (capture.rules.match(tensors) if capture.rules else None) or {}
        told = ""
        if fixed:
            told = self.refuse(kind, fixed, tensors, _why_fixed(capture.rules, fixed, tensors), names)
        elif len(known.captures) == _TOLD_AT:
            told = (
                f"{len(known.calls)} captures for sizes that change, of which one serves many sizes as a rule; the "
                f"latest one was made since {missed[-1]}"
            )
        return self.remember(key, Served(capture, values)), told

    def check(self, kind: Key, program: Program, rules: SizeRules) -> None:
        """Compare a program whose sizes vary, as it was captured, with the one for the first sizes of its kind.

        Raises:
            OtherProgramError: where they differ, with the call.
        """
        known = self._kinds[kind].fixed
        values = rules.match(known[1]) if known is not None else None
        if known is None or values is None:
            return
        difference = first_difference(known[0], program, values)
        if difference:
            raise OtherProgramError(f"with sizes that vary, torch traces {difference}")

    def refuse(
        self, kind: Key, axes: VaryingAxes, tensors: Sequence[torch.Tensor], reason: str, names: Sequence[str]
    ) -> str:
        """Capture sizes of these axes one by one from now on; what to tell the user, where it is new.

        Args:
            kind: of the calls.
            axes: that cannot vary.
            tensors: of the call that was to be captured.
            reason: why, for people.
            names: of the tensors.
        """
        known = self._kinds[kind]
        known.refused = axes if known.refused is None else known.refused.along_with(axes)
        if reason in known.told:
            return ""
        known.told.add(reason)
        places = [(place, axis) for place, found in enumerate(axes.axes) for axis in sorted(found)]
        sizes = [
            f"axis {axis} of {names[place]} ({', '.join(map(str, self._sizes(kind, place, axis, tensors)))})"
            for place, axis in places
        ]
        return (
            f"each size of {'; '.join(sizes)} is captured by itself, since {reason}: pad to a few sizes, or give "
            "dynamic_shapes=None"
        )

    def largest(self, kind: Key | None, rules: SizeRules) -> dict[str, int]:
        """The largest values of a program's symbols among the calls of its kind that were captured."""
        found: dict[str, int] = {}
        for call in self._kinds[kind].calls if kind is not None and kind in self._kinds else ():
            for name, value in (rules.match(call) or {}).items():
                found[name] = max(value, found.get(name, 0))
        return found

    def _sizes(self, kind: Key, place: int, axis: int, tensors: Sequence[torch.Tensor]) -> list[int]:
        calls = [*self._kinds[kind].calls, tensors]
        return list(dict.fromkeys(call[place].shape[axis] for call in calls))

    def share(self, kind: Key, other: Key) -> None:
        """Let calls of another kind, which forward has made of this one by setting attributes, share its captures."""
        self._kinds.setdefault(other, self._kinds[kind])

    def remember(self, key: Hashable, served: Served[E]) -> Served[E]:
        """Remember what serves calls with a signature."""
        if len(self._served) >= _REMEMBERED:
            self._served.clear()
        self._served[key] = served
        return served


def _without_data(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the same shapes and strides that take no memory."""
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        if t.layout is torch.strided
        else torch.empty(t.shape, dtype=t.dtype, device="meta")
        for t in tensors
    ]


def open_axes(rules: SizeRules, count: int) -> VaryingAxes:
    """The axes that vary in a program.

    Args:
        rules: of the program.
        count: of the tensors of a call.
    """
    found: list[set[int]] = [set() for _ in range(count)]
    for rule in rules.axes:
        found[rule.input].add(rule.dim)
    return VaryingAxes(tuple(map(frozenset, found)))


def _why_fixed(rules: SizeRules, axes: VaryingAxes, tensors: Sequence[torch.Tensor]) -> str:
    """Why tracing has fixed sizes that were to vary."""
    sizes = {tensors[place].shape[axis] for place, found in enumerate(axes.axes) for axis in found}
    guard = rules.fixing(sorted(sizes))
    return "the model, or an op that it calls, needs them as fixed numbers" + (f" ({guard})" if guard else "")
