"""Which calls a user wants in low precision or in float32: by op, by tensor, by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.names import match_names
from graphopt.ir.node import info
from graphopt.ir.ops import schema
from graphopt.ir.program import Program

__all__ = ["Choice", "Selection", "check_entries"]

Choice = Literal["low", "full"]
"""In the low dtype, or in float32."""

_TENSOR = 1_000_000
"""How specific the name of a tensor is; a module's path counts its parts, and an op's name counts 0."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one entry of ``allow`` or ``deny`` asks for one call."""

    choice: Choice
    entry: str
    weight: int


def check_entries(allow: Iterable[str], deny: Iterable[str]) -> None:
    """Refuse a name that is in both lists.

    Raises:
        GraphoptError: naming it.
    """
    both = sorted(set(allow) & set(deny))
    if both:
        raise GraphoptError(
            f"{', '.join(map(repr, both))} cannot be in both allow= and deny=: allow runs it in the low dtype, deny in "
            "float32"
        )


class Selection:
    """The entries of ``allow`` and ``deny`` for one forward program.

    An entry is the name of an op (``linear``, ``aten.softmax``, ``aten.softmax.int``), the name of a tensor as in
    ``Program.find`` (the call that makes it; for a parameter or an input the calls that read it), the path of a module
    (every call in it and in the modules inside it), or a glob over them. The name of a tensor counts more than a
    module, a longer path more than a shorter one, and an op's name least.
    """

    def __init__(self, program: Program, allow: Iterable[str], deny: Iterable[str]) -> None:
        self._wishes: dict[fx.Node, _Wish] = {}
        self._modules: list[tuple[str, _Wish]] = []
        self._ops: dict[str, _Wish] = {}
        self._used: set[str] = set()
        self._known: dict[str, None] = {}
        allowed: list[tuple[Choice, str]] = [("low", entry) for entry in allow]
        denied: list[tuple[Choice, str]] = [("full", entry) for entry in deny]
        self._pending = allowed + denied
        if self._pending:
            self._resolve(program)

    def choice(self, node: fx.Node) -> Choice | None:
        """What the user wants for a call, or None.

        Raises:
            GraphoptError: where ``allow`` and ``deny`` both ask for it, and neither entry is more specific.
        """
        wishes = [wish for path, wish in self._modules if _inside(info(node).module, path)]
        wishes += [self._wishes[node]] if node in self._wishes else []
        for spelling in _spellings(node) if not wishes else ():
            if spelling in self._ops:
                wishes.append(self._ops[spelling])
                self._used.add(self._ops[spelling].entry)
        best = max((wish.weight for wish in wishes), default=0)
        wanted = [wish for wish in wishes if wish.weight == best]
        for wish in wanted:
            if wish.choice != wanted[0].choice:
                raise GraphoptError(
                    f"allow= and deny= both name {node.name!r} ({_place(node)}), through {wanted[0].entry!r} and "
                    f"{wish.entry!r}: make one of them more specific"
                )
        return wanted[0].choice if wanted else None

    def inherit(self, node: fx.Node, source: fx.Node) -> None:
        """A part of a composite op gets what was asked for the op by the name of a tensor."""
        if source in self._wishes:
            self._wishes[node] = self._wishes[source]

    def check(self) -> None:
        """Refuse entries that matched nothing; called after every call has been asked about.

        Raises:
            GraphoptError: naming them, with the nearest names.
        """
        unmatched = [entry for _, entry in self._pending if entry not in self._used]
        if unmatched:
            lines = [
                f"{entry!r} in allow= or deny= names no op, tensor or module; {did_you_mean(entry, self._known)}"
                for entry in unmatched
            ]
            lines.append("ops are written as in the program (`graphopt dump TARGET --stage forward`)")
            raise GraphoptError("\n".join(line.rstrip("; ") for line in lines))

    # --- resolving ---------------------------------------------------------------------------------------------------

    def _resolve(self, program: Program) -> None:
        nodes = [node for graph in _graphs(program.graph, program.attributes) for node in graph.nodes]
        calls = [node for node in nodes if node.op == "call_function"]
        tensors = _named(nodes)
        modules = {path: None for node in calls for path in _ancestors(info(node).module)}
        ops = {spelling: None for node in calls for spelling in _spellings(node)}
        self._known = {**dict.fromkeys(tensors), **modules, **ops}
        for choice, entry in self._pending:
            self._add_op(entry, _Wish(choice, entry, 0))
            for path in _matching(entry, modules):
                self._modules.append((path, _Wish(choice, entry, 1 + path.count("."))))
                self._used.add(entry)
            named = [tensors[name] for name in _matching(entry, tensors) if name not in modules]
            for node in named:
                self._add_tensor(node, _Wish(choice, entry, _TENSOR))
            for spelling in _matching(entry, ops):
                self._add_op(spelling, _Wish(choice, entry, 0))

    def _add_op(self, spelling: str, wish: _Wish) -> None:
        self._ops[spelling] = _agreed(self._ops.get(spelling), wish)

    def _add_tensor(self, node: fx.Node, wish: _Wish) -> None:
        self._used.add(wish.entry)
        for call in node.users if node.op == "placeholder" else (node,):
            self._wishes[call] = _agreed(self._wishes.get(call), wish)


def _named(nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """The nodes by the names under which users find them."""
    return {name: node for node in nodes if "graphopt" in node.meta for name in info(node).names}


def _agreed(known: _Wish | None, wish: _Wish) -> _Wish:
    if known is not None and known.choice != wish.choice:
        raise GraphoptError(
            f"allow= and deny= both name the same ops or tensors, through {known.entry!r} and {wish.entry!r}: name "
            "each in one of them"
        )
    return wish


def _matching(entry: str, table: Iterable[str]) -> Iterator[str]:
    try:
        yield from match_names((entry,), dict.fromkeys(table))
    except GraphoptError:
        return


def _graphs(graph: fx.Graph, attributes: dict[str, fx.GraphModule]) -> Iterator[fx.Graph]:
    yield graph
    for body in attributes.values():
        yield from _graphs(body.graph, {n: c for n, c in body.named_children() if isinstance(c, fx.GraphModule)})


def _ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def _inside(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")


def _spellings(node: fx.Node) -> tuple[str, ...]:
    """How an op may be written: ``softmax``, ``aten.softmax``, ``aten.softmax.int``."""
    if not isinstance(node.target, _torch.OpOverload):
        return ()
    namespace, name = node.target.namespace, schema.op_name(node)
    return name, f"{namespace}.{name}", f"{namespace}.{name}.{node.target._overloadname}"


def _place(node: fx.Node) -> str:
    known = info(node)
    return ", ".join(part for part in (str(node.target), known.module, known.source) if part)
