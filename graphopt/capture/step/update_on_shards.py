"""A traced update of whole parameters as one of shards, for optimizers that take whole ones somewhere in between.

Muon, for one, makes each matrix of momenta orthogonal, which takes all of it; everything else that it does, and the
state that it keeps, is by elements. The calls of the traced update are made once more, on flat shards in place of
parameters, gradients and state. Calls that work element by element work on shards. Where another call reads a shard, it
and what follows from it get the whole tensor, and where a call by elements reads that beside a shard, its shard:
``whole_of_shard`` and ``shard_of_whole`` stand there, in whose places a pass puts exchanges between ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.effects.checks import takes_lists_by_elements, works_by_elements
from graphopt.ir.node import InputSpec, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.updates.whole_parameter import SHARD_OF_WHOLE, WHOLE_OF_SHARD
from graphopt.ir.ops.values import is_dense
from graphopt.rewriting.shards import Shards, holds_elements

__all__ = ["NotOnShardsError", "holds_shard", "parameter_of", "run_on_shards"]

aten = torch.ops.aten


class NotOnShardsError(Exception):
    """An update that cannot be one of shards, in words."""


@dataclass(frozen=True)
class _Shard:
    """What a value of the whole update is on this rank: the shard of a tensor like one parameter.

    Attributes:
        parameter: whose shard it is.
        whole: the whole value, without data.
    """

    parameter: str
    whole: torch.Tensor


def parameter_of(spec: InputSpec) -> str:
    """The parameter that an input of an update is, or belongs to, by name."""
    return spec.target.rpartition("/")[0] if spec.role == "state" else spec.target


def holds_shard(spec: InputSpec, value: Any, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether an input of an update has the elements of a parameter.

    Args:
        spec: what the input is.
        value: an example of it.
        parameters: by name.
    """
    if spec.role == "state":
        return holds_elements(spec.target.rpartition("/")[2], value, parameters[parameter_of(spec)])
    return spec.role in ("parameter", "gradient")


def run_on_shards(
    graph: fx.Graph,
    specs: Sequence[InputSpec],
    flat: Sequence[Any],
    wholes: Mapping[str, torch.Tensor],
    shards: Shards,
    constants: Mapping[str, torch.Tensor],
) -> list[Any]:
    """Make the calls of a traced update on shards; what is given may be traced meanwhile.

    Args:
        graph: the update of whole parameters.
        specs: what its inputs are.
        flat: the inputs, in the same order: shards of what has the elements of a parameter, flat or as rows.
        wholes: the whole parameters, by name; without data.
        shards: this rank's part of each.
        constants: what the update makes of Python numbers, by the name under which the graph gets it.

    Returns:
        the state that the update creates, in the graph's order: shards of what has the elements of a parameter.

    Raises:
        NotOnShardsError: saying which call of the update is in the way.
    """
    return _Run(shards).run(graph, specs, flat, wholes, constants)


