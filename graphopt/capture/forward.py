"""nn.Module (+ loss) → forward program, by torch.export."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.assigned_buffers import buffers_of, refuse_empty, write_assigned
from graphopt.capture.call_checks import shapes_by_argument
from graphopt.capture.changed_state import arguments_noted, attributes_kept
from graphopt.capture.export_warnings import pass_on
from graphopt.capture.fingerprint import refuse_lazy
from graphopt.capture.flatten import Structure, flatten
from graphopt.capture.graph_part import title_of
from graphopt.capture.hidden_effects import drawing_refused, seeding_refused
from graphopt.capture.loss_results import copy_others, loss_in
from graphopt.capture.mask_questions import Question, Questions
from graphopt.capture.nest_regions import nest_regions
from graphopt.capture.regions import REGION_KEY, observe
from graphopt.capture.returnable import returnable
from graphopt.capture.same_inputs import read_in_one_place
from graphopt.capture.source_lines import source_line
from graphopt.capture.tensors_met import Outside, TensorsMet, tensors_of
from graphopt.capture.untraceable import depends_on_data, explain
from graphopt.capture.value_checks import kept_as_checks
from graphopt.capture.varying_axes import VaryingAxes, marks_undone
from graphopt.errors import CaptureError, TorchVersionError, as_cause
from graphopt.ir.autocast import plain_precision
from graphopt.ir.memory_shortage import is_memory_shortage, refuse_shortage
from graphopt.ir.names import NAMES_KEY, identifier
from graphopt.ir.node import InputSpec, NodeInfo, OutputSpec, Phase, set_info, set_value, unique_names, value_of
from graphopt.ir.ops.schema import op_name
from graphopt.ir.program import Program

__all__ = ["ForwardCapture", "capture_forward"]

logger = logging.getLogger(__name__)

_EXPORT_KINDS = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input"}


@dataclass
class ForwardCapture:
    """A forward program with the structures around it: how to flatten a call and how to rebuild its result.

    Attributes:
        questions: what the model has asked of the values of the call's tensors, with the answers it is for.
        changed: the arguments that the user's code changes, for people.
        left_out: the places in the result where None stands for a cache, likewise.
        outside: tensors that require gradients and are neither the model's nor arguments, of which it has the values.
    """

    program: Program
    inputs: Structure
    outputs: Structure
    example_tensors: list[torch.Tensor]
    questions: Mapping[Question, bool] = field(default_factory=dict)
    changed: Sequence[str] = ()
    left_out: Sequence[str] = ()
    outside: Sequence[Outside] = ()


Path = Literal["compiled", "exported", "eager"]
"""What a model that asks is told: that it is compiled and not exported, that it is exported, or neither."""


class _UserCodeError(Exception):
    """An error of the user's code on its way through torch, which would print the graph so far to standard error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error

    @property
    def partial_fx_graph(self) -> Any:
        raise AttributeError

    @partial_fx_graph.setter
    def partial_fx_graph(self, _graph: Any) -> None:
        pass


@dataclass
class _Seen:
    """What was noted of a call under trace: see ``ForwardCapture``; of a loss function, which result is the loss."""

    outputs: Structure
    changed: list[str]
    left_out: list[str]
    outside: list[Outside]
    loss: int | None


@dataclass
class _Traced:
    """What is traced, as ``capture_forward`` is given it, and what was noted of it.

    Attributes:
        inputs: the structure of the call.
        seen: a list, since export undoes assignments to a module's attributes.
    """

    call: Callable[..., Any]
    inputs: Structure
    questions: Questions
    names: Sequence[str]
    scalar_loss: bool
    seen: list[_Seen] = field(default_factory=list)


