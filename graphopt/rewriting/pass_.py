"""What a pass is: its contract, what it reports, and the record of one that ran."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, SupportsIndex, TypeVar, cast, overload

import torch

from graphopt.errors import GraphoptError, check_type, did_you_mean
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.node import Stage
from graphopt.ir.program import Program
from graphopt.ir.provided.methods import provided
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.pass_type import PassType
from graphopt.rewriting.text.spec import format_pass

__all__ = [
    "STAGES",
    "Changed",
    "NoSuchRecordError",
    "Numerics",
    "Pass",
    "PassRecord",
    "PassStage",
    "Records",
    "by_options",
    "record_lines",
]

T = TypeVar("T")

Numerics = Literal["bitwise", "tolerant", "changes"]
PassStage = Stage | Literal["last"]
"""Which program a pass rewrites; ``last`` is the one that runs: joint for a drop-in model, step for a whole step."""

STAGES: tuple[PassStage, ...] = ("forward", "joint", "step", "last")


class _ByOptions:
    """A declaration that depends on the options of an instance."""

    def __init__(self, usual: Any, of: Callable[[Any], Any]) -> None:
        self._usual = usual
        self._of = of

    def __get__(self, instance: Any, owner: type) -> Any:
        return self._usual if instance is None else self._of(instance)


def by_options(usual: T, of: Callable[[Any], T]) -> T:
    """What a pass declares (``numerics``, ``draws``, ``fixed_sizes``) where it depends on its options.

    Args:
        usual: what the class declares, for tables of passes.
        of: what an instance declares, by its options.
    """
    return cast(T, _ByOptions(usual, of))


@dataclass(frozen=True, slots=True)
class Changed:
    """What a pass did. It is falsy where the program is as it was, and then ``reason`` says why.

    Attributes:
        counts: what was done how often: ``{"recomputed": 204}``.
        bytes_saved: how much lower the predicted peak is, in bytes (filled in by the pipeline).
        tensors: names of the tensors that the pass decided about.
        lines: what a user should read, one line each.
        reason: why nothing was done, for a pass that did nothing.
        satisfied: whether that is since what the pass is for is so already: it is then no reason to warn.
        details: what reports can ask for, by name: each function gives plain data for JSON when it is called, so that
            only those who show it pay for it (``{"frontier": …}``).
        slowdown: the seconds that later steps take longer, as a share of those that they take without the pass, as
            predicted; None where nothing is predicted, and in records that were read from the cache.

    Example:
        >>> str(graphopt.Changed({"recomputed": 4}))
        '4 recomputed'
        >>> bool(graphopt.Changed(reason="nothing is saved for backward"))
        False
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    bytes_saved: int = 0
    tensors: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    reason: str = ""
    details: Mapping[str, Callable[[], Any]] = field(default_factory=dict, repr=False)
    satisfied: bool = False
    slowdown: float | None = None

    def __post_init__(self) -> None:
        check_type("Changed's counts", self.counts, Mapping, "a dict of what was done to how often, {'recomputed': 4}")
        for what, count in self.counts.items():
            check_type(f"Changed's counts[{what!r}]", count, int, "a whole number of times")
        check_type("Changed's reason", self.reason, str, "text: why nothing was done")
        for name in ("tensors", "lines"):
            value = getattr(self, name)
            check_type(f"Changed's {name}", value, (tuple, list), "a tuple of texts", f"write {name}=(...,)")

    def __bool__(self) -> bool:
        return any(self.counts.values())

    def __str__(self) -> str:
        if not self:
            return f"nothing: {self.reason or 'there was nothing to do'}"
        return ", ".join(counted(count, what) for what, count in self.counts.items())


