"""A sharded update in a program: gradients are scattered as sums, parameters gathered from the ranks that updated them.

In place of each all-reduce of a bucket stands a reduce-scatter, beside backward, and behind the update an all-gather.
With ``N`` ranks a gradient of a bucket is ``N`` rows of ``ceil(elements / N)`` elements, the last ones filled up with
zeros; row ``i`` of all gradients together is what rank ``i`` gets. On CUDA that is one ``reduce_scatter_tensor``. On a
CPU, where gloo's sends as much as an all-reduce, it is a ``reduce_scatter_sum``, which sends half of that.

Source: Rajbhandari, Rasley, Ruwase and He, ZeRO, SC 2020 (arXiv 1910.02054), stage 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, REDUCE_SCATTER_SUM, WAIT
from graphopt.ir.ops.communication.groups import Group, check_grid, find_group
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.dense.all_reduce import final_gradients
from graphopt.rewriting.distributed.dense.remove_all_reduce import Member, Reduction, one_group
from graphopt.rewriting.distributed.flat_exchange import flat, read_parts, start_exchange
from graphopt.rewriting.distributed.parameter_average import behind_update
from graphopt.rewriting.shards import Shards, piece_of, shard_of

__all__ = [
    "agree_on_norms",
    "check_sharded_update",
    "find_replicas",
    "gather_parameters",
    "is_flat_view",
    "scatter_gradients",
    "shards_of_rank",
]

aten = torch.ops.aten

_EACH_BY_ITSELF = (
    "check_and_unscale_",
    "_foreach_mul_",
    "_foreach_clamp_min_",
    "_foreach_clamp_max_",
    "_foreach_div_",
)
_NORM = aten._foreach_norm.Scalar


class _Inserter:
    """Inserts calls of one origin."""

    def __init__(self, program: Program, group: Group, origin: str, replicas: Group | None = None) -> None:
        self.program = program
        self.group = group
        self.replicas = replicas
        self.common: dict[str, Any] = {"phase": Phase.SYNC, "origin": origin}

    def call(self, target: Any, args: tuple[Any, ...], before: fx.Node, **more: Any) -> fx.Node:
        """One call in front of a node."""
        return self.program.insert(target, args, before=before, **self.common, **more)

    def padded(self, node: fx.Node, elements: int, before: fx.Node) -> fx.Node:
        """A flat tensor, filled up with zeros to so many elements."""
        missing = elements - value_of(node).numel()
        return self.call(aten.constant_pad_nd.default, (node, [0, missing]), before) if missing else node


def check_sharded_update(
    program: Program, found: Sequence[Reduction], group: Group, origin: str, replicas: Group | None = None
) -> None:
    """Refuse a program whose update cannot be one of shards.

    Args:
        program: of stage step.
        found: the all-reduces of its gradients.
        group: over which the update is to be sharded.
        origin: the pass that asks.
        replicas: the ranks that have the same shard as this one, where there are several.

    Raises:
        GraphoptError: saying what does not fit.
    """
    exchanged_over = one_group(found, origin) if found else group
    if replicas is not None and found:
        check_grid(exchanged_over, group, replicas, origin)
    elif exchanged_over.name != group.name and exchanged_over.ranks != group.ranks:
        raise GraphoptError(
            f"gradients are exchanged over the group {exchanged_over.name!r}, and the update is sharded over "
            f"{group.name!r}: give data-parallel and {origin} the same group=, or {origin} replicas=, the dimension of "
            "a DeviceMesh along which ranks have the same shards"
        )
    exchanged = {member.name for reduction in found for member in reduction.members}
    alone = [name for name in final_gradients(program) if name not in exchanged]
    if alone:
        raise GraphoptError(
            f"the gradient of {alone[0]!r} is not exchanged, so that its update cannot be sharded: let "
            f"data-parallel exchange all gradients over one group, or leave {origin} out"
        )
    whole = [m.name for r in found for m in r.members if not _has_shard(value_of(m.part).numel(), m.part.users)]
    if whole:
        raise GraphoptError(
            f"the update of {whole[0]!r} in this program is that of all of its elements: give {origin} to "
            "optimize_step, which traces the optimizer for this rank's shards"
        )


def _has_shard(elements: int, readers: Mapping[fx.Node, None]) -> bool:
    return any(reader.target is aten.as_strided.default and reader.args[1] == [elements] for reader in readers)


def shards_of_rank(group_name: str, sizes: Mapping[str, int]) -> Shards | None:
    """This rank's part of tensors with so many elements, by name; None in a group of one process."""
    group = find_group(group_name)
    if group.size == 1:
        return None
    return {name: shard_of(elements, group.rank, group.size) for name, elements in sizes.items()}


def find_replicas(group_name: str) -> Group | None:
    """The group of the ranks that have the same shard; None without a name, and where it has one process."""
    group = find_group(group_name) if group_name else None
    return None if group is None or group.size == 1 else group


# --- gradients -------------------------------------------------------------------------------------------------------


