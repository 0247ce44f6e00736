"""Each rank keeps its share of every parameter, of its gradient and of the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import fx

from graphopt.analysis.costs.cost import check_cost
from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes, format_seconds, parse_bytes
from graphopt.rewriting.distributed.dense.remove_all_reduce import agree_on_skipping, reductions
from graphopt.rewriting.distributed.sharding.low_precision_gathers import scale_shards
from graphopt.rewriting.distributed.sharding.sharded_parameters import (
    cast_where_read,
    keep_shards,
    sharded_inputs,
    to_shard,
    update_shards,
)
from graphopt.rewriting.distributed.sharding.sharded_update import (
    agree_on_norms,
    check_sharded_update,
    find_replicas,
    gather_parameters,
    scatter_gradients,
    shards_of_rank,
)
from graphopt.rewriting.distributed.sharding.whole_updates import DividedUpdates, divide_whole_updates
from graphopt.rewriting.memory.fit.state_action import gather_link
from graphopt.rewriting.memory.transfers.state_swaps import Swapped, swap_state
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.shards import Shards
from graphopt.rewriting.training_pass import TrainingPass

__all__ = ["ShardParameters"]


@final
@dataclass(frozen=True)
class ShardParameters(TrainingPass):
    """Divide parameters, gradients and the optimizer's state by the number of ranks, and gather parameters when read.

    Stage 3 of ZeRO. As with ``ShardOptimizer``, each of N ranks gets its shard of the mean gradients, keeps the
    optimizer's state for an Nth of every parameter and updates that. Here it keeps no more than that Nth of the
    parameters either: in front of the calls of forward and backward that read one, it is gathered from all ranks, and
    behind them its memory is free again. Gathers run beside the computation, as many ahead as time and memory allow;
    a parameter stays between two calls where that saves waiting and does not raise the peak, or by no more than
    ``keep``. ``FitMemory`` weighs what is recomputed against what is gathered again: parameters stay where its budget
    leaves room for them. All ranks take the same decisions. Parameters smaller than
    ``min_bytes`` stay whole.

    Parameters are the same objects as before, and without memory between steps: whoever reads one then gets an error
    with its name. ``with step.whole_parameters():`` makes them whole on every rank, for evaluation and export, and
    takes over what was changed; ``step.evaluate`` does that by itself. ``step.full_state_dict()`` gives all of them on
    the first rank's host, and ``graphopt.checkpoint`` saves each rank's shards; all ranks have to call these. A model
    that no rank can hold is made under ``graphopt.without_data()``, and gets its values from
    ``graphopt.materialize_shards``. What is cast to a smaller dtype wherever it is read (``MixedPrecision``) is cast
    first and then gathered, in fewer bytes; so is what ``Float8`` casts by one scale for a matrix, whose shards' scales
    ranks compare in one exchange of a number for each. Results are those of ``ShardOptimizer``, to the last bit.

    Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
    (arXiv 1910.02054).

    Args:
        group: name of the process group, that of ``DataParallel``, or of a dimension of a ``DeviceMesh``; empty for the
            default group.
        min_bytes: parameters with fewer bytes stay whole on every rank.
        cost: where seconds of calls come from, as for ``FitMemory``.
        keep: how many bytes, as a number or a text (``"2GB"``), parameters that stay between two calls may add to the
            peak, within the budget of ``FitMemory`` where there is one; ``auto`` for as many as that leaves, and none
            without it.
        replicas: name of the process group of the ranks that have the same shard, where ``group`` is a part of that of
            ``DataParallel`` (hybrid sharding): gradients are scattered over ``group``, and the shards summed up over
            ``replicas``. Both may be dimensions of one ``DeviceMesh``, which together have all ranks.

    Raises:
        GraphoptError: as for ``ShardOptimizer``; where the update reads whole parameters; in a drop-in model.

    Example:
        >>> str(graphopt.Pipeline([ShardParameters(), DataParallel()]))
        'data-parallel,shard-parameters'
    """

    name: ClassVar[str] = "shard-parameters"
    stage: ClassVar[PassStage] = "step"
    also: ClassVar[tuple[PassStage, ...]] = ("last",)
    numerics: ClassVar[Numerics] = "changes"
    changes_signature: ClassVar[bool] = True
    after: ClassVar[tuple[str, ...]] = ("data-parallel", "mixed-precision", "scale-loss", "clip-gradients")
    requires: ClassVar[tuple[str, ...]] = ("data-parallel",)
    conflicts: ClassVar[tuple[str, ...]] = (
        "shard-optimizer",
        "local-sgd",
        "adaptive-local-sgd",
        "deep-gradient-compression",
        "compress-gradients",
    )

    group: str = ""
    min_bytes: int = 65_536
    cost: str = "measured"
    replicas: str = ""
    keep: int | str = "auto"

    def __post_init__(self) -> None:
        self._room()
        if self.min_bytes < 0:
            raise GraphoptError(f"min_bytes is a number of bytes of at least 0, got {self.min_bytes}")
        check_cost(self.cost)

    def _room(self) -> int:
        """The bytes that parameters may add to the peak."""
        if self.keep == "auto":
            return 0
        try:
            room = parse_bytes(self.keep) if isinstance(self.keep, str) else self.keep
        except ValueError as error:
            raise GraphoptError(f"keep={self.keep!r}: {error}; or give keep='auto'") from None
        if isinstance(room, bool) or not isinstance(room, int) or not 0 <= room < 2**63:
            raise GraphoptError(f"keep is 'auto' or a number of bytes of at least 0, got {self.keep!r}")
        return room

    def shards(self, sizes: Mapping[str, int]) -> Shards | None:
        """An Nth of every parameter, one rank after the other."""
        return shards_of_rank(self.group, sizes)

    def concerns(self, program: Program) -> bool:
        """A step program once, and the program of a batch that is accumulated."""
        return not sharded_inputs(program) and (program.stage == "step" or not program.inputs_of("tangent"))

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program, or one that accumulates gradients."""
        group = find_group(self.group)
        if group.size == 1:
            return Changed(reason=f"the group {group.name!r} has one process")
        if sharded_inputs(program):
            return Changed(reason="the parameters of this program are sharded already")
        parameters = to_shard(program, self.min_bytes)
        buckets, divided = 0, DividedUpdates()
        if program.stage == "step":
            buckets, divided = self._shard_update(program, parameters, group)
        if not parameters:
            return Changed(
                counts={"buckets scattered": buckets},
                reason=f"no parameter has {self.min_bytes} bytes",
                lines=(f"no parameter has {self.min_bytes} bytes, and all stay whole",),
            )
        cast_where_read(program, parameters, self.name)
        shards = keep_shards(program, parameters, group)
        if program.stage == "step":
            update_shards(program, parameters, shards)
        scaled = scale_shards(program, parameters, shards, group, self.name)
        inputs = {node: name for name, node in parameters.items() if node.users}
        link = replace(gather_link(program, group), room=self._room())
        if self.keep != "auto":
            offloaded = program.context.offloaded
            keep = {**offloaded.keep, self.name: link.room}
            program.context = replace(program.context, offloaded=replace(offloaded, keep=keep))
        swapped = swap_state(program, inputs, link, self.cost, origin=self.name)
        changed = self._report(program, parameters, swapped, buckets, group)
        counts = {**changed.counts, **divided.counts, **({"gathered in 8 bits": scaled} if scaled else {})}
        return replace(changed, counts=counts, lines=(*changed.lines, *divided.lines))

    def _shard_update(
        self, program: Program, parameters: Mapping[str, fx.Node], group: Group
    ) -> tuple[int, DividedUpdates]:
        """Scatter gradients, update shards, and gather what stays whole behind the update.

        Returns:
            how many buckets there are, and what of the update takes whole parameters.
        """
        found = reductions(program)
        replicas = find_replicas(self.replicas)
        check_sharded_update(program, found, group, self.name, replicas)
        buckets = [[member.name for member in reduction.members] for reduction in found]
        scatter_gradients(program, found, group, self.name, replicas)
        agree_on_norms(program, group, self.name)
        agree_on_skipping(program, group, self.name)
        divided = divide_whole_updates(program, group, self.name)
        whole = [[name for name in names if name not in parameters] for names in buckets]
        gather_parameters(program, [names for names in whole if names], group, self.name)
        return len(buckets), divided

    def _report(
        self, program: Program, parameters: Mapping[str, fx.Node], swapped: Swapped, buckets: int, group: Group
    ) -> Changed:
        total = sum(storage_bytes(value_of(node)) for node in parameters.values())
        sent = sum(
            storage_bytes(value_of(node))
            for node in program.phase_nodes(Phase.SYNC)
            if info(node).made_by == self.name and "all_gather" in str(node.target)
        )
        memory = (
            f"each of the {group.size} ranks of {group.name!r} keeps its shard of "
            f"{counted(len(parameters), 'parameters')}, {format_bytes(-(-total // group.size))} of "
            f"{format_bytes(total)}, and of their optimizer state"
        )
        traffic = (
            f"{counted(swapped.visits, 'gathers')} of {format_bytes(sent)} in all for each batch; the computation "
            f"waits {format_seconds(swapped.waited)} for them (expected)"
        )
        counts = {"parameters sharded": len(parameters), "gathers": swapped.visits, "buckets scattered": buckets}
        return Changed(counts, tensors=tuple(parameters), lines=(memory, traffic))