class Pass(metaclass=PassType):
    """A rewrite of a program. Subclasses are final frozen dataclasses whose fields are their options.

    Options are compared with the types of the fields where an object is made.

    What a pass does between steps, beside rewriting, is ``TrainingPass``.

    Class attributes:
        name: kebab-case, unique among all installed passes.
        stage: which program it rewrites: forward, joint, step, or last (the one that runs, joint or step, after all
            others).
        also: later stages whose program it rewrites as well; ``apply`` is called once for each (``program.stage`` says
            which), and what it does at one must not depend on an object's memory of another.
        numerics: ``bitwise`` (results equal to the last bit), ``tolerant`` (within a tolerance that the docstring
            states) or ``changes``.
        after: names of passes that run before this one when both are given.
        requires: names of passes that must be given too.
        conflicts: names of passes that must not be given too.
        changes_signature: whether inputs or outputs of the program may differ afterwards.
        draws: whether it draws random numbers of its own from the program's stream; only where numerics is changes.
        in_parts: whether it may rewrite the parts of a model one by one that is not captured whole.
        has_limit: whether it keeps a program within so many bytes (``limit``).
        fixed_sizes: whether it leaves tensors alone whose sizes vary from call to call, so that sizes that change are
            better captured one by one.

    Example:
        >>> @dataclass(frozen=True)
        ... class CountCalls(graphopt.Pass):
        ...     name, stage, numerics = "count-calls", "joint", "bitwise"
        ...     def apply(self, program):
        ...         return graphopt.Changed(reason=f"{len(program.nodes) > 0}: there are calls")
        >>> step = graphopt.optimize_step(model, optimizer, [CountCalls()], loss=loss).prepare(x)
        >>> step.records[0].changed.reason
        'True: there are calls'
    """

    name: ClassVar[str]
    stage: ClassVar[PassStage]
    also: ClassVar[tuple[PassStage, ...]] = ()
    numerics: ClassVar[Numerics]
    after: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    changes_signature: ClassVar[bool] = False
    draws: ClassVar[bool] = False
    in_parts: ClassVar[bool] = False
    has_limit: ClassVar[bool] = False
    fixed_sizes: ClassVar[bool] = False

    @abc.abstractmethod
    def apply(self, program: Program) -> Changed:
        """Rewrite ``program`` in place and say what was done.

        The program given is valid, and the pipeline checks it again afterwards. A pass that cannot help changes
        nothing and returns ``Changed(reason=...)``. Applying a pass a second time does nothing or raises.

        Raises:
            GraphoptError: where the options do not fit the program.
        """

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the ``torch.autocast`` that the model is to be captured under; None for none.

        The forward program then consists of regions under autocast, until this pass puts what that does into the
        program; it is the first one there.
        """
        return None

    def concerns(self, program: Program) -> bool:
        """Whether there is anything to do for this pass at the stage of ``program``; it is not run where not.

        For passes of several stages, which act in one way in a drop-in program and in another in a whole step.
        """
        del program
        return True

    def limit(self, memory: MemoryTimeline) -> int | None:
        """The bytes that the pass keeps a program within; None for a pass that keeps to none.

        A model that is captured in parts has one limit for all of them: for each part, ``Context.room`` is what its
        program may take.

        Args:
            memory: of the unmodified program without the pass.
        """
        del memory
        return None

    def __str__(self) -> str:
        return format_pass(self)


@dataclass(frozen=True, slots=True, repr=False)
class PassRecord:
    """One pass that ran: its text form, what it did and cost, and the program's size and peak around it."""

    name: str
    spec: str
    stage: Stage
    numerics: Numerics
    changed: Changed
    seconds: float
    nodes_before: int
    nodes_after: int
    peak_before: int | None
    peak_after: int | None

    def _repr_html_(self) -> str:
        return str(provided(Records, "notebook")([self]))

    def __str__(self) -> str:
        peak = ""
        if self.peak_before is not None and self.peak_after is not None and self.peak_before != self.peak_after:
            peak = f"; peak {format_bytes(self.peak_before)} -> {format_bytes(self.peak_after)} (predicted)"
        return f"{self.spec}: {self.changed}{peak}; {self.seconds:.2f} s"

    __repr__ = __str__


def record_lines(record: PassRecord) -> list[str]:
    """One line that sums up what a pass did, and the pass's own lines."""
    return [str(record), *(f"  {line}" for line in record.changed.lines)]


class NoSuchRecordError(GraphoptError, KeyError):
    """There is no record of a name, or more than one; it is a ``KeyError`` as well."""

    __str__ = Exception.__str__


class Records(list[PassRecord]):
    """What each pass did, in the order in which they ran: a list that also has the records by the name of a pass.

    Printed, it is a line for each pass, and the lines of the pass below; a notebook shows a table.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, "recompute{checkpoints=blocks.*}", loss=loss).prepare(x)
        >>> step.records["recompute"] is step.records[0]
        True
        >>> "offload" in step.records
        False
    """

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> PassRecord: ...
    @overload
    def __getitem__(self, key: slice) -> Records: ...
    def __getitem__(self, key: SupportsIndex | slice | str) -> PassRecord | Records:
        """The record of a place or of a pass by its name; those of a slice.

        Raises:
            NoSuchRecordError: where no pass of the name ran, with the near names, or several times, with their places.
        """
        if isinstance(key, slice):
            return Records(super().__getitem__(key))
        if not isinstance(key, str):
            return super().__getitem__(key)
        places = [place for place, record in enumerate(self) if record.name == key]
        if len(places) == 1:
            return super().__getitem__(places[0])
        raise self._none_of(key) if not places else self._several_of(key, places)

    def _none_of(self, name: str) -> NoSuchRecordError:
        ran = list(dict.fromkeys(record.name for record in self))
        hint = did_you_mean(name, ran) or (f"those that ran are {', '.join(ran)}" if ran else "no pass ran")
        return NoSuchRecordError(f"there is no record of a pass {name!r}; {hint}")

    def _several_of(self, name: str, places: list[int]) -> NoSuchRecordError:
        each = ", ".join(f"records[{place}] ({self[place].stage} stage)" for place in places)
        return NoSuchRecordError(f"{name!r} ran {len(places)} times, once for each program or stage: {each}")

    def __contains__(self, key: object) -> bool:
        return any(record.name == key for record in self) if isinstance(key, str) else super().__contains__(key)

    def __str__(self) -> str:
        return "\n".join(line for record in self for line in record_lines(record)) or "no passes"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return str(provided(Records, "notebook")(self))
