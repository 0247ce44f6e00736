"""Gradients that travel in fewer bits, or as matrices of low rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, final

import torch
from torch import fx

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.communication.collectives import ALL_REDUCE, WAIT
from graphopt.ir.ops.updates.scale import FOUND_INF
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.distributed.dense.all_reduce import exchange_gradients
from graphopt.rewriting.distributed.dense.buckets import BucketSizes
from graphopt.rewriting.distributed.dense.remove_all_reduce import (
    Reduction,
    agree_on_skipping,
    one_group,
    reductions,
    remove_all_reduces,
)
from graphopt.rewriting.distributed.sparse.low_rank_exchange import Factors, Settings, exchange_low_rank, factors_of
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.training_pass import Clock, TrainingPass

__all__ = ["CompressGradients"]

aten = torch.ops.aten

_DENSE = "dense"
_POWERSGD = "powersgd"
_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True)
class CompressGradients(TrainingPass):
    """Let the gradients that ``DataParallel`` exchanges travel in 16 bits, or as factors of low rank.

    ``bf16`` and ``fp16`` cast each bucket, divide it by the number of ranks, add up in that dtype and cast back, as
    torch's ``bf16_compress_hook`` and ``fp16_compress_hook`` do; with two ranks results are theirs to the last bit.
    Half of the bytes travel. Each mean is off by the rounding of the dtype: of its largest addend at most ranks times
    2^-8 in bfloat16 and 2^-11 in float16, where 1/ranks of a gradient above 65504 becomes infinite and below 6e-8
    vanishes. Gradients of 16 bits stay as they are.

    ``powersgd`` takes each gradient as a matrix of its first dimension's rows, and exchanges two factors of ``rank``
    columns, by one step of power iteration from the factor of the step before. What the factors leave out is added to
    the rank's next gradient. Tensors of one dimension, and those whose factors would not have ``min_compression_rate``
    times fewer elements, are exchanged densely; the record lists them. A bucket takes two all-reduces, of the first
    factors beside backward and of the second ones in front of the update. It needs the whole step, where each rank
    saves what it keeps in ``step.state_dict()``. Ranks stay equal to the last bit, on devices of one kind.

    A gradient that is not finite never enters what is kept. Under loss scaling gradients are unscaled and checked
    before, and all ranks skip the step where one has to; otherwise the update gets what is not finite, as it does from
    dense exchange.

    Vogels, Karimireddy and Jaggi, "PowerSGD", 2019 (arXiv 1905.13727), as in torch's ``powerSGD_hook``. The first
    factors start from numbers that are a function of shape and ``seed``; no random stream is drawn from.

    Args:
        how: ``bf16``, ``fp16`` or ``powersgd``.
        rank: columns of the factors. Like the following ones of ``powersgd`` only.
        start_step: updates with dense exchange before the first with factors.
        min_compression_rate: how many times fewer elements the factors must have.
        seed: of the first factors; the same on all ranks.
        error_feedback: whether what is left out is added to the next gradient.
        warm_start: whether factors start from those of the step before.

    Raises:
        GraphoptError: for unknown values, options of ``powersgd`` without it, and ``powersgd`` in a drop-in model.

    Example:
        >>> str(graphopt.Pipeline([CompressGradients("powersgd", rank=2), DataParallel()]))
        'data-parallel,compress-gradients{how=powersgd rank=2}'
    """

    name: ClassVar[str] = "compress-gradients"
    stage: ClassVar[PassStage] = "joint"
    also: ClassVar[tuple[PassStage, ...]] = ("step",)
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel", "mixed-precision", "scale-loss")
    requires: ClassVar[tuple[str, ...]] = ("data-parallel",)
    conflicts: ClassVar[tuple[str, ...]] = (
        "deep-gradient-compression",
        "local-sgd",
        "adaptive-local-sgd",
        "shard-optimizer",
    )
    changes_signature: ClassVar[bool] = True

    how: str = "bf16"
    _: KW_ONLY
    rank: int = 1
    start_step: int = 1000
    min_compression_rate: float = 2.0
    seed: int = 0
    error_feedback: bool = True
    warm_start: bool = True

    def __post_init__(self) -> None:
        rate = float(self.min_compression_rate)
        if self.how not in (*_CASTS, _POWERSGD):
            hint = did_you_mean(str(self.how), (*_CASTS, _POWERSGD)) or "use 'bf16', 'fp16' or 'powersgd'"
            raise GraphoptError(f"compress-gradients: how={self.how!r} is unknown; {hint}")
        idle = [field.name for field in fields(self) if field.kw_only and getattr(self, field.name) != field.default]
        if self.how in _CASTS and idle:
            raise GraphoptError(
                f"compress-gradients: {', '.join(idle)} would mean nothing with {self.how!r}; give how='powersgd', or "
                f"leave {'it' if len(idle) == 1 else 'them'} out"
            )
        rules = {
            f"rank must be at least 1, not {self.rank}": self.rank >= 1,
            f"start_step is a number of updates of at least 0, not {self.start_step}": self.start_step >= 0,
            f"min_compression_rate must be above 0, not {self.min_compression_rate}": self.min_compression_rate > 0,
            f"seed must be at least 0 and below 2**31, not {self.seed}": 0 <= self.seed < 2**31,
        }
        wrong = [rule for rule, holds in rules.items() if not holds]
        if wrong:
            raise GraphoptError("compress-gradients: " + "; ".join(wrong))
        object.__setattr__(self, "min_compression_rate", rate)

    def form(self, clock: Clock) -> str:
        """Dense steps first where there are factors; the program of the long run is the compressed one."""
        return _DENSE if self.how == _POWERSGD and clock.steps < self.start_step else ""

    def concerns(self, program: Program) -> bool:
        """Where ``DataParallel`` acts: on the step program, or on the joint program of a drop-in model."""
        return program.stage == "step" or program.lower is None

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites the step program, or the joint program of a drop-in model."""
        if self.how == _POWERSGD and program.stage != "step":
            raise GraphoptError(
                "compress-gradients: 'powersgd' keeps what is not sent from step to step, for which it needs the whole "
                "step: use optimize_step, or 'bf16' or 'fp16'"
            )
        if any(info(node).made_by == self.name for node in program.phase_nodes(Phase.SYNC)):
            return Changed(reason="the gradients of this program are compressed already")
        found = reductions(program)
        if not found:
            return Changed(reason="no gradients are exchanged in this program: one process, or nothing is trained")
        return self._low_rank(program, found) if self.how == _POWERSGD else self._cast(program, found)

    # --- in 16 bits --------------------------------------------------------------------------------------------------

    def _cast(self, program: Program, found: Sequence[Reduction]) -> Changed:
        wire = _CASTS[self.how]
        wide = [reduction for reduction in found if value_of(reduction.start).element_size() > wire.itemsize]
        if not wide:
            return Changed(reason="the gradients travel in 16 bits already")
        was = sum(storage_bytes(value_of(reduction.start)) for reduction in found)
        for reduction in wide:
            self._narrow(program, reduction, wire)
        now = was - sum(_saved(reduction, wire) for reduction in wide)
        count = sum(len(reduction.members) for reduction in wide)
        line = f"{count} gradients travel in {self.how}: {format_bytes(was)} -> {format_bytes(now)} per step and rank"
        left = [member.name for reduction in found if reduction not in wide for member in reduction.members]
        more = (f"left as they are, of 16 bits already: {', '.join(left)}",) if left else ()
        return Changed({"gradients compressed": count, "all-reduces": len(wide)}, lines=(line, *more))

    def _narrow(self, program: Program, reduction: Reduction, wire: torch.dtype) -> None:
        """Cast in front of one all-reduce and back behind it."""
        start = reduction.start
        divided, group = start.args[0], reduction.group
        assert isinstance(divided, fx.Node)
        (done,) = start.users
        dtype = value_of(start).dtype
        common: dict[str, Any] = {"phase": Phase.SYNC, "origin": f"{self.name}: {self.how}", "like": start}
        low = program.insert(aten._to_copy.default, (divided.args[0],), {"dtype": wire}, before=start, **common)
        low = program.insert(aten.div_.Scalar, (low, group.size), before=start, **common)
        again = program.insert(ALL_REDUCE, (low, "sum", group.name), before=start, hint="all_reduce", **common)
        arrived = program.insert(WAIT, (again,), before=done, hint="exchanged", **common)
        wide = program.insert(aten._to_copy.default, (arrived,), {"dtype": dtype}, before=done, **common)
        done.replace_all_uses_with(wide)
        for node in (done, start, divided):
            program.graph.erase_node(node)

    # --- as factors --------------------------------------------------------------------------------------------------

    def _low_rank(self, program: Program, found: Sequence[Reduction]) -> Changed:
        if program.context.forms.get(self.name, "") == _DENSE:
            return Changed(reason=f"gradients are exchanged densely until step {self.start_step}")
        settings = Settings(self.rank, self.min_compression_rate, self.seed, self.error_feedback, self.warm_start)
        chosen = {
            member.name: factors_of(value_of(member.gradient), settings)
            for reduction in found
            for member in reduction.members
        }
        if not any(chosen.values()):
            return Changed(reason="every gradient has about as few elements as its factors would have")
        was = sum(storage_bytes(value_of(reduction.start)) for reduction in found)
        gradients = self._exchange(program, found, settings, [name for name, factors in chosen.items() if factors])
        now = sum(_travels(value_of(gradients[name]), factors) for name, factors in chosen.items())
        return self._report(chosen, was, now)

    def _exchange(
        self, program: Program, found: Sequence[Reduction], settings: Settings, names: Collection[str]
    ) -> dict[str, fx.Node]:
        """Let the gradients called ``names`` travel as factors, others densely; returns all of this rank's by name."""
        group = one_group(found, self.name)
        limit = max(storage_bytes(value_of(reduction.start)) for reduction in found)
        gradients = remove_all_reduces(program, found, self.name)
        skip = agree_on_skipping(program, group, self.name) if FOUND_INF in program.names() else None
        members = [[member.name for member in reduction.members if member.name in names] for reduction in found]
        buckets = [{name: gradients[name] for name in bucket} for bucket in members if bucket]
        exchange_low_rank(program, buckets, settings, group, self.name, skip)
        dense = {name: node for name, node in gradients.items() if name not in names}
        groups = dict.fromkeys(dense, group)
        exchange_gradients(program, dense, groups, BucketSizes(limit), origin=self.name, after=skip)
        return gradients

    def _report(self, chosen: Mapping[str, Factors | None], was: int, now: int) -> Changed:
        names = tuple(name for name, factors in chosen.items() if factors)
        dense = [name for name, factors in chosen.items() if factors is None]
        summary = (
            f"{len(names)} of {len(chosen)} gradients travel as factors of rank {self.rank}: {format_bytes(was)} -> "
            f"{format_bytes(now)} per step and rank"
        )
        counts = {"gradients compressed": len(names), "dense gradients": len(dense)}
        return Changed(counts, tensors=names, lines=(summary, *_left_dense(dense)))


def _saved(reduction: Reduction, wire: torch.dtype) -> int:
    """Bytes that do not travel once a bucket is cast."""
    elements = sum(int(value_of(member.gradient).numel()) for member in reduction.members)
    size: int = value_of(reduction.members[0].gradient).element_size()
    return elements * (size - wire.itemsize)


def _travels(gradient: torch.Tensor, factors: Factors | None) -> int:
    """Bytes of a gradient on the wire."""
    if factors is None:
        return storage_bytes(gradient)
    return factors.elements * max(gradient.element_size(), torch.float32.itemsize)


def _left_dense(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"dense, as their factors would have about as many elements: {', '.join(names)}"
