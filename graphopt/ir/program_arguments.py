"""What methods of a program are given, checked where it enters, so that a wrong word is not an empty answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from graphopt.errors import check_type, no_such_word, wrong_argument
from graphopt.ir.node import InputSpec, OutputSpec, Phase, Policy

__all__ = ["check_outputs", "check_phases", "check_policy", "check_roles", "check_spec", "check_target"]

_PHASES = frozenset(Phase)


def check_roles(method: str, roles: Sequence[str], known: Sequence[str]) -> None:
    """Refuse roles that no input or output of a program plays.

    Raises:
        ArgumentError: with the near ones.
    """
    for role in roles:
        if role not in known:
            raise no_such_word(f"{method}'s role", role, known)


def check_phases(phases: Iterable[object]) -> None:
    """Refuse what is no phase.

    Raises:
        ArgumentError: with the near ones.
    """
    for phase in phases:
        if phase not in _PHASES:
            raise no_such_word("phase_nodes's phase", phase, [known.value for known in Phase])


def check_policy(nodes: object, policy: object) -> None:
    """Refuse what is no decision, and nodes that are no list of nodes.

    Raises:
        ArgumentError: with how to give them.
    """
    check_type("set_policy's policy", policy, Policy, "a graphopt.Policy, such as Policy.MUST_SAVE")
    if isinstance(nodes, fx.Node) or not isinstance(nodes, Iterable):
        hint = "give [node] for one" if isinstance(nodes, fx.Node) else "program.find(name).values() gives them"
        raise wrong_argument("set_policy's nodes", nodes, "an iterable of nodes", hint)


def check_spec(spec: object) -> None:
    """Refuse an input that is not described.

    Raises:
        ArgumentError: with how to describe it.
    """
    check_type("add_input's spec", spec, InputSpec, "an InputSpec(role, target)")


def check_outputs(values: object, specs: object) -> tuple[list[Any], list[OutputSpec]]:
    """Output values and their descriptions as lists.

    Raises:
        ArgumentError: for what is no list of them.
    """
    if not isinstance(values, Iterable) or isinstance(values, fx.Node):
        raise wrong_argument("set_outputs's values", values, "a list of nodes, numbers or None", "give [node] for one")
    if not isinstance(specs, Iterable):
        raise wrong_argument("set_outputs's specs", specs, "a list with an OutputSpec(role, target) for each value")
    described = list(specs)
    for index, spec in enumerate(described):
        check_type(f"set_outputs's specs[{index}]", spec, OutputSpec, "an OutputSpec(role, target)")
    return list(values), described


def check_target(target: object) -> None:
    """Refuse what is no op.

    Raises:
        ArgumentError: with an example.
    """
    if not callable(target):
        raise wrong_argument("insert's target", target, "an op", "such as torch.ops.aten.add.Tensor")
