"""Two programs run beside each other, call by call, so that values can be compared while few of them are alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.node import InputSpec, Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import cuda_indices
from graphopt.ir.program import Program

__all__ = ["Kind", "Pair", "matched", "paired_values"]

Kind = Literal["loss", "output", "gradient", "parameter", "buffer", "value"]
"""What a tensor is; ``value`` is what a call computes."""

_UPDATE_ORIGIN = "optimizer.step"
_Key = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor under one name in two programs.

    Attributes:
        name: what users call it; a gradient is called like its tensor with ``~`` behind.
        kind: what it is.
        before: its node in the first program.
        after: its node in the second program.
    """

    name: str
    kind: Kind
    before: fx.Node
    after: fx.Node

    @property
    def by_op(self) -> bool:
        """Whether the name is made of a module's path and an op (``layers.0::mm``), and nobody gave it."""
        return "::" in self.name


def matched(before: Program, after: Program) -> tuple[list[Pair], list[str]]:
    """The tensors that two programs have in common, and a line for each of the first that cannot be compared.

    Tensors are matched by what they are called: outputs, the loss and gradients by their descriptions, parameters and
    buffers that the program writes by their paths, all other values by the names of modules' outputs and those given
    with ``graphopt.name``. Names of the form ``path::op`` are numbered by op, so they match where both programs call
    that op of that module equally often; views have none, since their base is compared. A node with several names
    appears under each. Shapes must agree.
    """
    table, other = _named(before), _named(after)
    calls, others = _calls(before), _calls(after)
    pairs, problems = [], []
    for key, node in table.items():
        found = other.get(key)
        kind, name = key
        if "::" in name and (found is None or calls[_call(node)] != others[_call(found)]):
            continue
        if found is None:
            problems.append(f"{name}: only the original program has it")
        elif value_of(node).shape != value_of(found).shape:
            problems.append(f"{name}: {_shape(node)} in the original program, {_shape(found)} in the other")
        else:
            pairs.append(Pair(name, kind, node, found))
    return pairs, problems


def _shape(node: fx.Node) -> str:
    return f"[{', '.join(str(size) for size in value_of(node).shape)}]"


def _named(program: Program) -> dict[_Key, fx.Node]:
    """Every tensor of interest, by what it is and what it is called."""
    found = dict(_returned(program)) | dict(_overwritten(program))
    for key, node in _computed(program):
        found.setdefault(key, node)
    return found


def _returned(program: Program) -> Iterator[tuple[_Key, fx.Node]]:
    """The loss, outputs and gradients."""
    for value, result in program.outputs_of("loss", "output", "gradient"):
        if isinstance(value, fx.Node) and _is_tensor(value):
            kind = cast(Kind, result.role)
            yield (kind, f"{result.target}~" if kind == "gradient" else result.target), value


def _overwritten(program: Program) -> Iterator[tuple[_Key, fx.Node]]:
    """Parameters and buffers that the program writes."""
    written = set(_last_writes(program))
    for node, spec in program.inputs_of("parameter", "buffer"):
        if node in written:
            yield ("parameter" if spec.role == "parameter" else "buffer", spec.target), node


def _computed(program: Program) -> Iterator[tuple[_Key, fx.Node]]:
    """What calls compute, under each of its names; of views only those that a module or a user has named."""
    tensors = {spec.target for _, spec in program.inputs_of("parameter", "input")}
    for node in program.graph.nodes:
        if node.op != "call_function" or not _is_tensor(node) or info(node).phase in (Phase.RECOMPUTE, Phase.TRANSFER):
            continue
        for name in info(node).names:
            if "::" not in name or not schema.is_view(node):
                is_gradient = name.endswith("~") and name[:-1] in tensors
                yield ("gradient" if is_gradient else "value", name), node


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor) and not schema.holds_elsewhere(node)


def _call(node: fx.Node) -> tuple[str, Phase, str]:
    return info(node).module, info(node).phase, schema.op_name(schema.maker(node))


def _calls(program: Program) -> Counter[tuple[str, Phase, str]]:
    return Counter(_call(node) for node in program.graph.nodes if node.op == "call_function")


def _last_writes(program: Program) -> dict[fx.Node, fx.Node]:
    """The last call that writes to each storage; a gradient that the optimizer overwrites is final before that."""
    last: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for target in schema.mutated_inputs(node):
            root = schema.storage_root(target)
            if root.op == "placeholder" or info(node).origin != _UPDATE_ORIGIN:
                last[root] = node
    return last


# --- running ---------------------------------------------------------------------------------------------------------


