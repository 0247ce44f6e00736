"""The pipelines among which one is chosen: by precision and communication first, then by what leaves more memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product

from graphopt.rewriting.pass_ import Numerics

__all__ = ["Candidate", "candidates", "with_less_memory", "within_budget"]

_EXCHANGES = ("data-parallel", "data-parallel,shard-optimizer", "data-parallel,shard-parameters")
_WITHIN_HOSTS = "data-parallel,shard-parameters{group=host replicas=hosts}"
_SPARSE = "data-parallel,deep-gradient-compression"
_LOCAL = "data-parallel,local-sgd{k-steps=8}"
_BFLOAT16 = "mixed-precision{dtype=bfloat16}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline that may be chosen.

    Attributes:
        passes: in text form, without a budget.
        change: how far from the baseline its results are: 0 for its bits (of several ranks: those of exchanged
            gradients), 1 for sums in another order, 2 for 16 bits, 4 for an exchange that leaves something out.
    """

    passes: tuple[str, ...] = ()
    change: int = 0

    @property
    def pipeline(self) -> str:
        """The text that ``Pipeline`` takes."""
        return ",".join(self.passes)

    @property
    def names(self) -> list[str]:
        """The names of the passes."""
        return re.sub(r"\{[^}]*\}", "", self.pipeline).split(",") if self.passes else []

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered when they are read, and stay where a budget leaves them room."""
        return "shard-parameters" in self.pipeline

    @property
    def without_budget(self) -> Candidate:
        """The same without a plan."""
        return replace(self, passes=tuple(text for text in self.passes if not text.startswith("fit-memory")))

    def __str__(self) -> str:
        return self.pipeline or "no pass"

    def plus(self, text: str, change: int = 0) -> Candidate:
        """The same with one pass more."""
        return replace(self, passes=(*self.passes, text), change=self.change + change) if text else self


def candidates(ranks: int, hosts: int, numerics: Numerics, optimizer: str) -> list[Candidate]:
    """Every precision with every way to exchange gradients; those that change the results least first.

    Args:
        ranks: how many train together.
        hosts: on how many hosts; 1 where hosts do not all have as many ranks.
        numerics: what the passes may do to the results.
        optimizer: the class of the one whose update is part of the program, which most ways to exchange need; empty
            where it is not.
    """
    precisions = [Candidate()]
    exchanges = [("", 0)]
    if ranks > 1:
        within = [_WITHIN_HOSTS] if 1 < hosts < ranks else []
        exchanges = [(text, 0) for text in ((*_EXCHANGES, *within) if optimizer else _EXCHANGES[:1])]
    if numerics == "changes":
        precisions.append(Candidate((_BFLOAT16,), 2))
        if ranks > 1 and optimizer:
            feedback = "" if optimizer == "SGD" else "{correction=feedback}"  # momentum is not all of its state
            exchanges += [(f"{_SPARSE}{feedback}", 4), (_LOCAL, 4)]
    found = [precision.plus(text, change) for precision, (text, change) in product(precisions, exchanges)]
    return sorted(found, key=lambda candidate: candidate.change)


def with_less_memory(candidate: Candidate, numerics: Numerics) -> list[Candidate]:
    """Variants of a pipeline that take less memory, beside a budget.

    Args:
        candidate: as it is.
        numerics: what the passes may do to the results.
    """
    return [] if numerics == "bitwise" else [candidate.plus("chunk-loss", 1), candidate.plus("microbatch", 1)]


def within_budget(candidate: Candidate, budget: int, allow: str, cost: str = "measured") -> Candidate:
    """A pipeline that keeps to a budget.

    Args:
        candidate: without one.
        budget: in bytes.
        allow: as ``FitMemory`` takes it.
        cost: the same.
    """
    by = "" if cost == "measured" else f" cost={cost}"
    return candidate.plus(f"fit-memory{{budget={budget} allow={allow}{by}}}")
