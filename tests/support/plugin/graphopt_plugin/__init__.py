"""A pass and a format that graphopt finds by their entry points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch

from graphopt import Changed, Format, Pass, Program, Rewrite

aten = torch.ops.aten


@final
@dataclass(frozen=True)
class FoldNegations(Rewrite):
    """Replace the negation of a negation by the value itself."""

    name, numerics = "fold-negations", "bitwise"

    def pattern(self, x: Any) -> Any:
        return aten.neg(aten.neg(x))

    def replacement(self, x: Any) -> Any:
        return x


@final
@dataclass(frozen=True)
class BreakOrder(Pass):
    """Leave a program that is not valid, as a pass with a mistake does."""

    name, stage, numerics = "break-order", "joint", "bitwise"

    def apply(self, program: Program) -> Changed:
        first = next(node for node in program.nodes if node.op == "call_function")
        program.output_node.append(first)
        return Changed({"moved": 1})


def to_mermaid(program: Program) -> str:
    edges = [f"  {source.name} --> {node.name}" for node in program.nodes for source in node.all_input_nodes]
    return "\n".join(["flowchart TD", *edges]) + "\n"


MERMAID = Format("mermaid", ".mmd", to_mermaid, "a flowchart in Mermaid's language", "%%")
