"""Each rank keeps the optimizer's state for, and updates, its share of every parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.distributed.dense.remove_all_reduce import agree_on_skipping, reductions
from graphopt.rewriting.distributed.sharding.sharded_update import (
    agree_on_norms,
    check_sharded_update,
    find_replicas,
    gather_parameters,
    scatter_gradients,
    shards_of_rank,
)
from graphopt.rewriting.distributed.sharding.whole_updates import DividedUpdates, divide_whole_updates
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.shards import Shards
from graphopt.rewriting.training_pass import TrainingPass

__all__ = ["ShardOptimizer"]

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class ShardOptimizer(TrainingPass):
    """Divide the optimizer's update, and the memory of its state, by the number of ranks.

    Stage 1 of ZeRO. Of N ranks each updates an Nth of every parameter (of its elements, in the order of memory) and
    keeps the optimizer's state for these alone. The buckets of ``DataParallel`` are reduce-scattered in place of being
    all-reduced, so that each rank gets its shard of the mean gradient, and behind the update all-gathered as
    parameters. As many bytes travel as without. Parameters stay equal on all ranks to the last bit. With two ranks they
    equal those of ``DataParallel`` alone to the last bit as well, but for fused kernels on a CPU, which round the last
    elements of a tensor in another way; with more ranks sums may be taken in another order.

    ``optimizer.state`` holds flat shards, so each rank has to save its own ``optimizer.state_dict()``, and loads it
    again, which ``graphopt.checkpoint`` does for all of them; names in it say whose shards they are
    (``exp_avg@rank1of2``), and another rank's are refused. A state that is whole is cut where it is loaded before the
    first step. For another number of ranks ``graphopt.sharded_state`` puts shards together and divides them. Under loss
    scaling all ranks skip a step where one has to; ``ClipGradients`` takes the norm over all ranks.

    Most optimizers work element by element. What one does with a whole parameter in between, as Muon does with its
    matrices, is divided among ranks: of as many parameters of one shape as there are ranks each gets one whole, by an
    all-to-all of shards in the dtype in which it is read, and gives the shards of its result back in the same way.

    Rajbhandari, Rasley, Ruwase and He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020
    (arXiv 1910.02054). Liu, Su, Yao and others, "Muon is Scalable for LLM Training", 2025 (arXiv 2502.16982).

    Args:
        group: name of the process group, that of ``DataParallel``, or of a dimension of a ``DeviceMesh``; empty for the
            default group.
        replicas: name of the process group of the ranks that have the same shard, where ``group`` is a part of that of
            ``DataParallel`` (hybrid sharding): gradients are scattered over ``group``, and the shards summed up over
            ``replicas``. Both may be dimensions of one ``DeviceMesh``, which together have all ranks.

    Raises:
        GraphoptError: for an optimizer that reads values in Python, takes several parameters together, or changes a
            parameter where it has it whole; for parameters that do not fill their memory; for gradients that are
            exchanged over another group or several, or that a pass needs in full.

    Example:
        >>> str(graphopt.Pipeline([ShardOptimizer(), DataParallel()]))
        'data-parallel,shard-optimizer'
    """

    name: ClassVar[str] = "shard-optimizer"
    stage: ClassVar[PassStage] = "step"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel", "mixed-precision", "scale-loss", "clip-gradients")
    requires: ClassVar[tuple[str, ...]] = ("data-parallel",)
    conflicts: ClassVar[tuple[str, ...]] = (
        "local-sgd",
        "adaptive-local-sgd",
        "deep-gradient-compression",
        "compress-gradients",
    )

    group: str = ""
    replicas: str = ""

    def shards(self, sizes: Mapping[str, int]) -> Shards | None:
        """An Nth of every parameter, one rank after the other."""
        return shards_of_rank(self.group, sizes)

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program whose update is for this rank's shards."""
        if any(info(node).made_by == self.name for node in program.phase_nodes(Phase.SYNC)):
            return Changed(reason="the update of this program is sharded already")
        group = find_group(self.group)
        if group.size == 1:
            return Changed(reason=f"the group {group.name!r} has one process")
        found = reductions(program)
        replicas = find_replicas(self.replicas)
        check_sharded_update(program, found, group, self.name, replicas)
        buckets = [[member.name for member in reduction.members] for reduction in found]
        sent = sum(storage_bytes(value_of(reduction.start)) for reduction in found)
        scatter_gradients(program, found, group, self.name, replicas)
        agree_on_norms(program, group, self.name)
        agree_on_skipping(program, group, self.name)
        whole = divide_whole_updates(program, group, self.name)
        gather_parameters(program, buckets, group, self.name)
        return _report(program, buckets, sent, whole, group)


def _report(
    program: Program, buckets: Sequence[Sequence[str]], sent: int, divided: DividedUpdates, group: Group
) -> Changed:
    count = sum(len(names) for names in buckets)
    state = [(value_of(node), spec.target) for node, spec in program.inputs_of("state")]
    elements = {spec.target: value_of(node).numel() for node, spec in program.inputs_of("parameter")}
    kept = sum(storage_bytes(value) for value, _ in state)
    whole = sum(
        elements[target.rsplit("/", 1)[0]] * value.element_size() if value.dim() else storage_bytes(value)
        for value, target in state
    )
    memory = (
        f"each of the {group.size} ranks of the group {group.name!r} keeps {format_bytes(kept)} of "
        f"{format_bytes(whole)} of the optimizer's state, and updates its shard of {counted(count, 'parameters')}"
    )
    traffic = (
        f"{counted(len(buckets), 'all-reduces')} -> {counted(len(buckets), 'reduce-scatters')} of gradients and "
        f"{counted(len(buckets), 'all-gathers')} of "
        f"parameters: {format_bytes(sent)} of each per step"
    )
    counts = {"parameters sharded": count, "reduce-scatters": len(buckets), "all-gathers": len(buckets)}
    return Changed(counts | divided.counts, lines=(memory, traffic, *divided.lines))
