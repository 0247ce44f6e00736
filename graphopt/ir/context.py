"""What programs of one step or model have in common, from stage to stage and from copy to copy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

__all__ = ["UNLIMITED", "Context", "Device", "NamedDevice"]

UNLIMITED = 2**62
"""``Context.room`` of a part that stays as it is: what a share of the model's peak is a share of."""


class Device(Protocol):
    """A device by its figures; ``graphopt.analysis.costs.profiles.DeviceProfile`` is one."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def kind(self) -> str:
        """Its type as torch names it."""
        ...

    @property
    def temporaries(self) -> Mapping[str, int]:
        """Bytes that calls allocate for themselves there, by their text, as far as they were measured."""
        ...


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """A device of which a file says the name and the type as torch names it."""

    name: str
    kind: str
    temporaries: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Context:
    """What a program is rewritten for; what is lowered or copied from it goes on with the same context.

    Attributes:
        history: the passes applied so far, as text.
        forms: which of their programs passes want where they have several, by the name of the pass
            (``TrainingPass.form``).
        numbers: what passes have found once and go on with, by ``pass/what``: those of the step's clock, which are
            saved with its state. One dictionary for all programs of a step.
        plans: what passes have planned for one program of a capture and carry over to its others, by the pass and
            what the plan depends on. One dictionary for all programs of a capture; None for a program by itself.
        compiled: whether a compiler makes the code that runs. It chooses itself what it overwrites: only sums of
            gradients are taken in place before it.
        room: bytes that the program may take at its peak, where it is one part of a model and what a pass is told is
            for all parts; a program that needs more is to take as little as can be, and with ``UNLIMITED`` it stays as
            it is. None for a program by itself.
        sizes: the values of the symbols in sizes that vary for which bytes and seconds are counted, in place of the
            example's: those that a plan has to hold for.
        part: whether the program is one part of a model; names that passes are given may then be of another one.
        device: what is known of the device that a program without data is for; None for one that runs here.
        largest: the largest values of these symbols that have come up; a share of the peak is one of the peak there.
        elsewhere: the names of inputs that take memory during the calls alone that touch them, while it is planned how
            a program in which they reside elsewhere runs; the copies come in behind.
        prefetch: how many copies ahead each one starts of those that a pass has put in, by the pass; where time and
            memory decide, the pass is not there.
        keep: bytes that inputs which stay between two calls may add to the peak, by the pass that has put their copies
            in; where a budget alone decides, the pass is not there.
        persistent: tensors that are in memory while the program runs without being its inputs, by role and target (the
            optimizer's state in a call that adds up gradients), as fake tensors; those that are inputs count once.
        there: whether the optimizer's state, a gradient so far or what a pass keeps is in memory now, by role and
            target; None where it is not known, and taken to come later.
    """

    history: tuple[str, ...] = ()
    forms: Mapping[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    plans: dict[Hashable, Any] | None = None
    compiled: bool = False
    room: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)
    part: bool = False
    device: Device | None = None
    elsewhere: frozenset[str] = frozenset()
    prefetch: Mapping[str, int] = field(default_factory=dict)
    keep: Mapping[str, int] = field(default_factory=dict)
    persistent: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    there: Callable[[str, str], bool] | None = field(default=None, repr=False, compare=False)

    def after(self, spec: str) -> Context:
        """The context behind one more pass; a pass of several stages counts once."""
        return self if spec in self.history else replace(self, history=(*self.history, spec))
