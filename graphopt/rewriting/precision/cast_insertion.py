"""Mixed precision on a forward program: every call is decided about in order, and cast around."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import Phase, info, set_info, set_value, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import DTYPE_NAMES
from graphopt.ir.program import Program
from graphopt.ir.region_effects import is_written
from graphopt.rewriting.precision import autocast_regions as regions
from graphopt.rewriting.precision.autocast_rules import Autocast, Treatment, tensor_leaves, treated
from graphopt.rewriting.precision.casts import ORIGIN, cast_of, insert_cast, is_cast
from graphopt.rewriting.precision.levels import Decision, Policy, casts_to, tensor_nodes
from graphopt.rewriting.precision.op_selection import Selection

__all__ = ["Rewriter"]

_NUMBERS_STORED = ("masked_fill", "full_like", "fill", "constant_pad_nd", "pad", "where")
"""Ops that write a number into a tensor, and refuse one that its dtype cannot hold."""

_NO_GRAD, _AUTOCAST = torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast
_BODY_PLACE = {_NO_GRAD: 1, _AUTOCAST: 4}
"""Which argument of a region names its body."""


@dataclass
class Rewriter:
    """Puts one forward program into mixed precision, in place.

    Attributes:
        program: what is rewritten.
        rules: autocast's, for the low dtype.
        policy: decides about each call.
        selection: what the user wants otherwise.
        early: put the casts of parameters at the beginning of the program, instead of in front of their first use.
        outputs: the dtypes to which outputs are cast back; None for an output without one.
        under: the program was captured under autocast, and a call that casts cannot describe stays under it.
        casts: how many casts were added.
        changes: how many calls were changed otherwise: made of their parts, told a dtype, put under autocast.
        plain: how many calls of each op get what they get in the plain program, since no casts describe them.
    """

    program: Program
    rules: Autocast
    policy: Policy
    selection: Selection
    early: bool = False
    outputs: Sequence[torch.dtype | None] = ()
    under: bool = False
    casts: int = 0
    changes: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    _plain: dict[fx.Node, list[torch.dtype]] = field(default_factory=dict)
    _changed: set[fx.Node] = field(default_factory=set)
    _shared: dict[fx.Node, fx.Node | None] = field(default_factory=dict)
    _gone: set[fx.Node] = field(default_factory=set)
    _last_early: fx.Node | None = None

    def run(self) -> None:
        """Rewrite the program; its outputs keep their dtypes.

        Raises:
            GraphoptError: where an op refuses what it is given in mixed precision, or an option names nothing.
        """
        self.write(self.program.nodes)
        self.selection.check()
        self._keep_dtypes()

    def write(self, nodes: Iterable[fx.Node]) -> None:
        """Rewrite some calls of the program, in order: those that autocast concerns.

        Raises:
            GraphoptError: as ``run``.
        """
        for node, spec in self.program.inputs_of("parameter", "input"):
            shared = spec.role == "parameter" or value_of(node).requires_grad
            if shared and not (self.early and is_written(node, self.program.attributes)):  # a cast is as of its place
                self._shared[node] = None
        self._walk(self.program, nodes)

    def _keep_dtypes(self) -> None:
        """Cast what the program returns back to the dtypes that it has in the plain program."""
        values = list(self.program.output_values)
        for place, (value, plain) in enumerate(zip(values, self.outputs, strict=True)):
            if isinstance(value, fx.Node) and plain is not None and value_of(value).dtype != plain:
                end = self.program.output_node
                values[place] = self._cast(self.program, value, plain, end, value, "as in the plain program")
        self.program.output_node.args = (tuple(values),)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _walk(self, program: Program, nodes: Iterable[fx.Node]) -> None:
        self._remember(program)
        for node in nodes:
            if node.op == "call_function" and node not in self._gone:
                self._visit(program, node)

    def _walk_all(self, program: Program) -> None:
        self._walk(program, program.nodes)

    def _remember(self, program: Program) -> None:
        for node in program.graph.nodes:
            if node not in self._changed:
                self._plain[node] = _dtypes(node)

    def _visit(self, program: Program, node: fx.Node) -> fx.Node:
        """Put one call into mixed precision; returns the node that stands for its value now."""
        self._read_past_upcasts(node)
        if isinstance(node.target, _torch.OpOverload):
            return self._visit_op(program, node)
        if node.target is operator.getitem:
            self._refresh(program, node)
            self.policy.follow(node)
        elif node.target is _NO_GRAD:
            self._visit_body(program, node, self._walk_all)
        elif node.target is _AUTOCAST:
            self._visit_own_autocast(program, node)
        elif node.target is _torch.custom_function:
            return self._visit_custom(program, node)
        elif node.target is _torch.inner_gradients:
            self._refuse_cast_inputs(node)
            return self._as_before(program, node)
        else:
            return self._as_before(program, node)
        return node

    def _leaves_body(self, program: Program, node: fx.Node) -> bool:
        """Whether a region hands a value on, which may be written outside."""
        return program is not self.program and any(user.op == "output" for user in node.users)

    def _visit_op(self, program: Program, node: fx.Node) -> fx.Node:
        choice = self.selection.choice(node)
        decision = self.policy.decide(node, choice)
        if schema.is_view(node) and (self._leaves_body(program, node) or is_written(node, program.attributes)):
            decision = Decision(Treatment())  # a view of a cast tensor would be written in its place
        treatment = decision.treatment
        if treatment.inside:
            return self._take_apart(program, node)
        if treatment.region:
            return self._under_autocast(program, node)
        touched = self._cast_arguments(program, node, treatment.casts, treatment.order) or choice is not None
        if treatment.op or treatment.kwargs:
            assert isinstance(node.target, _torch.OpOverload)
            node.target, node.args, node.kwargs = treated(treatment, node.target, node.args, node.kwargs)
            self.changes += 1
            touched = True
        self._fit_numbers(node)
        self._refresh(program, node, touched)
        self.policy.note(node, decision)
        if decision.lower is not None:
            self._lower(program, node, decision.lower)
        return node

    def _visit_custom(self, program: Program, node: fx.Node) -> fx.Node:
        """A user's ``torch.autograd.Function`` runs under autocast, as in eager mode, or in the wanted dtype."""
        choice = self.selection.choice(node)
        if choice is None and self.policy.level == "O1":
            return self._under_autocast(program, node)
        dtype = torch.float32 if choice == "full" else self.rules.dtype
        touched = self._cast_arguments(program, node, casts_to(node, dtype))
        self._refresh(program, node, touched or choice is not None)
        return node

    def _refuse_cast_inputs(self, node: fx.Node) -> None:
        """Refuse gradients that forward takes by a tensor which is another one in mixed precision."""
        count, _, _, *tensors = node.args
        for source in _torch.inner_gradients.inputs(count, *tensors):
            if _dtypes(source) != (self._plain.get(source) or _dtypes(source)):
                raise GraphoptError(
                    f"mixed precision: forward takes gradients by torch.autograd.grad at {info(node).source}, by "
                    f"{source.name}, which would be cast\n"
                    "  what to do: put torch.autocast around layers inside of forward, or train under torch.autocast"
                )

    def _as_before(self, program: Program, node: fx.Node) -> fx.Node:
        """Give a call that cannot be put into mixed precision what it got when it was captured."""
        casts = tuple(
            was[0] if was and _dtypes(source) != was else None
            for source in tensor_nodes(node)
            for was in [self._plain.get(source, [])]
        )
        self._cast_arguments(program, node, casts)
        if self.under and isinstance(node.target, _torch.OpOverload):
            return self._under_autocast(program, node)
        self.plain[schema.op_name(node)] += 1
        return node

    def _read_past_upcasts(self, node: fx.Node) -> None:
        """Let a call outside of a module read what the module casts, where the cast did nothing in the plain program.

        ``x.to(torch.float32)`` of a float32 tensor is ``x`` itself, so that a capture has every later reader of ``x``
        read the cast. In mixed precision only the module that asked for it does.
        """
        for source in node.all_input_nodes:
            origin = source.args[0] if source.args else None
            if not str(source.target).startswith("aten.to.") or not isinstance(origin, fx.Node):
                continue
            module, names = info(source).module, info(source).names
            inside = not module or info(node).module == module or info(node).module.startswith(module + ".")
            idle = self._plain.get(source) == self._plain.get(origin)
            if idle and not inside and all("::" in name for name in names):
                node.replace_input_with(source, origin)

    # --- casts -------------------------------------------------------------------------------------------------------

    def _cast_arguments(
        self, program: Program, node: fx.Node, casts: Sequence[torch.dtype | None], order: Sequence[int] = ()
    ) -> bool:
        """Cast the tensor arguments of a call, each to its dtype; returns whether any is cast."""
        sources = tensor_nodes(node)
        chosen = dict(enumerate(sources))
        for place in order or range(len(casts)):
            dtype = casts[place]
            if dtype is not None and value_of(sources[place]).dtype != dtype:
                why = f"{schema.op_name(node)} in {DTYPE_NAMES[dtype]}"
                chosen[place] = self._cast(program, sources[place], dtype, node, node, why)
        if list(chosen.values()) == sources:
            return False
        turn = iter(chosen.values())
        args, kwargs = _torch.pytree.tree_map(
            lambda a: next(turn) if isinstance(a, fx.Node) and isinstance(value_of(a), torch.Tensor) else a,
            (tuple(node.args), dict(node.kwargs)),
        )
        node.args, node.kwargs = args, kwargs
        return True

    def _cast(
        self, program: Program, source: fx.Node, dtype: torch.dtype, before: fx.Node, like: fx.Node, why: str
    ) -> fx.Node:
        """A cast of a value; a parameter, or an input with a gradient, has one low cast, as in autocast's cache."""
        if source not in self._shared or dtype != self.rules.dtype:
            self.casts += 1
            return insert_cast(program, source, dtype, before=before, like=like, why=why)
        known = self._shared[source] or cast_of(source, dtype) or self._shared_cast(program, source, before)
        self._shared[source] = known
        return known

    def _shared_cast(self, program: Program, source: fx.Node, before: fx.Node) -> fx.Node:
        self.casts += 1
        dtype = self.rules.dtype
        if self.early:
            first = next(node for node in program.graph.nodes if node.op != "placeholder")
            before = self._last_early.next if self._last_early is not None else first
        name = info(source).names[0]
        cast = insert_cast(program, source, dtype, before=before, like=source, why="one cast for all uses")
        findable = f"{name}.{str(dtype).removeprefix('torch.')}"
        set_info(cast, replace(info(cast), module=name.rpartition(".")[0], names=(findable,)))
        self._last_early = cast
        return cast

    def _lower(self, program: Program, node: fx.Node, dtype: torch.dtype) -> None:
        """Cast the float32 result of a call down for everything that reads it, but for the program's outputs."""
        value = value_of(node)
        readers = [user for user in node.users if user.op != "output"]
        done = all(is_cast(user) and user.kwargs["dtype"] == dtype for user in readers)
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or done:
            return
        why = f"{schema.op_name(node)} gives {DTYPE_NAMES[dtype]}"
        cast = self._cast(program, node, dtype, node.next, node, why)
        for reader in readers:
            reader.replace_input_with(node, cast)
        self._changed.add(cast)

    def _fit_numbers(self, node: fx.Node) -> None:
        """Bring a number that is written into a tensor of low precision into the range of its dtype.

        Models take the lowest finite number of the dtype that they see; in the plain program that is float32's.
        """
        if not schema.op_name(node).rstrip("_").startswith(_NUMBERS_STORED):
            return
        dtypes = {value_of(source).dtype for source in tensor_nodes(node)} - {torch.bool}
        if dtypes not in ({torch.float16}, {torch.bfloat16}):
            return
        limits = torch.finfo(dtypes.pop())

        def fit(value: Any) -> Any:
            finite = isinstance(value, float) and abs(value) < float("inf")
            return min(max(value, limits.min), limits.max) if finite else value

        node.args = tuple(fit(value) for value in node.args)
        node.kwargs = {key: fit(value) for key, value in node.kwargs.items()}

    # --- regions and composite ops -----------------------------------------------------------------------------------

    def _visit_own_autocast(self, program: Program, node: fx.Node) -> None:
        """What the model runs under autocast itself, or keeps out of it, is as captured.

        A region for devices on which it has no tensors changes nothing about what is around it.
        """
        kinds = {value_of(source).device.type for source in tensor_nodes(node)}
        if kinds and str(node.args[0]) not in kinds:
            self._visit_body(program, node, self._walk_all)
        elif any(source in self._changed for source in node.all_input_nodes):
            with regions.autocast_of(node):
                self._visit_body(program, node, self._refresh_all)

    def _refresh_all(self, program: Program) -> None:
        self._remember(program)
        for node in program.nodes:
            if node.target in _BODY_PLACE:
                around = regions.autocast_of(node) if node.target is _AUTOCAST else contextlib.nullcontext()
                with around:
                    self._visit_body(program, node, self._refresh_all)
            elif node.op == "call_function":
                self._refresh(program, node)

    def _visit_body(self, program: Program, node: fx.Node, visit: Callable[[Program], None]) -> None:
        """Rewrite the body of a region, or compute its values again, with what comes in from outside."""
        place = _BODY_PLACE[node.target]  # type: ignore[index]
        inner, inputs = regions.body_of(program, node, place)
        for inside, outside in zip(inner.placeholders, inputs, strict=True):
            if outside in self._changed:
                self._plain[inside] = _dtypes(inside)
                set_value(inside, value_of(outside))
                self._changed.add(inside)
        visit(inner)
        regions.put_body(program, node, place, inner)
        set_value(node, regions.body_results(inner))
        self._note(node)

    def _take_apart(self, program: Program, node: fx.Node) -> fx.Node:
        """Replace a composite op by its parts, each in mixed precision."""
        whole = schema.is_random(node) and not schema.is_recurrent(node)
        parts = None if whole else regions.parts(program, node, self.rules.dtype)
        if parts is None:
            return self._as_before(program, node)
        self.changes += 1
        mapping = parts.inputs
        device = value_of(tensor_nodes(node)[0]).device.type
        for part in parts.calls:
            args, kwargs = _torch.map_aggregate(
                (part.args, part.kwargs), lambda a: mapping[a] if isinstance(a, fx.Node) else a
            )
            assert callable(part.target)
            origin = f"{ORIGIN}: part of {schema.op_name(node)}"
            with regions.autocast_set(device, self.rules.dtype, True):  # its arguments are cast when it is visited
                new = program.insert(
                    part.target, args, kwargs, before=node, like=node, phase=Phase.FORWARD, origin=origin
                )
            set_info(new, replace(info(new), region=info(node).region))
            self.selection.inherit(new, node)
            self._plain[new] = []
            mapping[part] = self._visit(program, new)
        results = [mapping[result] for result in parts.results]
        if isinstance(value_of(node), torch.Tensor):
            return self._stand_for(node, results[0])
        for user in list(node.users):
            if user.target is operator.getitem:
                self._stand_for(user, results[user.args[1]])  # type: ignore[index]
        if not node.users:
            self._erase(node)
        return results[0]

    def _stand_for(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """Let a part of a composite op take the place, and the names, of what the op returned."""
        if info(result).made_by == ORIGIN and not info(result).names:
            set_info(result, replace(info(result), names=info(node).names))
        return self._replace(node, result)

    def _under_autocast(self, program: Program, node: fx.Node) -> fx.Node:
        """Let a call that no casts of arguments describe run inside of a region under autocast."""
        devices = [value_of(source).device.type for source in tensor_nodes(node)]
        if not devices:
            return node
        self.changes += 1
        result = regions.put_under_autocast(program, node, devices[0], self.rules.dtype)
        return self._replace(node, result)

    def _replace(self, node: fx.Node, result: fx.Node) -> fx.Node:
        self._plain[result] = self._plain[node]
        self._note(result)
        node.replace_all_uses_with(result)
        self._erase(node)
        return result

    def _erase(self, node: fx.Node) -> None:
        self._gone.add(node)
        node.graph.erase_node(node)

    # --- values ------------------------------------------------------------------------------------------------------

    def _refresh(self, program: Program, node: fx.Node, touched: bool = False) -> None:
        """Compute a call's value again where its arguments changed."""
        if touched or any(source in self._changed for source in node.all_input_nodes):
            set_value(node, regions.evaluate(program, node))
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        """Remember a call whose results have other dtypes than when it was captured."""
        if _dtypes(node) != self._plain.get(node):
            self._changed.add(node)


def _dtypes(node: fx.Node) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensor_leaves(value_of(node))]
