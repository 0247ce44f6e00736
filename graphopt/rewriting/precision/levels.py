"""How each call of a forward program is to be made: the levels O1 and O2, and what the user wants otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError, TorchVersionError, quoted
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.rewriting.precision.autocast_rules import ELIGIBLE, Autocast, Treatment, tensor_leaves
from graphopt.rewriting.precision.op_selection import Choice

__all__ = ["Decision", "Level", "Policy", "casts_to", "example_arguments", "refused", "sets_dtype", "tensor_nodes"]

Level = Literal["O1", "O2"]

_NORM = re.compile(r"(batch|layer|group|instance|rms|local_response)_norm")
_LOSS = re.compile(r"_loss|kl_div|binary_cross_entropy")
_RUNNING = ("running_mean", "running_var")
_SETS_DTYPE = re.compile(r"^(to|_to_copy|type_as|_autocast_to_\w+)$")


@dataclass(frozen=True, slots=True)
class Decision:
    """What is done with a call.

    Attributes:
        treatment: the casts of its arguments, or another way to make it.
        lower: the dtype that its results are cast to afterwards, or None.
        explicit: where it stays in float32, this is what the user's program asked for, and O2 lets readers follow it.
    """

    treatment: Treatment
    lower: torch.dtype | None = None
    explicit: bool = False


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for a call's tensor arguments, in order; one that is there twice comes twice."""
    leaves = _torch.pytree.tree_leaves((node.args, node.kwargs))
    return [a for a in leaves if isinstance(a, fx.Node) and isinstance(value_of(a), torch.Tensor)]


def example_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with example values in the place of nodes."""
    args, kwargs = _torch.pytree.tree_map(
        lambda a: value_of(a) if isinstance(a, fx.Node) else a, (tuple(node.args), dict(node.kwargs))
    )
    return args, kwargs


def refused(node: fx.Node, error: Exception) -> GraphoptError:
    """The error for a call that cannot be made in mixed precision: where it is, and what to do."""
    known = info(node)
    place = ", ".join(part for part in (known.module, known.source) if part)
    name = schema.op_name(node)
    return GraphoptError(
        f"{name} cannot run in mixed precision on what it is given here: {quoted(error).split(chr(10))[0]}\n"
        f"  where: {place or node.name}\n"
        f"  what to do: keep it in float32 with deny=({name!r},), or deny= its module"
    )


class Policy:
    """Decides about calls of ops, one at a time and in program order.

    Args:
        rules: autocast's, for the low dtype.
        level: ``O1`` does what autocast does; ``O2`` runs everything but normalisation and losses in the low dtype.
        parameters: the nodes of the parameters, which O2 has in the low dtype whatever they meet.
    """

    def __init__(self, rules: Autocast, level: Level, parameters: Iterable[fx.Node]) -> None:
        self._rules = rules
        self._parameters = set(parameters)
        self.level = level
        self._explicit: set[fx.Node] = set()

    def decide(self, node: fx.Node, choice: Choice | None) -> Decision:
        """How a call is to be made; its arguments are as decided about earlier calls."""
        if written := schema.mutated_inputs(node):
            return Decision(_into(node, written))
        if _SETS_DTYPE.match(schema.op_name(node)):
            return Decision(Treatment(), explicit=True)
        if choice is not None:
            return Decision(self._all_to(node, self._rules.dtype if choice == "low" else torch.float32))
        if self.level == "O1":
            return Decision(self._autocast(node))
        return self._mostly_low(node)

    def _autocast(self, node: fx.Node) -> Treatment:
        assert isinstance(node.target, _torch.OpOverload)
        try:
            return self._rules.treatment(node.target, *example_arguments(node))
        except TorchVersionError:
            raise
        except Exception as error:
            raise refused(node, error) from error

    def _all_to(self, node: fx.Node, dtype: torch.dtype) -> Treatment:
        """Cast every float argument, but for statistics that the op itself updates and what must go with them."""
        kept = _with_statistics(node) if dtype != torch.float32 else set()
        casts = casts_to(node, dtype)
        return Treatment(casts=tuple(None if place in kept else cast for place, cast in enumerate(casts)))

    def _mostly_low(self, node: fx.Node) -> Decision:
        low = self._rules.dtype
        name = schema.op_name(node)
        assert isinstance(node.target, _torch.OpOverload)
        if _given_dtype(node):
            return Decision(Treatment(), explicit=True)
        if _NORM.search(name):
            return Decision(self._all_to(node, torch.float32), lower=low)
        if _LOSS.search(name):
            return Decision(self._all_to(node, torch.float32), explicit=True)
        if low in self._autocast(node).casts:
            return Decision(self._all_to(node, low))
        if any(source in self._explicit for source in tensor_nodes(node)):
            placed = zip(tensor_nodes(node), casts_to(node, low), strict=True)
            casts = tuple(cast if source in self._parameters else None for source, cast in placed)
            if _one_dtype(node, casts) or torch.Tag.pointwise in node.target.tags:
                return Decision(Treatment(casts=casts), explicit=True)
        return Decision(self._all_to(node, low))

    def note(self, node: fx.Node, decision: Decision) -> None:
        """Remember a call whose float32 result the user's program asked for."""
        values = tensor_leaves(value_of(node))
        if decision.explicit and any(value.dtype == torch.float32 for value in values):
            self._explicit.add(node)

    def follow(self, node: fx.Node) -> None:
        """An element of a tuple is in float32 on purpose where the tuple is."""
        if node.args[0] in self._explicit:
            self._explicit.add(node)


