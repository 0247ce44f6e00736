"""The program: one flat FX graph of a training step, with what every input, output and node is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError, check_type, quoted
from graphopt.ir.context import Context
from graphopt.ir.graphs.graph_copies import copy_graph
from graphopt.ir.memory.described_tensors import described_tensors
from graphopt.ir.memory.timeline import MemoryTimeline, ReservedMemory
from graphopt.ir.names import identifier, match_names, names_in_part
from graphopt.ir.node import (
    INPUT_ROLES,
    OUTPUT_ROLES,
    Candidate,
    InputSpec,
    NodeInfo,
    OutputSpec,
    Phase,
    Policy,
    Stage,
    TensorInfo,
    info,
    info_like,
    set_info,
    set_value,
    value_of,
)
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program_arguments import (
    check_outputs,
    check_phases,
    check_policy,
    check_roles,
    check_spec,
    check_target,
)
from graphopt.ir.provided.formats import find_format
from graphopt.ir.provided.methods import provided
from graphopt.ir.region_effects import has_effect
from graphopt.ir.state import PassState
from graphopt.ir.words.written_units import counted

__all__ = ["Program"]


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, _torch.FakeTensor)


@dataclass(slots=True)
class Program:
    """A training step, or a part of one, as a flat graph.

    Attributes:
        graph: placeholders (all tensors and numbers come in by reference), calls, one output holding a tuple.
        stage: ``forward`` (what torch.export gives), ``joint`` (forward and backward, functional aten) or ``step``
            (plus the optimizer's in-place update).
        inputs: what each placeholder is, in order.
        outputs: what each output value is, in order.
        constants: tensors the model made itself, by placeholder name.
        attributes: sub-graphs that a forward program's higher-order ops refer to.
        title: whose program this is (a model's class name), for people.
        lower: makes the next stage's program out of this one; None on the last stage or after loading from a file.
        pass_state: what passes keep across runs, by the target of its input (``add_state``).
        context: what it has in common with the programs of other stages: passes so far, forms, numbers.

    Example:
        >>> program = graphopt.capture(model, (x,), loss=loss, optimizer=optimizer)
        >>> program.stage, program.memory().peak_bytes > 4 * x.numel()
        ('step', True)
        >>> program.tensors[0].name
        'blocks.0.0.weight'
    """

    graph: fx.Graph
    stage: Stage
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    attributes: dict[str, fx.GraphModule] = field(default_factory=dict)
    title: str = ""
    lower: Callable[[Program], Program] | None = None
    pass_state: dict[str, PassState] = field(default_factory=dict)
    context: Context = field(default_factory=Context)
    timelines: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of the program as it was when it was looked at last; ``graphopt.analysis.known_timelines`` says whether it is."""

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def history(self) -> tuple[str, ...]:
        """The passes applied so far, as text."""
        return self.context.history

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes, in the order they run."""
        return list(self.graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The inputs, in calling order; ``inputs`` says what each is."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def output_node(self) -> fx.Node:
        """The node that returns."""
        (node,) = self.graph.find_nodes(op="output")
        assert isinstance(node, fx.Node)
        return node

    @property
    def output_values(self) -> tuple[Any, ...]:
        """The returned values (nodes, numbers or None), aligned with ``outputs``."""
        return tuple(self.output_node.args[0])  # type: ignore[arg-type]

    def inputs_of(self, *roles: str) -> list[tuple[fx.Node, InputSpec]]:
        """The placeholders that play one of ``roles``; a role that there is not is an ``ArgumentError``."""
        check_roles("inputs_of", roles, INPUT_ROLES)
        return [(n, s) for n, s in zip(self.placeholders, self.inputs, strict=True) if s.role in roles]

    def outputs_of(self, *roles: str) -> list[tuple[Any, OutputSpec]]:
        """The output values that play one of ``roles``; a role that there is not is an ``ArgumentError``."""
        check_roles("outputs_of", roles, OUTPUT_ROLES)
        return [(v, s) for v, s in zip(self.output_values, self.outputs, strict=True) if s.role in roles]

    def phase_nodes(self, *phases: Phase) -> Iterator[fx.Node]:
        """The calls of the given phases, in order."""
        check_phases(phases)
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output") and info(node).phase in phases:
                yield node

    def names(self) -> dict[str, fx.Node]:
        """Every name of every tensor, to its node. A node can have several names; a name belongs to one node."""
        return {name: node for node in self.graph.nodes if node.op != "output" for name in info(node).names}

    def find(self, *patterns: str) -> dict[str, fx.Node]:
        """The nodes that names or globs stand for.

        Raises:
            GraphoptError: for a pattern that matches nothing, with the nearest names. In one part of a model a warning
                says so: what is named may be in another one.
        """
        if self.context.part:
            return names_in_part(patterns, self.names(), self.title)
        return match_names(patterns, self.names())

    @property
    def tensors(self) -> list[TensorInfo]:
        """Every named tensor with shape, dtype, bytes, phase, module and source line, in program order."""
        with _torch.sizes_taken_as(self.context.sizes.planned):
            return described_tensors(self.graph, self.inputs)

    def memory(self, *, measure: bool = True, sizes: Mapping[str, int] | None = None) -> MemoryTimeline:
        """The byte-exact timeline of this program as it runs; see ``graphopt.analysis.liveness``.

        Args:
            measure: run each distinct op once on zeros to learn what it allocates for itself; False runs nothing.
            sizes: values of the symbols in sizes that vary, by their names as ``to_text`` shows them; by default those
                that the program is planned for, else those of the example inputs.

        Example:
            >>> rows = torch.export.Dim("rows", min=2, max=64)
            >>> program = graphopt.capture(model, (x,), loss=loss, dynamic_shapes=({0: rows},))
            >>> (symbol,) = program.symbols
            >>> program.memory(sizes={symbol: 64}).peak_bytes > program.memory(sizes={symbol: 2}).peak_bytes
            True
        """
        return cast(MemoryTimeline, provided(Program, "memory")(self, measure=measure, sizes=sizes))

    def reserved(
        self, device: Any = None, *, measure: bool = True, sizes: Mapping[str, int] | None = None
    ) -> ReservedMemory:
        """What a device's allocator reserves for this program; see ``graphopt.analysis.program_replay``.

        Args:
            device: the name of a device or its ``DeviceProfile``; by default the one that the program was captured
                for, else the type of device that it is on.
            measure: as for ``memory``.
            sizes: as for ``memory``.

        Raises:
            ArgumentError: for a device that is not known, with the near names.

        Example:
            >>> program = graphopt.capture(model, (x,), loss=loss)
            >>> reserved = program.reserved("h100-80gb")
            >>> reserved.reserved_peak_bytes % 2**21, reserved.fits
            (0, True)
        """
        return cast(ReservedMemory, provided(Program, "reserved")(self, device, measure=measure, sizes=sizes))

    @property
    def symbols(self) -> dict[str, int]:
        """The symbols that sizes of inputs are written with, and the values that bytes are counted for."""
        found: dict[str, int] = {}
        with _torch.sizes_taken_as(self.context.sizes.planned):
            for node in self.placeholders:
                for tensor in tensors_of(value_of(node)):
                    found |= {str(size): _torch.size_hint(size) for size in tensor.shape if str(size).isidentifier()}
        return found

    def checkpoint_candidates(self) -> list[Candidate]:
        """The forward tensors that separate the network in two, with the bytes that checkpointing there saves."""
        return list(provided(Program, "checkpoint_candidates")(self))

    # --- rewriting ---------------------------------------------------------------------------------------------------

    @property
    def fake_mode(self) -> _torch.FakeTensorMode:
        """The mode that this program's example values live in."""
        for node in self.graph.nodes:
            for tensor in tensors_of(value_of(node)):
                if isinstance(tensor, _torch.FakeTensor):
                    return tensor.fake_mode
        return _torch.FakeTensorMode(allow_non_fake_inputs=True)

    def insert(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        before: fx.Node | None = None,
        after: fx.Node | None = None,
        phase: Phase,
        origin: str,
        like: fx.Node | None = None,
        names: tuple[str, ...] = (),
        hint: str | None = None,
    ) -> fx.Node:
        """Add a call; the one way in which passes add nodes.

        The value (shape, dtype, device) is computed from the arguments' values, so nothing about it can be stale.

        Args:
            target: an op overload, ``operator.getitem``, or a higher-order op.
            args: positional arguments; nodes of this graph stand for their values.
            kwargs: keyword arguments.
            before: put the call before this node; exactly one of ``before`` and ``after`` is given.
            after: put the call after this node.
            phase: when it runs.
            origin: who made it and why, for people: ``"recompute: blocks.0"``.
            like: a node whose module path and source line the new one carries.
            names: names under which users can find the result.
            hint: the wished name of the node itself.

        Raises:
            ArgumentError: for what is no op.
            GraphoptError: where the op refuses these arguments.
        """
        check_target(target)
        if (before is None) == (after is None):
            raise GraphoptError("Program.insert needs exactly one of before= and after=")
        place = self.graph.inserting_before(before) if before is not None else self.graph.inserting_after(after)
        with place:
            node = self.graph.create_node("call_function", target, tuple(args), kwargs or {}, name=hint)
        try:
            set_value(node, self.propagate(node))
        except Exception as error:
            self.graph.erase_node(node)
            raise GraphoptError(
                f"{origin}: {target} refuses the arguments {args}, {kwargs or {}}: {quoted(error)}"
            ) from error
        set_info(node, info_like(like, phase, origin, names))
        if like is not None and "stack_trace" in like.meta:
            node.meta["stack_trace"] = like.meta["stack_trace"]
        return node

    def propagate(self, node: fx.Node) -> Any:
        """The value of a call, computed from its arguments' values without data."""
        args, kwargs = _torch.map_aggregate(
            (node.args, node.kwargs), lambda a: value_of(a) if isinstance(a, fx.Node) else a
        )
        mode = self.fake_mode
        with mode, torch.no_grad():
            value = _torch.in_kernels_layout(node.target, args, kwargs, node.target(*args, **kwargs))  # type: ignore[operator]
        return _torch.pytree.tree_map(lambda v: mode.from_tensor(v, static_shapes=True) if _is_real(v) else v, value)

    def set_outputs(self, values: Iterable[Any], specs: Iterable[OutputSpec]) -> None:
        """Replace what the program returns."""
        given, described = check_outputs(values, specs)
        if len(given) != len(described):
            raise GraphoptError(f"{len(given)} output values and {len(described)} descriptions of them")
        self.outputs = described
        self.output_node.args = (tuple(given),)

    def add_input(self, name: str, value: Any, spec: InputSpec) -> fx.Node:
        """Append a placeholder whose values look like ``value`` (a fake tensor of the program's mode)."""
        check_spec(spec)
        last = self.placeholders[-1] if self.inputs else None
        place = self.graph.inserting_after(last) if last else self.graph.inserting_before(next(iter(self.graph.nodes)))
        with place:
            node = self.graph.placeholder(name)
        set_value(node, value)
        set_info(node, NodeInfo(Phase.FORWARD, names=(spec.target,), origin=spec.role))
        self.inputs.append(spec)
        return node

    def add_state(self, target: str, state: PassState) -> fx.Node:
        """The input for a tensor that lives across runs, which ops may change in place; added where it is new.

        Args:
            target: what it is called, ``owner/what``; the same tensor in every program of one step or model.
            state: its shape, dtype, device, and how it starts.

        Raises:
            GraphoptError: where the program keeps another tensor under this name.
        """
        known = self.pass_state.get(target)
        if known is None:
            self.pass_state[target] = state
            with self.fake_mode:
                value = torch.empty(state.shape, dtype=state.dtype, device=state.device)
            return self.add_input(identifier(target), value, InputSpec("pass_state", target))
        if known != state:
            raise GraphoptError(f"{target!r} is kept as {known}, and cannot be {state} as well: choose another name")
        return next(node for node, spec in self.inputs_of("pass_state") if spec.target == target)

    def erase_dead(self) -> int:
        """Remove calls whose results nothing uses and that have no effect; returns how many."""
        erased = 0
        for node in reversed(self.graph.nodes):
            if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node, self.attributes):
                self.graph.erase_node(node)
                erased += 1
        return erased

    def hand_over_name(self, name: str, old: fx.Node, new: fx.Node) -> None:
        """Let a name that a node has stand for another one, which takes its place."""
        if name in info(old).names:
            set_info(old, replace(info(old), names=tuple(known for known in info(old).names if known != name)))
            set_info(new, replace(info(new), names=(*info(new).names, name)))

    def set_policy(self, nodes: Iterable[fx.Node], policy: Policy) -> None:
        """Record a decision about forward values."""
        check_policy(nodes, policy)
        for node in nodes:
            set_info(node, replace(info(node), policy=policy))

    def copy(self) -> Program:
        """An independent copy that shares no nodes with this one (example values are shared, they never change)."""
        return replace(
            self,
            graph=copy_graph(self.graph),
            inputs=list(self.inputs),
            outputs=list(self.outputs),
            constants=dict(self.constants),
            attributes=dict(self.attributes),
            pass_state=dict(self.pass_state),
        )

    def take_over(self, other: Program) -> None:
        """Get what a copy of this program that was rewritten consists of, with what is known of its bytes."""
        self.graph, self.timelines = other.graph, dict(other.timelines)
        self.inputs, self.outputs = list(other.inputs), list(other.outputs)
        self.constants, self.attributes = dict(other.constants), dict(other.attributes)
        self.pass_state = dict(other.pass_state)

    def to_graph_module(self) -> fx.GraphModule:
        """A GraphModule with the boxed calling convention: ``module.forward(list_of_inputs)`` empties the list.

        Calls are taken in place where an operand dies in them, as the memory model assumes (``ir/lowering.py``).
        """
        return cast(fx.GraphModule, provided(Program, "to_graph_module")(self))

    # --- showing -----------------------------------------------------------------------------------------------------

    def to(self, name: str, **options: Any) -> Any:
        """The program in the format of a name; the methods below are short for the formats that graphopt has.

        Args:
            name: a format of ``graphopt.available_formats()``.
            options: what the format knows.

        Returns:
            text, or data for JSON.

        Raises:
            GraphoptError: for an unknown name, with the nearest ones.
        """
        with _torch.sizes_taken_as(self.context.sizes.planned):
            return find_format(name).write(self, **options)

    def to_text(self) -> str:
        """The program for people: types, phases, modules, provenance and explicit ends of life."""
        return str(self.to("text"))

    def to_python(self) -> str:
        """The program as Python source that runs: ``step(args)`` over torch.ops; it empties the list it is given."""
        return str(self.to("python"))

    def to_json(self) -> dict[str, Any]:
        """A versioned, pickle-free description that ``Program.from_json`` turns back into a program."""
        return dict(self.to("json"))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        """The program that ``to_json`` described; it can be read, rewritten and run, but not lowered further."""
        return cast(Program, provided(Program, "from_json")(data))

    def to_dot(self) -> str:
        """The graph in Graphviz' language, grouped by phase and module."""
        return str(self.to("dot"))

    def to_svg(self, *, fold: bool = True) -> str:
        """The U-shaped picture: forward down the left, backward up the right, one row per module.

        Args:
            fold: draw identical repeated blocks once, and modules rather than ops.
        """
        return str(self.to("svg", fold=fold))

    def to_html(self) -> str:
        """The program as one interactive page that needs no network: memory, the U-shaped picture, activations.

        ``graphopt.report.page.page_of_snapshots`` makes a page of everything that passes did to a program.
        """
        return str(self.to("html"))

    def to_perfetto(self, *, cost: str = "roofline", link: str = "10Gbit") -> dict[str, Any]:
        """One run as predicted, as a trace that ui.perfetto.dev opens (write it as JSON).

        Args:
            cost: where seconds come from: ``roofline``, ``measured``, or the name of a device.
            link: what joins ranks that exchange something, ``10Gbit`` or ``25GB/s`` in each direction.
        """
        return dict(self.to("perfetto", cost=cost, link=link))

    def to_model_explorer(self) -> dict[str, Any]:
        """The graph as a collection that Model Explorer opens (write it as JSON)."""
        return dict(self.to("model-explorer"))

    def diff(self, other: Program) -> str:
        """What differs between this program and a later one, node by node, as a unified diff."""
        check_type("diff's other", other, Program, "another graphopt.Program, the later one")
        return str(provided(Program, "diff")(self, other))

    def show(self) -> Any:
        """Open ``to_html`` in the browser, or give what a notebook shows as the interactive page.

        Returns:
            the file, which is in the folder of temporary files; in a notebook the frame.
        """
        return provided(Program, "show")(self)

    def _repr_html_(self) -> str:
        return str(provided(Program, "notebook")(self))

    def __repr__(self) -> str:
        name = f" of {self.title}" if self.title else ""
        nodes, inputs = counted(len(self.graph.nodes), "nodes"), counted(len(self.inputs), "inputs")
        return f"<Program{name}: {self.stage} stage, {nodes}, {inputs}>"
