"""What programs of one step or model have in common, from stage to stage and from copy to copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

__all__ = [
    "UNLIMITED",
    "Context",
    "Device",
    "GraphPartContext",
    "NamedDevice",
    "OffloadedInputs",
    "PlanStore",
    "PlannedSizes",
    "StepContext",
]

UNLIMITED = 2**62
"""``Context.room`` of a part that stays unmodified: what a share of the model's peak is a share of."""

T = TypeVar("T")


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


class PlanStore:
    """What passes have planned for one program of a capture and carry over to its others, by kind."""

    def __init__(self) -> None:
        self._plans: dict[type, Any] = {}

    def of(self, kind: type[T]) -> T:
        """The object of a class in which plans of a kind are kept, made when it is first asked for."""
        found: T = self._plans.setdefault(kind, kind()) if kind not in self._plans else self._plans[kind]
        return found


@dataclass(frozen=True, slots=True)
class PlannedSizes:
    """The symbols in sizes that vary. Owned by what serves calls (``graphopt.runtime.calls``).

    Attributes:
        planned: their values for which bytes and seconds are counted, in place of the example's: those that a plan has
            to hold for.
        largest: their largest values that have come up; a share of the peak is one of the peak there.
    """

    planned: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GraphPartContext:
    """That a program is one part of a model. Owned by ``graphopt.runtime.graph_breaks``.

    Attributes:
        room: bytes that it may take at its peak, where what a pass is told is for all parts; a program that needs more
            is to take as little as can be, and with ``UNLIMITED`` it stays unmodified.
    """

    room: int | None = None


@dataclass(frozen=True, slots=True)
class OffloadedInputs:
    """The inputs that are offloaded or sharded. Owned by the passes that put in their copies.

    Attributes:
        names: of those that take memory during the ops alone that touch them, while it is planned how a program in
            which they are offloaded runs; the copies come in behind.
        prefetch: how many copies ahead each one starts of those that a pass has put in, by the pass; where time and
            memory decide, the pass is not there.
        keep: bytes that inputs which stay between two ops may add to the peak, by the pass that has put their copies
            in; where a budget alone decides, the pass is not there.
    """

    names: frozenset[str] = frozenset()
    prefetch: Mapping[str, int] = field(default_factory=dict)
    keep: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the programs of a step have in common. Owned by the step (``graphopt.runtime.step``).

    Attributes:
        forms: which of their programs passes want where they have several, by the name of the pass
            (``TrainingPass.form``).
        numbers: what passes have found once and go on with, by ``pass/what``: those of the step's clock, which are
            saved with its state. One dictionary for all programs of a step.
        persistent: tensors that are in memory while the program runs without being its inputs, by role and target (the
            optimizer's state in a call that adds up gradients), as fake tensors; those that are inputs count once.
        there: whether the optimizer's state, a gradient so far or what a pass keeps is in memory now, by role and
            target; None where it is not known, and taken to come later.
    """

    forms: Mapping[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    persistent: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    there: Callable[[str, str], bool] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Context:
    """What a program is rewritten for; what is lowered or copied from it goes on with the same context.

    Attributes:
        history: the passes applied so far, as text.
        compiled: whether a compiler makes the code that runs. It chooses itself what it overwrites: only sums of
            gradients are taken in place before it.
        device: what is known of the device that a program without data is for; None for one that runs here.
        plans: what passes have planned, one store for all programs of a capture; None for a program by itself.
        sizes: of the symbols in sizes that vary.
        part: where the program is one part of a model; None for a whole one.
        offloaded: the inputs that are offloaded or sharded.
        step: what the programs of a step have in common.
    """

    history: tuple[str, ...] = ()
    compiled: bool = False
    device: Device | None = None
    plans: PlanStore | None = None
    sizes: PlannedSizes = field(default_factory=PlannedSizes)
    part: GraphPartContext | None = None
    offloaded: OffloadedInputs = field(default_factory=OffloadedInputs)
    step: StepContext = field(default_factory=StepContext)

    @property
    def room(self) -> int | None:
        """The bytes of a part of a model (``GraphPartContext``); None for a whole one, and without a limit for all."""
        return None if self.part is None else self.part.room

    @property
    def forms(self) -> Mapping[str, str]:
        """Which of the programs of a step passes want (``StepContext.forms``): a pass looks for its name here."""
        return self.step.forms

    def with_persistent(self, tensors: Mapping[tuple[str, str], Any]) -> Context:
        """The context of a program beside which tensors are in memory (``StepContext.persistent``)."""
        return replace(self, step=replace(self.step, persistent=tensors))

    def after(self, spec: str) -> Context:
        """The context behind one more pass; a pass of several stages counts once."""
        return self if spec in self.history else replace(self, history=(*self.history, spec))