def scatter_gradients(
    program: Program, found: Sequence[Reduction], group: Group, origin: str, replicas: Group | None = None
) -> None:
    """Let each rank get its shard of the mean of every gradient in place of all of it.

    Args:
        program: of stage step, whose update reads shards of parameters and gradients.
        found: the all-reduces of all its gradients.
        group: at least two ranks.
        origin: the pass that asks.
        replicas: the ranks that have the same shard as this one, which sum theirs up then; None where it has it alone.

    Raises:
        GraphoptError: where something but the update reads a gradient whose elements it does not take one by one.
    """
    for reduction in found:
        for member in reduction.members:
            _check_readers(member)
    insert = _Inserter(program, group, origin, replicas)
    next_bucket: fx.Node | None = None
    for reduction in reversed(found):
        next_bucket = _scatter(insert, reduction, next_bucket)
    program.erase_dead()


def _scatter(insert: _Inserter, reduction: Reduction, next_bucket: fx.Node | None) -> fx.Node:
    """Scatter the gradients of one all-reduce; returns the first call that is made for it.

    The sums are made before the next bucket is filled, so that one bucket takes memory at a time.

    Args:
        insert: inserts calls.
        reduction: the all-reduce.
        next_bucket: the first call that is made for the next one; None behind the last.
    """
    program, group, start = insert.program, insert.group, reduction.start
    (waiting,) = start.users
    done, before = next_bucket or waiting, start.prev
    pieces = [piece_of(value_of(member.part).numel(), group.size) for member in reduction.members]
    rows = []
    for member, piece in zip(reduction.members, pieces, strict=True):
        elements = insert.padded(flat(program, member.gradient, start, insert.common), group.size * piece, start)
        rows.append(insert.call(aten.view.default, (elements, [group.size, piece]), start))
    joined = insert.call(aten.cat.default, (rows, 1), start, hint="bucket")
    ranks = group.size * (insert.replicas.size if insert.replicas else 1)
    joined = insert.call(aten.mul_.Scalar, (joined, 1.0 / ranks), start)
    sent = insert.call(aten.view.default, (joined, [group.size * sum(pieces)]), start)
    arrived = _sum_arriving(insert, sent, sum(pieces), start, done)
    if insert.replicas is not None:
        begun = insert.call(ALL_REDUCE, (arrived, "sum", insert.replicas.name), done, hint="all_reduce")
        done = waiting  # while the next buckets are filled and scattered
        arrived = insert.call(WAIT, (begun,), done, hint="exchanged")
    offset = 0
    for member, piece in zip(reduction.members, pieces, strict=True):
        mine = insert.call(aten.slice.Tensor, (arrived, 0, offset, offset + piece), done, like=member.part)
        offset += piece
        program.hand_over_name(f"{member.name}~", member.part, mine)
        _redirect(insert, member, mine)
        program.graph.erase_node(member.part)
    shared, first = start.args[0], before.next
    assert isinstance(shared, fx.Node)
    for node in (waiting, start, shared):
        program.graph.erase_node(node)
    return first


def _sum_arriving(insert: _Inserter, sent: fx.Node, size: int, start: fx.Node, due: fx.Node) -> fx.Node:
    """This rank's part of the sum over the ranks, shape ``[size]``: started at one place, waited for at another."""
    group = insert.group
    if _torch.device_kind(value_of(sent)) != "cpu":
        begun = insert.call(REDUCE_SCATTER, (sent, "sum", group.size, group.name), start, hint="reduce_scatter")
        return insert.call(WAIT, (begun,), due, hint="exchanged")
    begun = insert.call(REDUCE_SCATTER_SUM, (sent, group.size, group.name), start, hint="reduce_scatter")
    return insert.call(WAIT, (begun,), due, hint="exchanged")


def _check_readers(member: Member) -> None:
    for reader in member.part.users:
        if is_flat_view(reader, member.part) or reader.target is _NORM:
            continue
        if schema.op_name(reader) not in _EACH_BY_ITSELF:
            raise GraphoptError(
                f"{reader.name} ({info(reader).origin}) reads the whole gradient of {member.name!r}, of which each "
                "rank gets a shard: leave that pass or shard-optimizer out"
            )


def is_flat_view(reader: fx.Node, part: fx.Node) -> bool:
    """Whether this is how the update begins to read its shard of a tensor: all elements, of which slices are taken."""
    flattened = reader.target is aten.as_strided.default and bool(reader.args[1] == [value_of(part).numel()])
    return flattened and all(user.target is aten.slice.Tensor for user in reader.users)


def _redirect(insert: _Inserter, member: Member, mine: fx.Node) -> None:
    """Let what reads a gradient read this rank's shard: the update without what fills it up."""
    for reader in list(member.part.users):
        if not is_flat_view(reader, member.part):
            reader.replace_input_with(member.part, mine)
            continue
        for taken in list(reader.users):
            # a view on every rank, also where nothing fills the shard up: programs have the same calls everywhere
            given = (mine, 0, 0, value_of(taken).numel())
            taken.replace_all_uses_with(insert.call(aten.slice.Tensor, given, taken))
            insert.program.graph.erase_node(taken)
        insert.program.graph.erase_node(reader)


