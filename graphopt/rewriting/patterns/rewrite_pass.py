"""Passes that replace every occurrence of a pattern: two functions over aten ops, one to find and one to put there."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from functools import cache
from typing import Any, ClassVar

from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage
from graphopt.rewriting.patterns.pattern import Match, Mismatch, Pattern, Traced, trace

__all__ = ["Rewrite"]


class Rewrite(Pass):
    """A pass that replaces every occurrence of ``pattern`` by ``replacement``.

    >>> aten = torch.ops.aten
    >>> @final
    ... @dataclass(frozen=True)
    ... class FoldTransposes(graphopt.Rewrite):
    ...     '''Replace the transpose of a transpose by the matrix itself.'''
    ...
    ...     name, numerics = "fold-transposes", "bitwise"
    ...
    ...     def pattern(self, x):
    ...         return aten.t(aten.t(x))
    ...
    ...     def replacement(self, x):
    ...         return x

    Both functions take the same arguments. In the pattern they are wildcards (see ``pattern.py``); the
    replacement gets what they stood for, and its calls are put in front of the call that they replace with
    ``Program.insert``, so they have values, phase, module, source line and provenance. The names under which users know
    the old result stand for the new one. Options of the pass are fields of ``self`` in both.

    An occurrence is left alone, and the record says how many were and why, where its calls are of several phases, where
    ``accepts`` says so, where something in between writes to what the replacement reads, and where another call reads a
    value from its inside, which would have to be computed twice (``shared`` allows that; a replacement without calls is
    fine in any case). What a pass of this kind has put into a program it does not take for an occurrence again, so that
    a second application changes nothing.

    Class attributes:
        stage: which program it rewrites; joint by default.
        shared: whether values inside of an occurrence may have other readers.
    """

    stage: ClassVar[PassStage] = "joint"
    numerics: ClassVar[Numerics]
    shared: ClassVar[bool] = False

    @abstractmethod
    def pattern(self, *wildcards: Any) -> Any:
        """What is replaced: one op of ``torch.ops``, whose arguments are ops again, wildcards or numbers."""

    @abstractmethod
    def replacement(self, *values: Any) -> Any:
        """What takes its place, of the same shape and dtype: ops on ``values``, or one of them."""

    def accepts(self, match: Match) -> str:
        """Why an occurrence is to be left alone, in a few words; "" to replace it.

        Args:
            match: the calls, and what each wildcard stands for; ``graphopt.ir.node.value_of`` gives shapes and dtypes.
        """
        del match
        return ""

    def apply(self, program: Program) -> Changed:
        """See the class."""
        pattern, replacement = _traced(self)
        replaced, left, nearest = 0, Counter[str](), None
        names: list[str] = []
        for node in program.nodes:
            if not pattern.could_start(node) or self._is_own(node):
                continue
            found = pattern.match(node)
            if isinstance(found, Mismatch):
                nearest = found if nearest is None or found.found > nearest.found else nearest
                continue
            reason = self._refused(found, replacement)
            if reason:
                left[reason] += 1
                continue
            names += info(node).names[:1]
            self._replace(program, found, replacement)
            replaced += 1
        lines = tuple(f"{count} left alone: {reason}" for reason, count in left.items())
        if not replaced:
            return Changed(reason="; ".join(lines) or _nothing(pattern, nearest))
        return Changed({"replaced": replaced}, tensors=tuple(names), lines=lines)

    def _is_own(self, node: fx.Node) -> bool:
        return info(node).origin == self.name

    def _refused(self, match: Match, replacement: Traced) -> str:
        """Why an occurrence cannot be replaced, or is not to be."""
        calls = set(match.calls.values())
        phases = {info(call).phase for call in calls}
        if len(phases) > 1:
            return f"its ops are of {len(phases)} phases"
        inside = calls - {match.root}
        read = [call for call in inside if not calls.issuperset(call.users)]
        if read and replacement.calls and not self.shared:
            return "a value inside of it is read elsewhere"
        return _written_between(match) or self.accepts(match)

    def _replace(self, program: Program, match: Match, replacement: Traced) -> None:
        made: dict[fx.Node, Any] = {node: match.values[node.name] for node in replacement.arguments}
        for call in replacement.calls:
            args, kwargs = _torch.map_aggregate(
                (call.args, call.kwargs), lambda value: made[value] if isinstance(value, fx.Node) else value
            )
            made[call] = program.insert(
                _overload(call.target, args, kwargs),
                args,
                kwargs,
                before=match.root,
                phase=info(match.root).phase,
                like=match.root,
                origin=self.name,
            )
        result = made[replacement.result] if isinstance(replacement.result, fx.Node) else replacement.result
        self._hand_over(program, match.root, result)
        for call in sorted(match.calls.values(), reverse=True):
            if not call.users and not schema.has_effect(call):
                program.graph.erase_node(call)

    def _hand_over(self, program: Program, old: fx.Node, new: Any) -> None:
        """Let everything read ``new`` in place of ``old``, under its names."""
        if not isinstance(new, fx.Node):
            raise GraphoptError(f"{self.name}: the replacement gives {new!r}, and a call or a tensor is needed")
        was, now = type_text(value_of(old)), type_text(value_of(new))
        if was != now:
            raise GraphoptError(
                f"{self.name}: the replacement of {old.name} ({info(old).source or 'no source line'}) is {now}, and "
                f"what it takes the place of is {was}"
            )
        for name in info(old).names:
            program.hand_over_name(name, old, new)
        old.replace_all_uses_with(new)


@cache
def _traced(current: Rewrite) -> tuple[Pattern, Traced]:
    """The two functions of a pass, traced once for each choice of its options."""
    pattern, replacement = Pattern(current.pattern), trace(current.replacement)
    wanted = {node.name for node in pattern.arguments}
    strange = [node.name for node in replacement.arguments if node.name not in wanted]
    if strange:
        raise GraphoptError(
            f"{type(current).__name__}.replacement takes {strange[0]!r}, which is no argument of its pattern; those "
            f"are {', '.join(sorted(wanted))}"
        )
    return pattern, replacement


def _overload(target: Any, args: Any, kwargs: Any) -> Any:
    """The overload that a call of the replacement means."""
    if not isinstance(target, _torch.OpOverloadPacket):
        return target
    values = _torch.map_aggregate((args, kwargs), lambda v: value_of(v) if isinstance(v, fx.Node) else v)
    return _torch.resolve_overload(target, *values)


def _written_between(match: Match) -> str:
    """Whether something writes to what the replacement reads, after the occurrence began and before its result."""
    read = {schema.storage_root(value) for value in match.values.values() if isinstance(value, fx.Node)}
    node = min(match.calls.values())
    while node is not match.root:
        if any(schema.storage_root(written) in read for written in schema.mutated_inputs(node)):
            return f"{schema.op_name(node)} writes to what it reads in between"
        node = node.next
    return ""


def _nothing(pattern: Pattern, nearest: Mismatch | None) -> str:
    if nearest is None:
        return f"the program has no op {pattern.root_name}"
    return f"no occurrence; the nearest begins at {nearest.node.name}: {nearest.reason}"