class _Root(nn.Module):
    """Calls the user's model (or loss) on flat tensors and returns flat tensors, noting the result's structure."""

    def __init__(self, model: nn.Module, traced: _Traced, path: Path) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._run = (traced, path, tensors_of(model))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        traced, path, real = self._run
        args, kwargs = traced.inputs.restore(tensors)
        buffers = buffers_of(self.model)
        met = TensorsMet(real, tensors_of(self.model))
        with contextlib.ExitStack() as stack:
            stack.enter_context(kept_as_checks())
            if path != "exported":
                stack.enter_context(_torch.as_in_eager(compiling=path == "compiled"))
            stack.enter_context(traced.questions.answered(tensors))
            stack.enter_context(_torch.set_aside_in_bodies(met))
            try:
                with (
                    drawing_refused(),
                    met,
                    _torch.set_aside_in_bodies(met),
                    arguments_noted(traced.names, args, kwargs) as changed,
                ):
                    result = call_under_trace(traced.call, self.model, args, kwargs)
                flatten(result)  # which makes dataclasses known
                result, left_out = returnable(result)
                loss = loss_in(result) if traced.scalar_loss else None
                if loss is not None:
                    result = copy_others(result)
                flat, structure = flatten(result)
            except Exception as error:
                raise _UserCodeError(error) from error
        write_assigned(buffers)
        place = next((place for place, tensor in enumerate(flat) if tensor is loss), None)
        traced.seen.append(_Seen(structure, changed, left_out, list(met.outside.values()), place))
        return tuple(flat)


