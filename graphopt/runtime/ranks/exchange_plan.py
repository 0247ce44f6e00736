"""What a program exchanges with other ranks, in a form that ranks can compare by one number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphopt.ir.node import Phase, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program

__all__ = ["ExchangePlan", "digest_of", "exchange_groups", "exchange_plan"]


@dataclass(frozen=True)
class ExchangePlan:
    """The exchanges of one program.

    Attributes:
        title: of the program, for people.
        trained: the parameters that the program computes gradients for, by name, and what gradients are divided by:
            exchanges of equal shapes may be of other tensors.
        lines: what is exchanged over each process group, by the group's name, in order.
        digests: a number of 64 bits for each group, which differs where ``trained`` or the lines do.
    """

    title: str
    trained: tuple[str, ...]
    lines: Mapping[str, tuple[str, ...]]
    digests: Mapping[str, int]


def exchange_groups(program: Program) -> list[str]:
    """The names of the process groups that a program exchanges over, in the order of its first exchanges."""
    return list(dict.fromkeys(_group_of(node) for node in _exchanges(program)))


def exchange_plan(program: Program, title: str = "", batches: int = 1) -> ExchangePlan:
    """What a program exchanges.

    Args:
        program: of stage joint or step.
        title: for people; the program's own by default.
        batches: how many the gradients are a mean over; 0 for a sum.
    """
    divided = {0: ["sums over batches"], 1: []}.get(batches, [f"means over {batches} batches"])
    trained = (*_trained(program), *divided)
    lines: dict[str, list[str]] = {}
    for node in _exchanges(program):
        subjects = ", ".join(_subjects(program, node))
        made = value_of(node)
        into = made if made is not None else value_of(schema.mutated_inputs(node)[0])
        line = f"{schema.op_name(node).rstrip('_')} to {type_text(into)} ({info(node).origin})"
        lines.setdefault(_group_of(node), []).append(line + (subjects and f" of {subjects}"))
    whole = {name: tuple(found) for name, found in lines.items()}
    digests = {name: digest_of("\n".join((*trained, "", *found))) for name, found in whole.items()}
    return ExchangePlan(title or program.title or "the program", trained, whole, digests)


def digest_of(text: str) -> int:
    """A number of 64 bits, with a sign, as a tensor of integers holds it."""
    data = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(data, "little", signed=True)


def _exchanges(program: Program) -> Iterator[fx.Node]:
    """The calls that exchange, without those that wait for one."""
    for node in program.graph.nodes:
        if schema.is_collective(node) and node.args and not schema.hands_on(node):
            yield node


def _group_of(node: fx.Node) -> str:
    names = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, str)]
    return names[-1] if names else ""


def _trained(program: Program) -> list[str]:
    """The parameters that a step updates, or that a joint program gives gradients of, by name."""
    parameters = {spec.target: node for node, spec in program.inputs_of("parameter")}
    if program.stage == "step":
        return sorted(
            name
            for name, node in parameters.items()
            if any(info(user).phase is Phase.UPDATE for user in node.users if user.op != "output")
        )
    return sorted({spec.target for _, spec in program.outputs_of("gradient")} & parameters.keys())


def _subjects(program: Program, node: fx.Node) -> list[str]:
    """What is exchanged: the parameters whose gradients are read from the result, and the modules that it comes from.

    The latter in the order in which their tensors lie in the exchange.
    """
    late = info(node).phase not in (Phase.FORWARD, Phase.RECOMPUTE)
    behind = sorted(_gradients_behind(program, node)) if late else []
    return [*behind, *(f"from {module}" for module in dict.fromkeys(_modules_in_front(node)))]


def _gradients_behind(program: Program, node: fx.Node) -> set[str]:
    """The parameters whose gradients are parts of the result of an exchange."""
    names = {f"{spec.target}~" for _, spec in program.inputs_of("parameter")}
    returned: dict[object, list[str]] = {}
    for value, spec in program.outputs_of("gradient"):
        returned.setdefault(value, []).append(f"{spec.target}~")
    found: set[str] = set()
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        mine = names.intersection((*info(current).names, *returned.get(current, ())))
        found |= mine
        if mine:
            continue
        for user in current.users:
            if user.op != "output" and user not in seen and info(user).phase is not Phase.UPDATE:
                seen.add(user)
                pending.append(user)
    return {name.removesuffix("~") for name in found}


def _modules_in_front(node: fx.Node) -> Iterator[str]:
    """The modules, with shapes, of what is computed before anything of an exchange, in the order of arguments."""
    seen, pending = {node}, [node]
    while pending:
        current = pending.pop()
        for source in reversed(current.all_input_nodes):
            if source in seen:
                continue
            seen.add(source)
            if info(source).phase is Phase.SYNC and source.op != "placeholder":
                pending.append(source)
                continue
            value = value_of(source)
            shape = type_text(value) if isinstance(value, torch.Tensor) else ""
            yield f"{info(source).module or (info(source).names or ('the model',))[0]} {shape}".strip()