def casts_to(node: fx.Node, dtype: torch.dtype) -> tuple[torch.dtype | None, ...]:
    """The casts that bring every float argument of a call to a dtype."""
    return tuple(_to(value_of(source), dtype) for source in tensor_nodes(node))


def _to(value: torch.Tensor, dtype: torch.dtype) -> torch.dtype | None:
    return dtype if value.dtype in ELIGIBLE and value.dtype != dtype else None


def _into(node: fx.Node, written: list[fx.Node]) -> Treatment:
    """Casts of what a call writes into a tensor, to the dtype of that, where the op does not take any dtype.

    Under eager autocast such a call (``index_put_``, ``index_add_``) fails.
    """
    dtypes = {value_of(target).dtype for target in written}
    takes_any = torch.Tag.pointwise in node.target.tags or schema.op_name(node) == "copy_"  # type: ignore[union-attr]
    if takes_any or len(dtypes) > 1 or not dtypes.issubset(ELIGIBLE):
        return Treatment()
    (dtype,) = dtypes
    return Treatment(casts=tuple(_to(value_of(source), dtype) for source in tensor_nodes(node)))


def _one_dtype(node: fx.Node, casts: tuple[torch.dtype | None, ...]) -> bool:
    """Whether the float arguments of a call have one dtype after ``casts``."""
    values = [value_of(source).dtype for source in tensor_nodes(node)]
    dtypes = {cast or dtype for dtype, cast in zip(values, casts, strict=True)}
    return len(dtypes & set(ELIGIBLE)) == 1


def sets_dtype(node: fx.Node) -> bool:
    """Whether a call is told the dtype of its result: a cast, or ``dtype=`` given."""
    if not isinstance(node.target, _torch.OpOverload):
        return False
    return bool(_SETS_DTYPE.match(schema.op_name(node))) or _given_dtype(node)


def _given_dtype(node: fx.Node) -> bool:
    assert isinstance(node.target, _torch.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("dtype") is not None


def _with_statistics(node: fx.Node) -> set[int]:
    """The places, among its tensor arguments, of all but the first of an op that updates running statistics."""
    assert isinstance(node.target, _torch.OpOverload)
    if not any(argument.name in _RUNNING for argument in node.target._schema.arguments):
        return set()
    return set(range(1, len(tensor_nodes(node))))