def paired_values(
    before: Program, after: Program, pairs: Sequence[Pair], inputs: Mapping[InputSpec, Any], *, seed: int = 0
) -> Generator[tuple[Pair, torch.Tensor, torch.Tensor]]:
    """Run both programs from the same random state and give each pair's two values as soon as both are there.

    The programs take turns: the first runs until it has a value of some pair, then the second until it has its own. A
    value dies at its last use, so what is alive is what the two programs need, and values that the second one computes
    earlier than the first. A tensor is taken after the last call that writes to it (a view of an input when it is
    made). Inputs that a program writes are copied. Until the generator ends or is closed, autograd is off and torch's
    random state is not the caller's.

    Args:
        before: of any stage.
        after: of the same stage.
        pairs: nodes of these two programs.
        inputs: the value of each input by its description; pass state that is missing starts as the program says, and
            constants are the program's own.
        seed: of the generators' state that both start from.

    Yields:
        the pair and its values; they are valid until the next one is asked for.

    Raises:
        GraphoptError: where an input has no value.
    """
    devices = cuda_indices(value for value in inputs.values() if isinstance(value, torch.Tensor))
    with torch.random.fork_rng(devices=devices), torch.no_grad(), plain_precision():
        torch.manual_seed(seed)
        mine = _Run(before, [(pair, pair.before) for pair in pairs], inputs, devices)
        other = _Run(after, [(pair, pair.after) for pair in pairs], inputs, devices)
        values, waiting = other.values(), dict[Pair, torch.Tensor]()
        for pair, value in mine.values():
            while pair not in waiting:
                found, theirs = next(values)
                # what its program may still overwrite is copied
                waiting[found] = theirs if found is pair else theirs.clone()
            yield pair, value, waiting.pop(pair)


class _Run:
    """One program, run call by call with a random state of its own."""

    def __init__(
        self,
        program: Program,
        wanted: Sequence[tuple[Pair, fx.Node]],
        inputs: Mapping[InputSpec, Any],
        devices: list[int],
    ) -> None:
        self._nodes = list(program.graph.nodes)
        self._runner = fx.Interpreter(
            fx.GraphModule(dict(program.attributes), program.graph), garbage_collect_values=False
        )
        self._runner.args_iter = iter(_values(program, inputs))
        self._devices = devices
        position = {node: index for index, node in enumerate(self._nodes)}
        writes = _last_writes(program)
        self._due: dict[fx.Node, list[tuple[Pair, fx.Node]]] = {}
        last = {source: node for node in self._nodes for source in node.all_input_nodes}
        for pair, node in wanted:
            root = schema.storage_root(node)
            final = node if root.op == "placeholder" and root is not node else writes.get(root, node)
            moment = max(node, final, key=position.__getitem__)
            self._due.setdefault(moment, []).append((pair, node))
            last[node] = max(last.get(node, node), moment, key=position.__getitem__)
        self._dying: dict[fx.Node, list[fx.Node]] = {}
        for node in self._nodes:
            self._dying.setdefault(last.get(node, node), []).append(node)
        self._random = self._generators()

    def values(self) -> Iterator[tuple[Pair, torch.Tensor]]:
        """The wanted values, in the order in which they are final."""
        self._set_generators()
        for node in self._nodes[:-1]:
            self._runner.env[node] = self._runner.run_node(node)
            for pair, source in self._due.get(node, ()):
                self._random = self._generators()
                yield pair, self._runner.env[source]
                self._set_generators()
            for dead in self._dying.get(node, ()):
                del self._runner.env[dead]

    def _generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)]

    def _set_generators(self) -> None:
        host, *others = self._random
        torch.set_rng_state(host)
        for device, state in zip(self._devices, others, strict=True):
            torch.cuda.set_rng_state(state, device)


def _values(program: Program, inputs: Mapping[InputSpec, Any]) -> Iterator[Any]:
    """The inputs in order; those that the program writes as copies of its own."""
    written = set(_last_writes(program))
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.role == "constant":
            value: Any = program.constants[node.name]
        elif spec in inputs:
            value = inputs[spec]
        elif spec.role == "pass_state":
            state = program.pass_state[spec.target]
            value = state.create(inputs[InputSpec("parameter", state.source)] if state.source else None)
        else:
            raise GraphoptError(
                f"the {spec.role} {spec.target!r} of the program has no value: give one for every input, by its "
                "InputSpec"
            )
        copied = node in written and isinstance(value, torch.Tensor)
        yield value.detach().clone() if copied else value