class _Run:
    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._sizes: dict[str, list[int]] = {}
        """Of this rank's shard of each parameter."""
        self._values: dict[fx.Node, Any] = {}
        self._cut: dict[fx.Node, _Shard] = {}
        self._of: dict[fx.Node, str] = {}
        """The parameter whose whole tensor a value was made of."""
        self._lasting: set[Any] = set()
        """The memory of what is there before the update and behind it."""
        self._copies: dict[fx.Node, Any] = {}
        """Whole copies of that, until it is written."""
        self._lists: dict[fx.Node, list[_Shard | None]] = {}
        """What lists of shards are shards of."""

    def run(
        self,
        graph: fx.Graph,
        specs: Sequence[InputSpec],
        flat: Sequence[Any],
        wholes: Mapping[str, torch.Tensor],
        constants: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        placeholders = graph.find_nodes(op="placeholder")
        for node, spec, given in zip(placeholders, specs, flat, strict=True):
            self._values[node] = given
            whole = value_of(node)
            if isinstance(whole, torch.Tensor):
                self._lasting.add(_torch.storage_key(whole))
            if holds_shard(spec, whole, wholes):
                self._cut[node] = _Shard(parameter_of(spec), whole)
                self._sizes[self._cut[node].parameter] = list(given.shape)
        for node in graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                self._values[node] = self._number(constants[str(node.target)])
        (output,) = graph.find_nodes(op="output")
        created = schema.nodes_in(output.args[0])
        for node in created:
            if node in self._of:
                raise NotOnShardsError("it keeps whole tensors as its state")
        return [self._values[node] for node in created]

    def _number(self, constant: torch.Tensor) -> torch.Tensor:
        if constant.dim():
            raise NotOnShardsError("it makes tensors of Python numbers")
        return torch.full((), constant.item(), dtype=constant.dtype, device=constant.device)

    def _call(self, node: fx.Node) -> None:
        if self._on_lists(node):
            return
        given = node.all_input_nodes
        cut = [source for source in given if source in self._cut]
        like = self._cut[cut[0]] if cut and self._by_elements(node, cut) else None
        lasting = {}
        for source in cut if like is None else ():
            if _torch.storage_key(self._cut[source].whole) in self._lasting:
                if source not in self._copies:
                    self._copies[source] = self._whole(source)
                lasting[source] = self._copies[source]
            elif source in self._cut:
                self._make_whole(source)
        values = {source: lasting.get(source, self._values[source]) for source in given}
        if like is not None:
            values |= {source: self._shard_of(source, like) for source in given if self._is_whole(source)}
            self._cut[node] = _Shard(like.parameter, value_of(node))
        owners = {self._of[source] for source in given if source in self._of}
        owners |= {self._cut[source].parameter for source in lasting}
        if (owners or cut) and schema.is_random(node):
            raise NotOnShardsError(f"{schema.op_name(node)} draws random numbers for all elements")
        if owners and like is None:
            if len(owners) > 1:
                raise NotOnShardsError(f"{schema.op_name(node)} takes several parameters together")
            self._refuse_lost(node)
            self._of[node] = owners.pop()
        self._values[node] = _called(node, values)
        self._forget(node)

    def _on_lists(self, node: fx.Node) -> bool:
        """Make a call on lists of shards, or take one of them; whether it is such a call."""
        if node.target is operator.getitem and node.args[0] in self._lists:
            source, place = node.args
            shard = self._lists[source][place]  # type: ignore[index]
            if shard is not None:
                self._cut[node] = shard
            self._values[node] = self._values[source][place]  # type: ignore[index]
            return True
        lists = [argument for argument in (*node.args, *node.kwargs.values()) if isinstance(argument, (list, tuple))]
        if not self._pairs_shards(node, lists):
            return False
        self._values[node] = _called(node, self._values)
        made = value_of(node)
        if isinstance(made, (list, tuple)):
            shards = [self._cut.get(source) if isinstance(source, fx.Node) else None for source in lists[0]]
            self._lists[node] = [
                None if shard is None else _Shard(shard.parameter, whole)
                for shard, whole in zip(shards, made, strict=True)
            ]
        self._forget(node)
        return True

    def _pairs_shards(self, node: fx.Node, lists: Sequence[Any]) -> bool:
        """Whether a call takes lists, by elements, and at each place of them shards of one parameter, or numbers."""
        if not takes_lists_by_elements(node) or not lists:
            return False
        if self._apart_with_elements(node) or any(source in self._of for source in node.all_input_nodes):
            return False
        places = zip_longest(*lists)
        owners = [{self._cut[source].parameter for source in place if source in self._cut} for place in places]
        return all(len(found) <= 1 for found in owners)

    def _is_whole(self, node: fx.Node) -> bool:
        """Whether a value is made of a whole tensor, and has elements of its own."""
        return node in self._of and value_of(node).dim() > 0

    def _by_elements(self, node: fx.Node, cut: Sequence[fx.Node]) -> bool:
        """Whether a call can be made on shards: by elements, of tensors that have the same elements in one order."""
        if self._apart_with_elements(node):
            return False
        known = works_by_elements(node) or node.target is aten.detach.default
        if not known or any(isinstance(argument, (list, tuple)) for argument in node.args):
            return False
        first = self._cut[cut[0]]
        alike = all(self._cut[source].parameter == first.parameter for source in cut)
        tensors = [value_of(source) for source in node.all_input_nodes if isinstance(value_of(source), torch.Tensor)]
        sized = [tensor for tensor in [*tensors, value_of(node)] if tensor.dim() > 0]
        laid = {(tuple(tensor.shape), tensor.stride()) for tensor in sized if is_dense(tensor)}
        scalars = any(source in self._of and value_of(source).dim() == 0 for source in node.all_input_nodes)
        written = any(source in self._of for source in schema.mutated_inputs(node))
        # a whole tensor's stride may differ: its shard is taken in the order of the first one
        whole = {(tuple(value_of(s).shape), value_of(s).stride()) for s in node.all_input_nodes if self._is_whole(s)}
        shape = tuple(first.whole.shape)
        others = laid - whole - {(shape, first.whole.stride())}
        return alike and not scalars and not written and not others and all(size == shape for size, _ in whole)

    def _apart_with_elements(self, node: fx.Node) -> bool:
        """Whether a call reads tensors with elements that are made of no parameter."""
        others = [source for source in node.all_input_nodes if source not in self._cut and source not in self._of]
        values = [value_of(source) for source in others]
        return any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values)

    def _forget(self, node: fx.Node) -> None:
        """Forget whole copies of what a call writes."""
        written = {_torch.storage_key(value_of(target)) for target in schema.mutated_inputs(node)}
        for known in [known for known in self._copies if _torch.storage_key(value_of(known)) in written]:
            del self._copies[known]

    def _whole(self, node: fx.Node) -> Any:
        whole = self._cut[node].whole
        return WHOLE_OF_SHARD(self._values[node], list(whole.shape), list(whole.stride()))

    def _make_whole(self, node: fx.Node) -> None:
        """Have the whole tensor of a shard from now on, and of all that is in the same memory."""
        whole, place = self._whole(node), _torch.storage_key(self._cut[node].whole)
        for other in [known for known, shard in self._cut.items() if _torch.storage_key(shard.whole) == place]:
            self._values[other] = whole
            self._of[other] = self._cut.pop(other).parameter

    def _shard_of(self, node: fx.Node, like: _Shard) -> Any:
        if self._of[node] != like.parameter:
            raise NotOnShardsError(f"it reads what was made of {self._of[node]!r} to update {like.parameter!r}")
        shard = SHARD_OF_WHOLE(self._values[node], *self._shards[like.parameter], list(like.whole.stride()))
        size = self._sizes[like.parameter]
        return shard if len(size) == 1 else aten.view.default(shard, size)

    def _refuse_lost(self, node: fx.Node) -> None:
        """Refuse a write to a whole copy of something that lasts, and is kept as a shard."""
        for target in schema.mutated_inputs(node):
            if _torch.storage_key(value_of(target)) in self._lasting:
                raise NotOnShardsError(
                    f"{schema.op_name(node)} writes to a parameter, a gradient or state as a whole, of which each rank "
                    "keeps a shard"
                )


def _called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = _torch.map_aggregate(
        (node.args, node.kwargs), lambda item: values[item] if isinstance(item, fx.Node) else item
    )
    return node.target(*args, **kwargs)  # type: ignore[operator]