def call_under_trace(call: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the user's code; what stands above in a traceback is not the user's (``value_checks.STOP``)."""
    return call(model, *args, **kwargs)


def capture_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    call: Callable[..., Any],
    dynamic_shapes: Any = None,
    names: Sequence[str] = (),
    scalar_loss: bool = False,
    by_values: bool = False,
) -> ForwardCapture:
    """Trace ``call(model, *args, **kwargs)`` into a forward program.

    Args:
        model: whose parameters the program refers to.
        args: positional example inputs.
        kwargs: keyword example inputs.
        call: what is traced.
        dynamic_shapes: sizes that may vary, by position or by the names of the arguments.
        names: of the positional arguments, as far as they have names.
        scalar_loss: whether the result has to be a loss, alone or with more (``loss_in``).
        by_values: whether the model is answered what it asks of the values of masks among the inputs.

    Raises:
        CaptureError: where the model's Python cannot be traced, naming the line of user code and what to do.
    """
    for module in model.modules():
        refuse_lazy(module)
    given, inputs = flatten((tuple(args), dict(kwargs)))
    tensors = _distinct(given)
    traced = _Traced(call, inputs, Questions(tensors if by_values else ()), names, scalar_loss)
    shapes = _flat_shapes(dynamic_shapes, inputs, names)

    def export(path: Path) -> Any:
        root = _Root(model, traced, path)
        writes = _torch.RealWrites()
        with (
            observe(model),
            attributes_kept(model),
            plain_precision(),
            torch.enable_grad(),
            _torch.without_regions(),
            warnings.catch_warnings(record=True) as caught,
            _torch.refusals_expected(),
            marks_undone(tensors),
            writes,
        ):
            warnings.simplefilter("always")
            try:
                exported = torch.export.export(root, tuple(tensors), strict=False, dynamic_shapes=shapes)
            except _UserCodeError as failed:
                raise failed.error from None
            finally:
                writes.undo()
        pass_on(caught, model)
        return exported

    try:
        with seeding_refused():
            exported = _as_eager_first(export, title_of(model))
    except (CaptureError, TorchVersionError):
        raise
    except Exception as error:
        refuse_shortage(error, title_of(model))
        explained = explain(error, model)
        raise explained from None if depends_on_data(error) else as_cause(error)
    noted = traced.seen[-1]
    program = _to_program(exported, noted.outputs, inputs)
    if scalar_loss:
        program.outputs = _name_loss(program, noted.loss)
    program.title = title_of(model)
    refuse_empty(program)
    read_in_one_place(program, given)
    return ForwardCapture(
        program,
        inputs,
        noted.outputs,
        tensors,
        traced.questions.answers,
        noted.changed,
        noted.left_out,
        noted.outside,
    )


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, each a leaf of its own: another call may pass different ones in two places."""
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        fresh = id(tensor) in seen or not tensor.is_leaf
        found.append(tensor.detach().requires_grad_(tensor.requires_grad) if fresh else tensor)
        seen.add(id(tensor))
    return found


def _as_eager_first(export: Callable[[Path], Any], name: str) -> Any:
    """Trace what the model does where it is not exported; where that cannot be traced, what else it may do."""
    try:
        return export("compiled")
    except (CaptureError, TorchVersionError):
        raise
    except Exception as error:
        if depends_on_data(error) or is_memory_shortage(error):
            raise
        for path in _OTHER_PATHS:
            with contextlib.suppress(Exception):
                exported = export(path)
                logger.debug("%s is captured on the path %s: %s", name, _OTHER_PATHS[path], error)
                return exported
        raise


_OTHER_PATHS: dict[Path, str] = {
    "exported": "it takes under torch.compiler.is_exporting()",
    "eager": "it takes where torch.compiler.is_compiling() is false",
}


def _flat_shapes(dynamic_shapes: Any, inputs: Structure, names: Sequence[str]) -> Any:
    """The user's ``dynamic_shapes``, written for the call's arguments, as torch.export wants it for flat tensors."""
    if dynamic_shapes is None:
        return None
    if isinstance(dynamic_shapes, VaryingAxes):
        return dynamic_shapes.for_export()
    args, kwargs = inputs.restore(range(sum(inputs.is_tensor)))
    pairs = shapes_by_argument(dynamic_shapes, args, kwargs, names)
    flat: dict[int, Any] = {}
    for value, shape in pairs:
        flat |= _shapes_by_place(value, shape)
    return (tuple(flat.get(place) for place in range(sum(inputs.is_tensor))),)


def _shapes_by_place(value: Any, shape: Any) -> dict[int, Any]:
    """The shape given for each tensor of a nested argument; tensors stand as their numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {value: shape}
    if isinstance(value, Mapping):
        parts = [(item, shape.get(key) if isinstance(shape, Mapping) else None) for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        known = isinstance(shape, (tuple, list))
        parts = [(item, shape[index] if known else None) for index, item in enumerate(value)]
    else:
        return {}
    found: dict[int, Any] = {}
    for item, inner in parts:
        found |= _shapes_by_place(item, inner)
    return found


def _to_program(exported: Any, returned: Structure, inputs: Structure) -> Program:
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, fx.GraphModule] = {}
    constants: dict[str, torch.Tensor] = {}
    specs: list[InputSpec] = []
    dead: set[fx.Node] = set()
    input_paths = iter(_input_names(inputs))
    signature = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    namer = _OpNames()
    module = nest_regions(exported.graph_module)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            new, spec = _placeholder(graph, node, signature[node.name], exported, constants, input_paths)
            specs.append(spec)
            mapping[node] = new
        elif node.op == "output":
            continue
        elif node.target is torch.ops.aten._assert_tensor_metadata.default:
            dead.add(node)
        elif _is_whole_slice(node):
            mapping[node] = mapping[node.args[0]]
        else:
            if node.op == "get_attr" and isinstance(node.target, str):
                attributes[node.target] = getattr(module, node.target)
                _describe_body(attributes[node.target], namer)
            mapping[node] = new = graph.node_copy(node, lambda n: mapping[n])
            set_info(new, _node_info(node, namer))
    result = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    values = [mapping[v] if isinstance(v, fx.Node) else v for v in result.args[0]]
    graph.output(tuple(values))
    unique_names(graph)
    outputs = [OutputSpec("output", path or "result") for path in returned.paths]
    return Program(graph, "forward", specs, outputs, constants, attributes)


def _is_whole_slice(node: fx.Node) -> bool:
    """Whether a slice takes all of an axis whose size is open: where sizes are numbers, Python makes none of it."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return False
    tensor, given, rest = node.args[0], list(node.args[1:]), [0, None, None, 1]
    dim, start, end, step = given + rest[len(given) :]
    varies = isinstance(value_of(tensor).shape[dim], torch.SymInt)  # type: ignore[arg-type]
    return bool(varies and start in (0, None) and end in (None, sys.maxsize) and step == 1)


def _name_loss(program: Program, place: int | None) -> list[OutputSpec]:
    """The outputs of a loss function, with the loss as such.

    Raises:
        CaptureError: where there is none, or it is not one number.
    """
    value = None if place is None else program.output_values[place]
    shape = tuple(value_of(value).shape) if isinstance(value, fx.Node) else None
    if place is None or shape is None or any(size != 1 for size in shape):
        found = f"a tensor of shape {shape}" if shape is not None else f"{len(program.outputs)} tensors without one"
        raise CaptureError(
            f"the loss must be one scalar tensor, and this one returns {found}: reduce it (.mean(), .sum()), or pass "
            "loss=lambda model, *batch: ... that returns a scalar: alone, first in a tuple, or as 'loss' in a dict"
        )
    return [*program.outputs[:place], OutputSpec("loss", "loss"), *program.outputs[place + 1 :]]


def _placeholder(
    graph: fx.Graph, node: fx.Node, spec: Any, exported: Any, constants: dict[str, torch.Tensor], paths: Any
) -> tuple[fx.Node, InputSpec]:
    role = _EXPORT_KINDS.get(spec.kind.name)
    if role is None and isinstance(exported.constants.get(spec.target), torch.Generator):
        raise CaptureError(
            "forward draws from a torch.Generator of its own, whose state a program does not move\n"
            "  what to do: draw from torch's own generator there, inside of a stream of graphopt.RandomStreams where "
            "its numbers are to be apart from others"
        )
    if role is None:
        raise CaptureError(
            f"the model holds {spec.target or spec.arg.name!r}, a {spec.kind.name}, which is not a tensor"
        )
    target = next(paths) if role == "input" else spec.target.removeprefix("model.")
    new = graph.placeholder(identifier(target))
    set_value(new, value_of(node))
    if role == "constant":
        constants[new.name] = exported.constants[spec.target]
    extra = node.meta.get(NAMES_KEY, ())
    set_info(new, NodeInfo(Phase.FORWARD, names=(target, *extra), origin=role))
    return new, InputSpec(role, target)


def _input_names(inputs: Structure) -> list[str]:
    """What to call each input: ``args[1]`` for the second positional argument, ``mask`` for the keyword."""
    names = []
    for path in inputs.paths:
        rest = path[3:]
        if path.startswith("[1]"):
            names.append(re.sub(r"^\['([^']*)'\]", r"\1", rest))
        else:
            names.append("args" + rest)
    return names


def _describe_body(body: fx.GraphModule, namer: _OpNames) -> None:
    """Describe the nodes of a sub-graph (an autocast or no-grad region) and of those inside it."""
    for node in body.graph.nodes:
        set_info(node, _node_info(node, namer))
    for child in body.children():
        if isinstance(child, fx.GraphModule):
            _describe_body(child, namer)


class _OpNames:
    """Gives ``path::op``, ``path::op_1`` … to the ops of each module, in program order."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def next(self, path: str, op: str) -> str:
        base = f"{path}::{op}"
        number = self._seen[base]
        self._seen[base] += 1
        return base if number == 0 else f"{base}_{number}"


def _node_info(node: fx.Node, namer: _OpNames) -> NodeInfo:
    stack = [entry for entry in node.meta.get("nn_module_stack", {}).values() if not entry[0].startswith("_empty_")]
    module = re.sub(r"@\d+", "", stack[-1][0]) if stack else ""
    module = module.removeprefix("model.") if module != "model" else ""
    tensor = isinstance(value_of(node), torch.Tensor)
    names = (*reversed(node.meta.get(NAMES_KEY, ())), namer.next(module, op_name(node))) if tensor else ()
    return NodeInfo(
        Phase.FORWARD, module, names, source_line(node.meta.get("stack_trace")), region=node.meta.get(REGION_KEY)
    )
