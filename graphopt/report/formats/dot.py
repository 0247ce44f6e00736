"""A program in Graphviz' language."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from graphopt.ir.node import info
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import type_text
from graphopt.ir.program import Program
from graphopt.report.pictures.picture import PHASE_COLORS, printable

__all__ = ["to_dot"]


def to_dot(program: Program) -> str:
    """Every node and edge in Graphviz' language, in clusters by phase and, inside of them, by module.

    Graphviz lays such graphs out slowly: a minute or more from about a thousand nodes on, where ``to_svg`` takes
    milliseconds. The text is also what other graph tools read.

    Args:
        program: of any stage. Inputs are ellipses with role and name; results that are returned lead to ``output``.
    """
    title = f"{program.title or 'model'}, {program.stage} stage"
    lines = [
        f"digraph {_quoted(title)} {{",
        f"  graph [label={_quoted(title)}, labelloc=t, style=rounded, color=gray60, fontname=Helvetica]",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname=Helvetica, fontsize=10]',
        '  edge [color="#7b858f", arrowsize=0.6]',
    ]
    groups: dict[str, dict[str, list[str]]] = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        label = f"{spec.role}\n{spec.target}\n{type_text(node.meta.get('val'))}"
        groups.setdefault("inputs", {}).setdefault("", []).append(
            f"{_quoted(node.name)} [shape=ellipse, style=solid, label={_quoted(label)}]"
        )
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "output"):
            known = info(node)
            label = f"{schema.op_name(node)}\n{type_text(node.meta.get('val'))}"
            groups.setdefault(known.phase.value, {}).setdefault(known.module, []).append(
                f'{_quoted(node.name)} [fillcolor="{PHASE_COLORS[known.phase][1]}", label={_quoted(label)}]'
            )
    lines += _clusters(groups)
    lines.append(f"  {_quoted(program.output_node.name)} [shape=ellipse, label=output]")
    for node in program.graph.nodes:
        lines += [f"  {_quoted(source.name)} -> {_quoted(node.name)}" for source in node.all_input_nodes]
    return "\n".join([*lines, "}"]) + "\n"


def _clusters(groups: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    number = itertools.count()
    for phase, modules in groups.items():
        yield f"  subgraph cluster_{phase} {{"
        yield f"    label={phase}"
        yield from (f"    {statement}" for statement in modules.pop("", []))
        for module, statements in modules.items():
            yield f"    subgraph cluster_{next(number)} {{"
            yield f"      label={_quoted(module)}"
            yield from (f"      {statement}" for statement in statements)
            yield "    }"
        yield "  }"


def _quoted(text: str) -> str:
    """A string of Graphviz: in quotes, without characters that its output formats cannot hold."""
    clean = printable(text).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
    return '"' + clean.replace("\r", " ").replace("\n", "\\n") + '"'
