"""Deep gradient compression: ranks exchange the largest entries of what they have accumulated."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import fx

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.gradients import all_gradients_made
from graphopt.ir.node import value_of
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.communication.sparse import LARGEST, packed_bytes
from graphopt.ir.ops.updates.scale import FOUND_INF
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.distributed.choice.sparse_decision import (
    Decision,
    listed,
    messages,
    others_of,
    refuse_shared,
    updates,
)
from graphopt.rewriting.distributed.choice.sparse_or_dense import Speeds, check_bandwidth, speeds_of
from graphopt.rewriting.distributed.dense.all_reduce import exchange_gradients
from graphopt.rewriting.distributed.dense.buckets import BucketSizes
from graphopt.rewriting.distributed.dense.remove_all_reduce import (
    Reduction,
    agree_on_skipping,
    one_group,
    reductions,
    remove_all_reduces,
)
from graphopt.rewriting.distributed.sparse.optimizer_momentum import (
    OptimizerMomentum,
    leave_momentum_out,
    momenta_of,
    why_not_taken_over,
)
from graphopt.rewriting.distributed.sparse.sparse_exchange import (
    WIRE_DTYPES,
    Rule,
    Sparse,
    SparseExchange,
    accumulate_densely,
    count_left_out,
    entries,
    exchange_sparsely,
    wire_dtype,
)
from graphopt.rewriting.distributed.sparse.sparse_update import Rampup, adds_gradients
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.training_pass import Clock, TrainingPass

__all__ = ["DeepGradientCompression"]

logger = logging.getLogger(__name__)

_DENSE = "dense"
_LEFT_OUT = "deep-gradient-compression/left out"
_SEEN = "deep-gradient-compression/left out, seen"
_LOOK = 100
_WARNING = (
    "deep-gradient-compression has left %s of this rank out up to step %d because they are not finite: look "
    "at what the model computes, lower the learning rate, or skip such steps on all ranks with "
    "ScaleLoss(init_scale=1, dynamic=False)"
)
_MOMENTUM = 0.9
_TOLD = "deep-gradient-compression/momentum taken over"
_OF_MOMENTUM = {"momentum": None, "nesterov": False, "weight_decay": 0.0, "masking": True}
"""Options that mean nothing to error feedback, with their defaults."""
_CORRECTIONS = ("momentum", "feedback")


@final
@dataclass(frozen=True)
class DeepGradientCompression(TrainingPass):
    """Exchange the entries of largest magnitude in place of whole gradients; what is not sent is kept, and added to.

    Replaces all-reduces of ``DataParallel``. Each rank accumulates its gradients, sends the ``1 - sparsity`` largest
    entries of what it has accumulated, and keeps the rest. Values and indices of a bucket travel in one all-gather, or
    in several of 16 KiB and more, and what is exchanged densely of it in one all-reduce. All ranks add up what came in
    the order of the ranks, so that their parameters stay equal to the last bit.

    ``correction="momentum"`` is the published method for SGD: momentum is applied before accumulation, on each rank,
    gradients are clipped to ``clip_norm / sqrt(ranks)`` before they are accumulated, weight decay is added to them, and
    the momentum of what is sent starts again. The momentum is that of ``torch.optim.SGD(momentum=...)`` where it has
    one: its buffers, and momentum, dampening, Nesterov's form and weight decay of the parameter's group as they are at
    each step. The record says so. Buffers of what is exchanged sparsely then differ from rank to rank: save the
    optimizer's state on each. Without it the pass keeps a momentum of its own. A momentum given to both is refused.
    ``correction="feedback"`` accumulates plain gradients (error feedback) for optimizers with momentum of their own,
    such as Adam; it is not the published method, and Adam sees sparse gradients.

    Where no more than 1 of 64 elements arrives, and all that is left for the optimizer is to add them (SGD without
    weight decay, or with a momentum that is taken over), the update touches just these elements; otherwise it reads
    dense sums. The record says which.

    Before ``rampup_begin_step`` exchange is dense; the sparsities follow one another in ``rampup_step`` steps, and the
    last one stays. The momentum goes on through the switch. Tensors stay dense that have fewer than ``min_elements``,
    one dimension, or of which sparse exchange would take as many bytes as dense (about where ranks times density reach
    1); with ``bandwidth``, also those of which it would take as much time, the work around both included. The record
    lists them. The step compiles a program for each sparsity.

    A gradient that is not finite never enters what is accumulated: under loss scaling all ranks skip the step where one
    has to, and accumulate nothing (``ScaleLoss(init_scale=1, dynamic=False)`` does that in float32); otherwise that
    gradient is left out on its rank, and a warning counts them. Tensors that are exchanged densely are not clipped,
    and take what is not finite to all ranks as without this pass.

    Lin et al., "Deep Gradient Compression", 2018 (arXiv 1712.01887). Clipping is by tensor.

    Args:
        sparsity: shares of the elements that are not sent, ascending, below 1; 0 means dense exchange.
        rampup_begin_step: updates with dense exchange before the first sparsity.
        rampup_step: updates over which the sparsities are spread evenly; about 4 % of training is usual.
        momentum: of the momentum correction; at least 0, below 1. None: the optimizer's, or 0.9 where it has none.
        nesterov: Nesterov's form of the momentum that is given here.
        weight_decay: times the parameter is added to its gradient before that momentum. (The optimizer's, where the
            momentum is given here, acts behind the exchange and takes no part in it.)
        clip_norm: limit on the norm of each gradient; None for none.
        masking: whether the momentum of sent entries starts again from 0.
        correction: ``momentum`` or ``feedback``.
        wire: dtype in which values travel, ``float32``, ``bfloat16`` or ``float16``; what is rounded off is kept.
        min_elements: smaller tensors stay dense.
        bandwidth: of one rank's link, as text (``1Gbit``, ``25GB/s``) or in bytes per second, to choose by time as
            well as by bytes; ``measured`` lets the ranks measure it when the step is compiled; None chooses by bytes
            alone. What selecting costs is measured in both cases. All ranks choose alike, by the slowest one's
            figures. They are in the state of the step, so that a run which continues from it chooses as before; two
            runs that both start anew may differ: give the figure, and keep the folder of figures, to make them alike.

    Raises:
        GraphoptError: for options out of range, and where the optimizer would apply momentum a second time: where it is
            not SGD, or this pass is given one too.

    Example:
        >>> str(graphopt.Pipeline([DeepGradientCompression(rampup_begin_step=1000), DataParallel()]))
        'data-parallel,deep-gradient-compression{rampup-begin-step=1000}'
    """

    name: ClassVar[str] = "deep-gradient-compression"
    stage: ClassVar[PassStage] = "step"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel", "mixed-precision", "scale-loss")
    requires: ClassVar[tuple[str, ...]] = ("data-parallel",)
    conflicts: ClassVar[tuple[str, ...]] = (
        "clip-gradients",
        "local-sgd",
        "adaptive-local-sgd",
        "compress-gradients",
        "shard-optimizer",
    )
    changes_signature: ClassVar[bool] = True

    sparsity: tuple[float, ...] = (0.75, 0.9375, 0.984375, 0.996, 0.999)
    rampup_begin_step: int = 0
    rampup_step: int = 100
    momentum: float | None = None
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    masking: bool = True
    correction: str = "momentum"
    wire: str = "float32"
    min_elements: int = 16384
    bandwidth: str | float | None = None

    def __post_init__(self) -> None:
        wrong = self._out_of_range()
        if self.bandwidth is not None:
            wrong += _wrong_bandwidth(self.bandwidth)
        if wrong:
            raise GraphoptError("deep-gradient-compression: " + "; ".join(wrong))
        _check_known("correction", self.correction, _CORRECTIONS)
        _check_known("wire", self.wire, WIRE_DTYPES)
        idle = [name for name, default in _OF_MOMENTUM.items() if getattr(self, name) != default]
        if self.correction == "feedback" and idle:
            raise GraphoptError(
                f"deep-gradient-compression: {', '.join(idle)} {'belongs' if len(idle) == 1 else 'belong'} to "
                "correction='momentum'; with 'feedback' the optimizer applies its own momentum and weight decay"
            )

    def _out_of_range(self) -> list[str]:
        """What each number that is out of its range must be."""
        begin = self.rampup_begin_step
        shares = bool(self.sparsity) and _ascends(self.sparsity) and all(0 <= share < 1 for share in self.sparsity)
        limit = self.clip_norm is None or self.clip_norm > 0
        rules = {
            f"sparsity holds shares of at least 0 and below 1 in ascending order, not {self.sparsity}": shares,
            f"rampup_begin_step is a number of updates of at least 0, not {begin}": begin >= 0,
            f"rampup_step is a number of updates of at least 1, not {self.rampup_step}": self.rampup_step >= 1,
            f"momentum must be at least 0 and below 1, not {self.momentum}": self.momentum is None
            or 0 <= self.momentum < 1,
            f"weight_decay must be at least 0, not {self.weight_decay}": self.weight_decay >= 0,
            f"clip_norm must be above 0, or None for no limit, not {self.clip_norm}": limit,
            f"min_elements must be at least 1, not {self.min_elements}": self.min_elements >= 1,
        }
        return [rule for rule, holds in rules.items() if not holds]

    @property
    def rampup(self) -> Rampup:
        """The warm-up."""
        return Rampup(self.sparsity, self.rampup_begin_step, self.rampup_step)

    def form(self, clock: Clock) -> str:
        """Dense, or one of the sparsities; the program of the long run has the last one."""
        sparsity = self.rampup.at(clock.steps)
        if sparsity == self.sparsity[-1]:
            return ""
        return _form_of(sparsity) if sparsity else _DENSE

    def advance(self, clock: Clock) -> None:
        """Warn of gradients that were left out; on a device that has to be waited for, at every 100th step."""
        try:
            count = clock.state(_LEFT_OUT)
        except KeyError:
            return
        if count.device.type != "cpu" and clock.steps % _LOOK:
            return
        if int(count) > 2 * clock.numbers.get(_SEEN, 0):  # the first one, then at every doubling
            clock.numbers[_SEEN] = float(int(count))
            logger.warning(_WARNING, counted(int(count), "gradients"), clock.steps - 1)

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program."""
        found = reductions(program)
        if not found:
            return Changed(reason="no gradients are exchanged in this program: there is one process")
        if any(spec.target.startswith(f"{self.name}/") for _, spec in program.inputs_of("pass_state")):
            return Changed(reason="the gradients of this program are compressed already")
        momenta = self._momenta(program)
        if self.weight_decay:
            refuse_shared(program, found)
        sparsity = self._sparsity(program)
        if not sparsity:
            return self._stay_dense(program, found, ("sparsity 0: exchange is dense",), momenta)
        group = one_group(found, self.name)
        speeds = self._speeds(program, found, group)
        why_dense = self._why_dense(program, found, sparsity, speeds, momenta)
        decision = Decision(sparsity, group, speeds, why_dense, momenta)
        if all(decision.why_dense.values()):
            return self._stay_dense(program, found, tuple(decision.reasons()), momenta)
        done, gradients = self._exchange(program, found, decision)
        changed = self._report(done, gradients, decision)
        if decision.taken() and _TOLD not in program.context.step.numbers:
            program.context.step.numbers[_TOLD] = 1.0
            for line in decision.taken_over():
                logger.warning("deep-gradient-compression: %s", line)
        return changed

    def _exchange(
        self, program: Program, found: Sequence[Reduction], decision: Decision
    ) -> tuple[list[Sparse], dict[str, fx.Node]]:
        """Replace the all-reduces; returns what is exchanged sparsely, and all gradients of this rank by name."""
        group, rule = decision.group, self._rule(decision.sparsity, decision.momenta)
        starts = {member.name: member.gradient for reduction in found for member in reduction.members}
        taken = leave_momentum_out(program, decision.taken(), starts, self.name)
        limits = [storage_bytes(value_of(reduction.start)) for reduction in found]
        gradients = remove_all_reduces(program, found, self.name)
        skip = agree_on_skipping(program, group, self.name) if FOUND_INF in program.names() else None
        exchange = SparseExchange(rule, group, self.name, skip, taken)
        done: list[Sparse] = []
        dense: dict[str, fx.Node] = {}
        for reduction, limit in zip(found, limits, strict=True):
            bucket = {member.name: gradients[member.name] for member in reduction.members}
            rest = {name: node for name, node in bucket.items() if decision.why_dense[name]}
            sparse = {name: node for name, node in bucket.items() if name not in rest}
            for message in messages(sparse, rule):
                done.append(exchange_sparsely(program, message, exchange))
            groups = dict.fromkeys(rest, group)
            exchange_gradients(program, rest, groups, BucketSizes(limit), origin=self.name, after=skip)
            dense |= rest
        if rule.momentum is not None:
            self._momentum(program, list(dense), rule, skip)
        finite = [flag for sparse_bucket in done for flag in sparse_bucket.finite]
        if finite:
            count_left_out(program, finite, _LEFT_OUT, self.name)
        return done, gradients

    def _sparsity(self, program: Program) -> float:
        form = program.context.forms.get(self.name, "")
        if form == _DENSE:
            return 0.0
        return next((share for share in self.sparsity if form == _form_of(share)), self.sparsity[-1])

    def _rule(self, sparsity: float, momenta: Mapping[str, OptimizerMomentum]) -> Rule:
        """What is accumulated, but for momenta of the optimizer."""
        momentum = None
        if self.correction == "momentum" and not momenta:
            momentum = _MOMENTUM if self.momentum is None else self.momentum
        return Rule(sparsity, momentum, self.nesterov, self.weight_decay, self.clip_norm, self.masking, self.wire)

    def _momenta(self, program: Program) -> dict[str, OptimizerMomentum]:
        """The optimizer's momenta, which are applied before the exchange; none for error feedback."""
        if self.correction != "momentum":
            return {}
        momenta = momenta_of(program, self.name)
        given = [name for name in ("momentum", "nesterov", "weight_decay") if getattr(self, name) != _OF_MOMENTUM[name]]
        if momenta and given:
            raise GraphoptError(
                "the optimizer has a momentum of its own, which deep-gradient-compression takes over, and the pass is "
                f"given {' and '.join(f'{name}={getattr(self, name)}' for name in given)} as well: leave that out of "
                "the pass, or use torch.optim.SGD without momentum"
            )
        return momenta

    # --- what is dense -----------------------------------------------------------------------------------------------

    def _speeds(self, program: Program, found: list[Reduction], group: Group) -> Speeds | None:
        """What is compared beside bytes; None for nothing."""
        if self.bandwidth is None:
            return None
        device = value_of(found[0].members[0].gradient).device
        speeds = speeds_of(program, group, device, self.bandwidth)
        return replace(speeds, adds=adds_gradients(program, momentum=self.correction == "momentum"))

    def _why_dense(
        self,
        program: Program,
        found: Sequence[Reduction],
        sparsity: float,
        speeds: Speeds | None,
        momenta: Mapping[str, OptimizerMomentum],
    ) -> dict[str, str]:
        """Why each tensor stays dense, by name; "" for those that are exchanged sparsely."""
        why: dict[str, str] = {}
        for reduction in found:
            for member in reduction.members:
                gradient, momentum = value_of(member.gradient), momenta.get(member.name)
                why[member.name] = self._reason(gradient, sparsity, reduction.group.size, speeds)
                if momentum is not None and not why[member.name]:
                    shared = others_of(program, member)
                    why[member.name] = why_not_taken_over(momentum, gradient) or (
                        f"{shared[0]} gets the same gradient" if shared else ""
                    )
        return why

    def _reason(self, gradient: torch.Tensor, sparsity: float, ranks: int, speeds: Speeds | None) -> str:
        by_bytes = self._reason_by_bytes(gradient, sparsity, ranks)
        if by_bytes or speeds is None:
            return by_bytes
        return speeds.why_dense(gradient, sparsity, wire_dtype(gradient.dtype, self.wire), ranks)

    def _reason_by_bytes(self, gradient: torch.Tensor, sparsity: float, ranks: int) -> str:
        elements = gradient.numel()
        if elements < self.min_elements:
            return f"fewer than {self.min_elements} elements"
        if gradient.dim() < 2:
            return "one dimension"
        if elements >= LARGEST:
            return "2**31 elements or more"
        received = (ranks - 1) * packed_bytes([entries(elements, sparsity)], wire_dtype(gradient.dtype, self.wire))
        dense = 2 * (ranks - 1) * elements * gradient.element_size() // ranks
        return "dense exchange takes no more bytes" if received >= dense else ""

    def _stay_dense(
        self,
        program: Program,
        found: Sequence[Reduction],
        why: tuple[str, ...],
        momenta: Mapping[str, OptimizerMomentum],
    ) -> Changed:
        """Leave the exchange as it is, and apply the momentum of this pass, where it has one, to its results."""
        if self.correction != "momentum" or momenta:
            return Changed(lines=why, reason="; ".join(why))
        names = [member.name for reduction in found for member in reduction.members]
        self._momentum(program, names, self._rule(0.0, momenta), program.names().get(FOUND_INF))
        return Changed(counts={"dense gradients": len(names)}, lines=why)

    def _momentum(self, program: Program, names: list[str], rule: Rule, skip: fx.Node | None) -> None:
        named = program.names()
        means = {name: named[f"{name}~"] for name in names}
        if means:
            accumulate_densely(program, means, rule, all_gradients_made(program), self.name, skip)

    def _starts(self, gradients: Mapping[str, fx.Node], ranks: int, speeds: Speeds | None) -> Iterator[str]:
        """When each sparsity begins, and whether it is high enough for any tensor."""
        values = [value_of(node) for node in gradients.values()]
        for step, share in self.rampup.starts():
            sparse = bool(share) and any(not self._reason(value, share, ranks, speeds) for value in values)
            yield f"{share:g} from step {step}" + ("" if sparse else " (dense)")

    def _report(self, done: Sequence[Sparse], gradients: Mapping[str, fx.Node], decision: Decision) -> Changed:
        group, count = decision.group, len(decision.why_dense)
        names = tuple(name for sparse in done for name in sparse.names)
        sent = sum(sparse.bytes for sparse in done)
        whole = sum(storage_bytes(value_of(gradients[name])) for name in names)
        summary = (
            f"{len(names)} of {count} gradients are exchanged sparsely over the {group.size} ranks of the group "
            f"{group.name!r}: {format_bytes(sent)} sent per step and rank in place of {format_bytes(whole)}"
        )
        times = self._why_sparse({name: value_of(gradients[name]) for name in names}, decision)
        starts = ", ".join(self._starts(gradients, group.size, decision.speeds))
        lines = [summary, *decision.reasons(), *listed("sparse", times), *updates(done)]
        lines += decision.taken_over()
        lines.append(f"sparsity {decision.sparsity:g} here; {starts}")
        counts = {"sparse gradients": len(names), "dense gradients": count - len(names), "exchanges": len(done)}
        return Changed(counts, tensors=names, lines=tuple(lines))

    def _why_sparse(self, gradients: Mapping[str, torch.Tensor], decision: Decision) -> dict[str, str]:
        """By how much sparse exchange is faster, for each gradient; nothing where times are not compared."""
        speeds, sparsity, ranks = decision.speeds, decision.sparsity, decision.group.size
        if speeds is None:
            return {}
        return {
            name: speeds.why_sparse(value, sparsity, wire_dtype(value.dtype, self.wire), ranks)
            for name, value in gradients.items()
        }


def _form_of(sparsity: float) -> str:
    return f"sparsity {sparsity!r}"


def _ascends(shares: Sequence[float]) -> bool:
    return all(one <= other for one, other in itertools.pairwise(shares))


def _check_known(option: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        hint = did_you_mean(value, known) or f"use {' or '.join(map(repr, known))}"
        raise GraphoptError(f"deep-gradient-compression: {option}={value!r} is unknown; {hint}")


def _wrong_bandwidth(bandwidth: str | float) -> Iterator[str]:
    try:
        check_bandwidth(bandwidth)
    except GraphoptError as error:
        yield f"bandwidth: {error}"
