"""How a program exchanges gradients, densely or sparsely and with whose momentum, and what the record says of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.communication.groups import Group
from graphopt.ir.ops.communication.sparse import packed_bytes
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.choice.sparse_or_dense import Speeds
from graphopt.rewriting.distributed.dense.buckets import Item, pack
from graphopt.rewriting.distributed.dense.remove_all_reduce import Member, Reduction
from graphopt.rewriting.distributed.sparse.optimizer_momentum import OptimizerMomentum
from graphopt.rewriting.distributed.sparse.sparse_exchange import MESSAGE, Rule, Sparse, entries, wire_dtype

__all__ = ["Decision", "listed", "messages", "others_of", "refuse_shared", "updates"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How one program exchanges gradients.

    Attributes:
        sparsity: of what is exchanged sparsely.
        group: the ranks.
        speeds: what is compared beside bytes; None for nothing.
        why_dense: why each gradient is exchanged densely, by name; "" for those that are not.
        momenta: of the optimizer, by the names of their parameters.
    """

    sparsity: float
    group: Group
    speeds: Speeds | None
    why_dense: Mapping[str, str]
    momenta: Mapping[str, OptimizerMomentum]

    def taken(self) -> dict[str, OptimizerMomentum]:
        """The momenta that are applied before the exchange: those of what is exchanged sparsely."""
        return {name: momentum for name, momentum in self.momenta.items() if self.why_dense.get(name) == ""}

    def taken_over(self) -> list[str]:
        """Lines on whose momentum is applied before the exchange."""
        groups: dict[str, int] = {}
        for momentum in self.taken().values():
            groups[str(momentum)] = groups.get(str(momentum), 0) + 1
        return [
            f"the momentum of SGD({settings}) of {count} {'gradient' if count == 1 else 'gradients'} is applied before "
            f"{'it is' if count == 1 else 'they are'} exchanged, in the optimizer's "
            f"{'buffer, which differs' if count == 1 else 'buffers, which differ'} from rank to rank: save the "
            "optimizer's state on each"
            for settings, count in groups.items()
        ]

    def reasons(self) -> Iterator[str]:
        """Lines on what is dense."""
        if self.speeds is not None:
            yield f"dense or sparse by time at {self.speeds}"
        yield from listed("dense", self.why_dense)


def refuse_shared(program: Program, found: Sequence[Reduction]) -> None:
    """Raise where two parameters get one gradient, which weight decay would have to tell apart."""
    for reduction in found:
        for member in reduction.members:
            others = others_of(program, member)
            if others:
                raise GraphoptError(
                    f"{member.name!r} and {others[0]!r} get the same gradient (they are added up, say), and weight "
                    "decay differs for them: give weight_decay to the optimizer in place of "
                    "deep-gradient-compression, or leave it out"
                )


def others_of(program: Program, member: Member) -> list[str]:
    """The other parameters that get the gradient of one."""
    parameters = {f"{spec.target}~": spec.target for _, spec in program.inputs_of("parameter")}
    return [parameters[name] for name in info(member.gradient).names if name in parameters]


def messages(gradients: Mapping[str, fx.Node], rule: Rule) -> Iterator[dict[str, fx.Node]]:
    """The gradients of a bucket whose entries travel together: of one dtype and device, in the order of the bucket."""
    items = []
    for place, (name, node) in enumerate(gradients.items()):
        value = value_of(node)
        sent = packed_bytes([entries(value.numel(), rule.sparsity)], wire_dtype(value.dtype, rule.wire))
        items.append(Item(name, sent, place, (value.dtype, value.device)))
    for message in pack(items, MESSAGE):
        yield {item.name: gradients[item.name] for item in message.items}


def updates(done: Sequence[Sparse]) -> Iterator[str]:
    """Which tensors the update touches at the entries that arrive only, and why it reads dense sums of the others."""
    reason_of = attrgetter("dense_because")
    for reason, found in itertools.groupby(sorted(done, key=reason_of), key=reason_of):
        names = ", ".join(name for sparse in found for name in sparse.names)
        how = f"from dense sums, since {reason}" if reason else "at the entries that arrive, without dense sums"
        yield f"updated {how}: {names}"


def listed(form: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """A line for each reason, with the names that have it."""
    named: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason:
            named.setdefault(reason, []).append(name)
    for reason, names in named.items():
        yield f"{form}, {reason}: {', '.join(names)}"
