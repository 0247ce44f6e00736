"""Optimizer state and parameters that reside on the host or on a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import torch
from torch import fx

from graphopt.analysis.costs.cost import check_cost
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.gradients import base_of, update_calls
from graphopt.ir.host import local_ranks
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.distributed.sharding.sharded_parameters import sharded_inputs, sharing_inputs
from graphopt.rewriting.memory.fit.state_action import link_to, swapped_line
from graphopt.rewriting.memory.free_memory import free_disk_bytes, free_host_bytes
from graphopt.rewriting.memory.order.early_updates import ordered_updates
from graphopt.rewriting.memory.transfers.state_swaps import Link, Swapped, created_state, obstacle, swap_state
from graphopt.rewriting.memory.transfers.transfer_insertion import check_copies
from graphopt.rewriting.pass_ import Changed, Numerics, PassStage
from graphopt.rewriting.training_pass import TrainingPass

__all__ = ["OffloadState"]

_WHAT = ("optimizer", "masters", "parameters")


@final
@dataclass(frozen=True)
class OffloadState(TrainingPass):
    """Let optimizer state, and parameters, reside on the host or on a disk, and copy them in where they are needed.

    What resides elsewhere takes no memory of the device but while it is used: a parameter's state for its update, a
    parameter for the calls of forward, of backward and of the update that read it. The update is done parameter by
    parameter, each as soon as its gradient is final where that takes less memory, and what it wrote is copied back
    behind it. Copies run beside the computation, as many ahead as time and memory allow. Values are the same to the
    last bit.

    ``optimizer.state`` and the parameters stay tensors with which everything works: on a disk their memory is a mapped
    file, so ``state_dict``, checkpoints and evaluation read the file. A state that is loaded is moved before the next
    step.

    With ``folder`` every finished step is kept there: all parameters, the optimizer's state, what passes keep, and
    torch's generators. What a step writes does not count before the step is done, so a process that is killed at any
    moment leaves the last whole step, and ``graphopt.checkpoint.load(folder, step)`` goes on from it bit for bit. That
    takes twice the bytes on the disk, and the parameters are written at each step. After a step that was cut short in
    the process itself, the next one says so.

    The optimizer's state is moved as ZeRO-Infinity does: Rajbhandari, Ruwase, Rasley, Smith and He, SC 2021
    (arXiv 2104.07857).

    Args:
        what: of ``optimizer`` (its state), ``masters`` (parameters that only the update reads, since forward reads
            copies in low precision), ``parameters`` (all of them); the last two for models on a CPU only.
        tier: ``disk``, or ``host`` for what is on a CUDA device; on a CPU the host's memory is the process's own.
        folder: where each finished step is kept, on a disk; empty for a temporary file without a name.
        prefetch: ``auto``, by time and memory; or how many tensors ahead copies start.
        min_bytes: smaller tensors stay where they are.
        cost: where seconds of calls come from, as for ``FitMemory``.

    Raises:
        GraphoptError: where there is no room; for a folder with more than one rank; for parameters that are not on a
            CPU; with a compiler as the backend.

    Example:
        >>> passes = [OffloadState(("optimizer", "parameters"), min_bytes=1, cost="roofline")]
        >>> step = graphopt.optimize_step(model, optimizer, passes, loss=loss).prepare(x)
        >>> len(step.records[0].changed.tensors) > 0
        True
    """

    name: ClassVar[str] = "offload-state"
    stage: ClassVar[PassStage] = "step"
    numerics: ClassVar[Numerics] = "bitwise"
    after: ClassVar[tuple[str, ...]] = (
        "data-parallel",
        "mixed-precision",
        "scale-loss",
        "clip-gradients",
        "compress-gradients",
        "deep-gradient-compression",
        "local-sgd",
        "adaptive-local-sgd",
        "shard-optimizer",
        "shard-parameters",
    )

    what: tuple[str, ...] = ("optimizer",)
    tier: str = "disk"
    folder: str = field(default="", metadata={"writes": True})
    prefetch: int | str = "auto"
    min_bytes: int = 65_536
    cost: str = "measured"

    def __post_init__(self) -> None:
        unknown = [name for name in self.what if name not in _WHAT]
        if unknown or not self.what:
            hint = did_you_mean(unknown[0], _WHAT) if unknown else ""
            raise GraphoptError(
                f"what={','.join(self.what) or 'nothing'} is not possible; {hint or 'it is of ' + ', '.join(_WHAT)}"
            )
        check_copies(self.tier, self.prefetch)
        if self.folder and self.tier != "disk":
            raise GraphoptError("folder= is for the tier disk: state on the host ends with the process")
        if self.min_bytes < 1:
            raise GraphoptError(f"min_bytes is a number of bytes of at least 1, got {self.min_bytes}")
        check_cost(self.cost)

    def lasting_folder(self) -> str:
        """See the class."""
        return self.folder

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program."""
        if any(info(node).made_by == self.name for node in program.phase_nodes(Phase.TRANSFER)):
            return Changed(reason="the state of this program is offloaded already")
        if program.context.compiled:
            raise GraphoptError("offload-state works with backend='eager' only: compilers cannot see where inputs are")
        calls = update_calls(program)
        if not calls:
            return Changed(reason="there is no update in this program")
        if any(schema.op_name(call) == "opaque_update_" for call in calls):
            return Changed(reason="the optimizer runs in eager mode, and reads all of its state by itself")
        chosen, left = self._choose(program)
        created = created_state(program, self.min_bytes)
        if not chosen and not created:
            return Changed(reason=left or f"none of it has {self.min_bytes} bytes")
        sizes = [storage_bytes(value_of(node)) for node in (*chosen, *(value for value, _ in created))]
        if program.context.device is None:
            self._check_room(sum(sizes) + self._written_beside(program, chosen))
        chosen_names = {node.name: name for node, name in chosen.items()}
        was = program.memory()
        best: tuple[int, Program, Swapped] | None = None
        link = self._link(program)
        for candidate in ordered_updates(program, self.name):
            inputs = {node: chosen_names[node.name] for node in candidate.placeholders if node.name in chosen_names}
            swapped = swap_state(
                candidate, inputs, link, self.cost, origin=self.name, created=[name for _, name in created]
            )
            peak = candidate.memory().peak_bytes
            if best is None or peak < best[0]:
                best = peak, candidate, swapped
        assert best is not None
        peak, found, swapped = best
        program.graph, program.outputs = found.graph, found.outputs
        if link.ahead is not None:
            offloaded = program.context.offloaded
            prefetch = {**offloaded.prefetch, self.name: link.ahead}
            program.context = replace(program.context, offloaded=replace(offloaded, prefetch=prefetch))
        on_cpu = all(value_of(node).device.type == "cpu" for node in chosen)
        return self._report(swapped, sum(sizes), (was.peak_bytes, peak), left, on_cpu=on_cpu)

    def _choose(self, program: Program) -> tuple[dict[fx.Node, str], str]:
        """The inputs that are to reside elsewhere by name, and what keeps others from it."""
        updated = {base_of(target) for call in update_calls(program) for target in schema.mutated_inputs(call)}
        wanted: dict[fx.Node, str] = {}
        if "optimizer" in self.what:
            wanted |= {node: spec.target for node, spec in program.inputs_of("state")}
        for node, spec in program.inputs_of("parameter"):
            master = all(info(call).phase is Phase.UPDATE for call in schema.readers(node) if not schema.is_view(call))
            if "parameters" in self.what or ("masters" in self.what and master and node in updated):
                self._check_device(spec.target, value_of(node))
                wanted[node] = spec.target
        shared, sharded = sharing_inputs(program), sharded_inputs(program)
        found: dict[fx.Node, str] = {}
        left = ""
        for node, name in wanted.items():
            value = value_of(node)
            if not isinstance(value, torch.Tensor) or storage_bytes(value) < self.min_bytes:
                continue
            reason = obstacle(node) or ("it shares memory with another input" if node in shared else "")
            reason = "each rank keeps a shard of it" if node in sharded else reason
            if reason:
                left = left or f"{name} stays: {reason}"
            else:
                found[node] = name
        return found, left

    def _check_device(self, name: str, value: torch.Tensor) -> None:
        if value.device.type != "cpu":
            raise GraphoptError(
                f"the parameter {name!r} is on {value.device}, and offload-state lets parameters of models on a CPU "
                "reside elsewhere only: what reads them outside of the program would meet another device; "
                "what=('optimizer',) moves the optimizer's state"
            )

    def _check_room(self, wanted: int) -> None:
        """Say before the first step when there is no room.

        Raises:
            GraphoptError: with the bytes that are needed and those that are there.
        """
        ranks = local_ranks()
        needed = wanted * ranks * (2 if self.folder else 1)
        there = free_host_bytes() if self.tier == "host" else free_disk_bytes(self.folder)
        if there is not None and needed > there:
            raise GraphoptError(
                f"offload-state needs {needed} bytes ({format_bytes(needed)}) on the {self.tier}, and {there} bytes "
                f"({format_bytes(there)}) are there: name less in what=, or use the tier "
                f"{'disk' if self.tier == 'host' else 'host'}"
            )

    def _written_beside(self, program: Program, chosen: Mapping[fx.Node, str]) -> int:
        """Bytes that a folder takes for what does not reside there."""
        if not self.folder:
            return 0
        kept = (node for node, _ in program.inputs_of("parameter", "buffer", "state", "pass_state"))
        return sum(storage_bytes(value_of(node)) for node in kept if node not in chosen)

    def _link(self, program: Program) -> Link:
        """The way to where the state resides."""
        ahead = None if self.prefetch == "auto" else int(self.prefetch)
        return replace(link_to(program, self.cost, self.tier), ahead=ahead)

    def _report(self, swapped: Swapped, moved: int, peaks: tuple[int, int], left: str, *, on_cpu: bool) -> Changed:
        count = len(swapped.inputs) + len(swapped.created)
        lines = [
            swapped_line(swapped, moved, self.tier),
            f"the predicted peak: {format_bytes(peaks[0])} -> {format_bytes(peaks[1])}",
        ]
        if self.tier == "host" and on_cpu:
            lines.append("on a CPU the host's memory is the process's own: only tier=disk takes less of it")
        if self.folder:
            lines.append(f"every finished step is kept in {self.folder}")
        counts: Mapping[str, int] = {"tensors offloaded": count, "copies in": swapped.visits}
        return Changed(counts, tensors=(*swapped.inputs, *swapped.created), lines=(*lines, *([left] if left else [])))
