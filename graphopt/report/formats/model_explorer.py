"""A program as JSON for Model Explorer: its graph collection, with one graph whose groups are phases and modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from graphopt.ir.node import InputSpec, OutputSpec, info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import storage_bytes, tensors_of, type_text
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.report.pictures.picture import PHASE_COLORS

__all__ = ["to_model_explorer"]


def to_model_explorer(program: Program) -> dict[str, Any]:
    """A program as a graph collection, the JSON that Model Explorer opens by itself (``model-explorer step.json``).

    Each call is a node in the group of its phase and, inside of it, of its module path (``backward/blocks/0/mlp``);
    inputs are grouped by role, and every result that is returned is a node in the group ``outputs``. Types are at the
    outputs of nodes, and what else is known of a call among its attributes.

    Args:
        program: of any stage.

    Returns:
        plain data: ``label``, and ``graphs`` with one graph.
    """
    label = f"{program.title or 'program'}, {program.stage} stage"
    nodes = [*_inputs(program), *_calls(program), *_outputs(program)]
    about = {"passes": ", ".join(program.history) or "none", "stage": program.stage}
    if program.stage != "forward":
        timeline = program.memory()
        about["predicted peak"] = format_bytes(timeline.peak_bytes)
        about["persistent"] = format_bytes(timeline.resident_bytes)
    return {"label": label, "graphs": [{"id": label, "nodes": nodes, "groupNodeAttributes": {"": about}}]}


def _inputs(program: Program) -> Iterator[dict[str, Any]]:
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        group = "/".join(["inputs", spec.role, *_owner(spec)])
        yield _node(node.name, spec.target, group, {"role": spec.role}, [], value_of(node))


def _calls(program: Program) -> Iterator[dict[str, Any]]:
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        known = info(node)
        attributes = {
            "names": ", ".join(known.names),
            "module": known.module,
            "phase": known.phase.value,
            "source": known.source,
            "made by": known.origin,
            "decision": known.policy.value if known.policy else "",
            **_constants(node),
        }
        group = "/".join([known.phase.value, *_modules(known.module)])
        color, tint, _ = PHASE_COLORS[known.phase]
        yield {
            **_node(node.name, schema.op_name(node), group, attributes, node.all_input_nodes, value_of(node)),
            "style": {"backgroundColor": tint, "borderColor": color, "hoveredBorderColor": color},
        }


def _outputs(program: Program) -> Iterator[dict[str, Any]]:
    """A node for each value that is returned, since one node of many inputs would pull everything to it."""
    for number, (value, spec) in enumerate(zip(program.output_values, program.outputs, strict=True)):
        sources = [value] if isinstance(value, fx.Node) else []
        group = "/".join(["outputs", spec.role, *_owner(spec)])
        yield _node(f"{program.output_node.name}.{number}", spec.target, group, {"role": spec.role}, sources, None)


def _owner(spec: InputSpec | OutputSpec) -> list[str]:
    """The module that a parameter, its state or its gradient belongs to."""
    path, _, _ = spec.target.partition("/")[0].rpartition(".")
    return _modules(path)


def _modules(path: str) -> list[str]:
    """The groups of a module path; a slash in a name is no group of its own."""
    return [part.replace("/", "\u2215") for part in path.split(".") if part]


def _node(
    name: str, label: str, group: str, attributes: dict[str, str], sources: list[fx.Node], value: Any
) -> dict[str, Any]:
    return {
        "id": name,
        "label": label,
        "namespace": group,
        "attrs": [{"key": key, "value": text} for key, text in attributes.items() if text],
        "incomingEdges": [
            {"sourceNodeId": source.name, "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
            for place, source in enumerate(sources)
        ],
        "outputsMetadata": _types(value),
    }


def _types(value: Any) -> list[dict[str, Any]]:
    """Shape, dtype and bytes of a result; those of several results stand one after the other."""
    tensors = tensors_of(value)
    if not tensors:
        return []
    attributes = [
        {"key": "shape", "value": type_text(value)},
        {"key": "bytes", "value": ", ".join(format_bytes(storage_bytes(tensor)) for tensor in tensors)},
    ]
    return [{"id": "0", "attrs": attributes}]


def _constants(node: fx.Node) -> dict[str, str]:
    """The arguments that are no tensors."""
    given = [(f"argument {place}", value) for place, value in enumerate(node.args)]
    given += [(str(key), value) for key, value in node.kwargs.items()]
    return {key: str(value) for key, value in given if value is not None and not _holds_node(value)}


def _holds_node(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_node(item) for item in value)
    return isinstance(value, fx.Node)
