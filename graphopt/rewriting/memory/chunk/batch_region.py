"""The calls of forward and backward that work on each sample of a batch by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphopt.ir.names import match_names
from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.program import Program
from graphopt.rewriting.memory.chunk.row_regions import RowRegion, obstacle
from graphopt.rewriting.memory.chunk.row_rules import step_of
from graphopt.rewriting.memory.chunk.token_rows import Rows, State, Step

__all__ = ["batch_inputs", "batch_region"]

_ANY_SIZE = 1 << 62
_BY_CLASS = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss_backward.default)
"""Losses whose divisor is what all targets count."""


def batch_inputs(program: Program, axis: int = 0, whole: tuple[str, ...] = ()) -> dict[fx.Node, Rows]:
    """The inputs that have samples: those that are as long along an axis as the first one that has this axis.

    Args:
        program: of any stage.
        axis: which dimension numbers samples.
        whole: names or globs of inputs that have none, whatever their sizes.

    Raises:
        GraphoptError: for a name that no input has.
    """
    inputs = {spec.target: node for node, spec in program.inputs_of("input") if value_of(node).dim() > axis}
    left_out = match_names(whole, inputs, "input") if whole else {}
    long = [node for name, node in inputs.items() if name not in left_out]
    return {n: Rows(1, axis) for n in long if value_of(n).shape[axis] == value_of(long[0]).shape[axis]}


def batch_region(program: Program, batch: Mapping[fx.Node, Rows]) -> RowRegion | str:
    """The calls that read a batch, forward and backward, a few samples at a time; or which one mixes samples.

    What no sample changes stays in front of the chunks as it is: masks of dropout, positions, values of parameters
    alone. So do values of the batch that are needed as a whole, such as how many targets count.

    Args:
        program: of stage joint, with a loss.
        batch: inputs with samples, and where these are.
    """
    known = {node: replace(state, whole=True) for node, state in batch.items()}
    first = _Search(program, known, whole=None)
    problem = first.run()
    if problem:
        return problem
    search = _Search(program, known, whole=first.needed_as_a_whole())
    return search.run() or search.region()


@dataclass
class _Search:
    """The calls that have samples.

    Attributes:
        batch: inputs with samples.
        whole: values of the batch alone that stay whole; None for all of them.
        steps: how each call is made for some samples.
    """

    program: Program
    batch: Mapping[fx.Node, Rows]
    whole: frozenset[fx.Node] | None
    steps: dict[fx.Node, Step] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states: dict[fx.Node, State] = dict(self.batch)
        first = next(iter(self.batch.items()))
        self.samples = int(value_of(first[0]).shape[first[1].first])
        self._trained = _reached(self.program, [n for n, _ in self.program.inputs_of("parameter", "state")])
        self._unknown: set[fx.Node] = set()
        self._read = _reached(self.program, list(self.batch))

    def run(self) -> str:
        """Find how calls are made; what is in the way, empty for nothing."""
        for node in self.program.phase_nodes(Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE):
            if node not in self._read:
                continue
            step = step_of(node, self.states, self.samples)
            if step is not None and isinstance(step.state, Rows) and step.state.chosen is not None:
                step = None  # some samples are left out
            stays = node not in self._trained and (self.whole is None or node in self.whole)
            if step is None or stays:
                if not stays and (problem := self._mixed(node)):
                    return problem
                if step is not None and isinstance(step.state, Rows):
                    self.states[node] = replace(step.state, whole=True)
                elif step is None and any(self._is_of_samples(source) for source in node.all_input_nodes):
                    self._unknown.add(node)
                continue
            state = replace(step.state, whole=False) if isinstance(step.state, Rows) else step.state
            self.states[node], self.steps[node] = state, replace(step, state=state)
        return "" if self.steps else "no op reads both the batch and a parameter"

    def _is_of_samples(self, source: fx.Node) -> bool:
        """Whether a value has samples, as far as is known or not."""
        return isinstance(self.states.get(source), Rows) or source in self._unknown

    def needed_as_a_whole(self) -> frozenset[fx.Node]:
        """The values of the batch alone that are read otherwise than by samples."""
        alone = {node for node in self.program.nodes if node in self._read and node not in self._trained}
        found: set[fx.Node] = set()
        for node in reversed(self.program.nodes):
            if node not in alone or node.op != "call_function":
                continue
            by_samples = all(
                (user in self.steps or (user in alone and user not in found)) and user.target not in _BY_CLASS
                for user in node.users
            )
            if not by_samples or node not in self.states:
                found.add(node)
        return frozenset(found)

    def _mixed(self, node: fx.Node) -> str:
        """What is said of a call that reads samples and has no rule; empty where it reads none."""
        if not any(isinstance(self.states.get(source), Rows) for source in node.all_input_nodes):
            return ""
        about = info(node)
        name = next(iter(about.names), node.name)
        where = ", ".join(part for part in (about.module and f"in {about.module}", about.source) if part)
        place = f"{name}{f', {where}' if where else ''}"
        if "batch_norm" in str(node.target):
            return f"batch norm takes its statistics over all samples while it trains ({place})"
        return f"{schema.op_name(node)} may mix samples ({place})"

    def region(self) -> RowRegion | str:
        """The calls in chunks, or what is in the way of them."""
        inside = {node for step in self.steps for node in step.all_input_nodes}
        sources = {
            node: state
            for node, state in self.states.items()
            if isinstance(state, Rows) and node not in self.steps and node in inside
        }
        whole = [node for node in self.program.nodes if node in self._unknown]
        first = next(iter(self.steps))
        region = RowRegion(first, self.steps, rows=self.samples, sources=sources, of_batch=True, whole=whole)
        problem = obstacle(self.program, region, _ANY_SIZE)
        if problem:
            return problem
        if not any(info(node).phase is Phase.BACKWARD for node in self.steps):
            return "backward is not part of this program"
        return region


def _reached(program: Program, sources: list[fx.Node]) -> set[fx.Node]:
    """Values, and all that depends on them."""
    found = set(sources)
    for node in program.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found