def agree_on_norms(program: Program, group: Group, origin: str) -> int:
    """Let norms over gradients be those of all shards together; returns how many there are.

    Args:
        program: of stage step, behind ``scatter_gradients``.
        group: at least two ranks.
        origin: the pass that asks.

    Raises:
        GraphoptError: where norms are used for something but one norm over all of them.
    """
    totals = {
        _total(user) for node in program.graph.find_nodes(op="call_function", target=_NORM) for user in node.users
    }
    for total in totals:
        _agree_on_norm(program, total, group, origin)
    return len(totals)


def _total(norm: fx.Node) -> fx.Node:
    """The norm of norms that one of them goes into."""
    stacked = next((user for user in norm.users if user.target is aten.stack.default), None)
    total = next(iter(stacked.users), None) if stacked is not None else None
    if norm.target is not operator.getitem or total is None or total.target is not aten.linalg_vector_norm.default:
        raise GraphoptError(
            f"{norm.name} ({info(norm).origin}) is the norm of a gradient of which each rank has a shard, and it is "
            "not known what it is for: leave that pass or shard-optimizer out"
        )
    return total


def _agree_on_norm(program: Program, total: fx.Node, group: Group, origin: str) -> None:
    power: Any = total.args[1]
    readers, place = list(total.users), total.next
    insert = _Inserter(program, group, f"{origin}: norm over all ranks")
    value = total
    if power != math.inf:
        value = insert.call(aten.pow.Tensor_Scalar, (value, power), place)
    how: Any = "max" if power == math.inf else "mean"
    start = start_exchange(program, [value], place, group, how, insert.common["origin"])
    (agreed,) = read_parts(program, start, [value], place, insert.common["origin"])
    if power != math.inf:
        agreed = insert.call(aten.mul.Tensor, (agreed, group.size), place)
        agreed = insert.call(aten.pow.Tensor_Scalar, (agreed, 1.0 / power), place)
    for reader in readers:
        reader.replace_input_with(total, agreed)


# --- parameters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gather:
    """One all-gather on its way: of these parameters, with so many elements of each from every rank."""

    parameters: tuple[fx.Node, ...]
    pieces: tuple[int, ...]
    start: fx.Node


def gather_parameters(program: Program, buckets: Sequence[Sequence[str]], group: Group, origin: str) -> None:
    """Behind the update, let every rank get the shards of parameters that the others have updated.

    While a bucket travels, the one before is copied to its parameters, so that no more than two take memory.
    Low-precision copies of parameters are renewed behind that.

    Args:
        program: of stage step.
        buckets: names of the parameters that travel together; of one dtype and device each.
        group: at least two ranks.
        origin: the pass that asks.
    """
    nodes: Mapping[str, fx.Node] = {spec.target: node for node, spec in program.inputs_of("parameter")}
    place = behind_update(program, {nodes[name] for names in buckets for name in names})
    insert = _Inserter(program, group, f"{origin}: parameters")
    last: tuple[_Gather, fx.Node] | None = None
    for names in buckets:
        gather = _gather(insert, [nodes[name] for name in names], place)
        if last is not None:
            _spread(insert, *last, place)
        last = gather, insert.call(WAIT, (gather.start,), place, hint="gathered")
    if last is not None:
        _spread(insert, *last, place)


def _gather(insert: _Inserter, parameters: Sequence[fx.Node], place: fx.Node) -> _Gather:
    group = insert.group
    pieces, mine = [], []
    for node in parameters:
        elements = value_of(node).numel()
        first, length = shard_of(elements, group.rank, group.size)
        pieces.append(piece_of(elements, group.size))
        own = insert.call(aten.slice.Tensor, (_elements(insert, node, place), 0, first, first + length), place)
        mine.append(insert.padded(own, pieces[-1], place))
    joined = insert.call(aten.cat.default, (mine,), place, hint="shards")
    start = insert.call(ALL_GATHER, (joined, group.size, group.name), place, hint="all_gather")
    return _Gather(tuple(parameters), tuple(pieces), start)


def _elements(insert: _Inserter, node: fx.Node, place: fx.Node) -> fx.Node:
    return insert.call(aten.as_strided.default, (node, [value_of(node).numel()], [1]), place)


def _spread(insert: _Inserter, gather: _Gather, done: fx.Node, place: fx.Node) -> None:
    """Copy what was gathered, one row from each rank, to the parameters."""
    width, offset = sum(gather.pieces), 0
    for node, piece in zip(gather.parameters, gather.pieces, strict=True):
        elements = value_of(node).numel()
        whole, rest = divmod(elements, piece)
        for first, shape, strides, where in (
            (0, [whole, piece], [width, 1], offset),
            (whole * piece, [rest], [1], whole * width + offset),
        ):
            if math.prod(shape):
                part = insert.call(aten.as_strided.default, (done, shape, strides, where), place)
                taken = (_elements(insert, node, place), 0, first, first + math.prod(shape))
                target = insert.call(aten.slice.Tensor, taken, place)
                target = insert.call(aten.view.default, (target, shape), place)
                insert.call(aten.copy_.default, (target, part), place, like=node)
        offset += piece
