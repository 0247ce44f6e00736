"""A call of a model, or of a loss function, exported by torch, with what is noted of it on the way.

What is warned of during an export: the user's own warnings are shown, and tensors kept in attributes are refused.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import buffers_of, write_assigned
from graphopt.capture.call.call_checks import shapes_by_argument
from graphopt.capture.call.flatten import Structure, copy_others, flatten, loss_in
from graphopt.capture.call.tensor_parallel_form import DistributedCall
from graphopt.capture.call.varying_axes import VaryingAxes, marks_undone
from graphopt.capture.dynamo.graph_part import title_of
from graphopt.capture.effects.returned_tensors import returnable
from graphopt.capture.effects.side_effects import drawing_refused, seeding_refused
from graphopt.capture.effects.state_changes import arguments_noted, attributes_kept
from graphopt.capture.effects.tensor_effects import NumbersRead, Outside, TensorsMet, attributes_set, tensors_of
from graphopt.capture.forward.regions import observe
from graphopt.capture.forward.transformers_masks import Questions
from graphopt.capture.forward.untraceable import depends_on_data, explain
from graphopt.capture.forward.value_checks import kept_as_checks
from graphopt.capture.guards.fingerprint import refuse_lazy
from graphopt.errors import CaptureError, GraphBreakError, TorchVersionError, as_cause
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.host import is_memory_shortage, refuse_shortage

__all__ = ["ExportedCall", "TracedCall", "export_call", "pass_on"]

logger = logging.getLogger(__name__)

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
class Seen:
    """What was noted of a call under trace.

    Attributes:
        outputs: the structure of what it returned.
        changed: what it changed in Python.
        left_out: the places in the result where None stands for a cache.
        outside: tensors that require gradients and are neither the model's nor arguments.
        numbers: tensors whose numbers became Python's.
        loss: the place of the loss among the results of a loss function.
    """

    outputs: Structure
    changed: list[str]
    left_out: list[str]
    outside: list[Outside]
    numbers: list[NumbersRead]
    loss: int | None


@dataclass(frozen=True)
class TracedCall:
    """What is traced: a function of a model and a batch, and what is known of it.

    Attributes:
        function: called as ``function(model, *args, **kwargs)``.
        names: of the positional arguments, as far as they have names.
        dynamic_shapes: sizes that may vary, by position or by the names of the arguments.
        scalar_loss: whether the result has to be a loss, alone or with more (``loss_in``).
        by_values: whether the model is answered what it asks of the values of masks among the inputs.
    """

    function: Callable[..., Any]
    names: Sequence[str] = ()
    dynamic_shapes: Any = None
    scalar_loss: bool = False
    by_values: bool = False


@dataclass
class _Trace:
    """A call while it is traced, and what is noted of it.

    Attributes:
        inputs: the structure of the call.
        given: the tensors of the call, in that order.
        tensors: the same, each a leaf of its own.
        shapes: sizes that may vary, as export takes them.
        seen: a list, since export undoes assignments to a module's attributes.
    """

    call: TracedCall
    inputs: Structure
    given: list[torch.Tensor]
    tensors: list[torch.Tensor]
    shapes: Any
    questions: Questions
    seen: list[Seen] = field(default_factory=list)


class _Root(nn.Module):
    """Calls the user's model (or loss) on flat tensors and returns flat tensors, noting the result's structure."""

    def __init__(self, model: nn.Module, traced: _Trace, path: Path) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self._run = (traced, path, tensors_of(model))

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        traced, path, real = self._run
        for given, tensor in zip(traced.given, tensors, strict=True):
            for name, value in attributes_set(given).items():
                setattr(tensor, name, value)
        args, kwargs = traced.inputs.restore(tensors)
        buffers = buffers_of(self.model)
        whole = getattr(traced.call.function, "__self__", None)
        if isinstance(whole, DistributedCall):  # what it runs is recomputed where the program is differentiated
            whole.surroundings = functools.partial(_seen_again, traced.questions, path)
        met = TensorsMet(real, tensors_of(self.model))
        with _users_surroundings(traced, path, tensors, met):
            try:
                with _effects_noted(traced, met, args, kwargs) as changed:
                    result = call_under_trace(traced.call.function, self.model, args, kwargs)
                flat, structure, left_out, loss = _returned(result, scalar_loss=traced.call.scalar_loss)
            except Exception as error:
                raise _UserCodeError(error) from error
        write_assigned(buffers)
        traced.seen.append(
            Seen(structure, changed, left_out, list(met.outside.values()), list(met.numbers.values()), loss)
        )
        return tuple(flat)


@contextlib.contextmanager
def _users_surroundings(traced: _Trace, path: Path, tensors: Sequence[torch.Tensor], met: TensorsMet) -> Iterator[None]:
    """What the user's code sees of torch while it is traced, and what becomes of its questions.

    ``assert`` on a tensor's values stays as a check, ``is_compiling()`` answers by the path, what the model asks of
    values is answered by the example's. Where Dynamo traces the body of a ``cond`` or its like, the mode that notes
    tensors is set aside, since Dynamo knows torch's modes only.
    """
    eager = contextlib.nullcontext() if path == "exported" else _torch.as_in_eager(compiling=path == "compiled")
    with kept_as_checks(), eager, traced.questions.answered(tensors), _torch.set_aside_in_bodies(met):
        yield


@contextlib.contextmanager
def _effects_noted(traced: _Trace, met: TensorsMet, args: Any, kwargs: Any) -> Iterator[Any]:
    """Note what the user's code does beside computing: tensors from outside, arguments that it changes."""
    noted = arguments_noted(traced.call.names, args, kwargs)
    with drawing_refused(), met, _torch.set_aside_in_bodies(met), noted as changed:
        yield changed


def _returned(result: Any, *, scalar_loss: bool) -> tuple[list[torch.Tensor], Structure, list[str], int | None]:
    """The tensors of a result, their structure, the places of caches, which are left out, and the place of the loss."""
    flatten(result)  # which makes dataclasses known
    result, left_out = returnable(result)
    loss = loss_in(result) if scalar_loss else None
    if loss is not None:
        result = copy_others(result)
    flat, structure = flatten(result)
    return flat, structure, left_out, next((place for place, tensor in enumerate(flat) if tensor is loss), None)


@contextlib.contextmanager
def _seen_again(questions: Questions, path: Path, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let the user's code see what it has seen under export, in a trace of another kind."""
    with (
        _torch.as_seen_by_a_trace(compiling=path != "eager", exporting=path == "exported"),
        questions.answered(tensors),
    ):
        yield


def call_under_trace(call: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the user's code; what stands above in a traceback is not the user's (``value_checks.STOP``)."""
    return call(model, *args, **kwargs)


@dataclass(frozen=True)
class ExportedCall:
    """What torch exported of a call, and what was noted of it.

    Attributes:
        exported: torch's ``ExportedProgram``, whose model is named ``model``.
        inputs: the structure of the call.
        given: its tensors.
        tensors: the same, each a leaf of its own, as they were traced.
        questions: what the model asked of their values, with the answers.
        seen: of the call under trace.
    """

    exported: Any
    inputs: Structure
    given: list[torch.Tensor]
    tensors: list[torch.Tensor]
    questions: Questions
    seen: Seen


def export_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: TracedCall) -> ExportedCall:
    """Trace a call of a model.

    Args:
        model: called as it is.
        args: positional example inputs.
        kwargs: keyword example inputs.
        call: what is traced.

    Raises:
        CaptureError: where the model's Python cannot be traced, naming the line of user code and what to do.
    """
    for module in model.modules():
        refuse_lazy(module)
    given, inputs = flatten((tuple(args), dict(kwargs)))
    tensors = _distinct(given)
    shapes = _flat_shapes(call.dynamic_shapes, inputs, call.names)
    traced = _Trace(call, inputs, given, tensors, shapes, Questions(tensors if call.by_values else ()))
    exported = _explained(model, traced)
    return ExportedCall(exported, inputs, given, tensors, traced.questions, traced.seen[-1])


def _explained(model: nn.Module, traced: _Trace) -> Any:
    """What torch exports of a call; what it cannot is explained."""
    try:
        with seeding_refused():
            return _as_eager_first(functools.partial(_export, model, traced), title_of(model))
    except (CaptureError, TorchVersionError):
        raise
    except Exception as error:
        refuse_shortage(error, title_of(model))
        explained = explain(error, model)
        raise explained from None if depends_on_data(error) else as_cause(error)


def _export(model: nn.Module, traced: _Trace, path: Path) -> Any:
    """Export a call with one answer to whether it is compiled, and pass on what that warns of."""
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
        _torch.hooks_of_users_modules(model if traced.call.by_values and not traced.call.scalar_loss else None),
        marks_undone(traced.tensors),
        writes,
    ):
        warnings.simplefilter("always")
        try:
            exported = torch.export.export(root, tuple(traced.tensors), strict=False, dynamic_shapes=traced.shapes)
        except _UserCodeError as failed:
            raise failed.error from None
        finally:
            writes.undo()
    pass_on(caught, model)
    return exported


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


_ASSIGNED = re.compile(r"The tensor attributes? (?P<names>.*?) (was|were) assigned during export")


def pass_on(caught: list[warnings.WarningMessage], model: nn.Module) -> None:
    """Show the user's own warnings; refuse tensors that forward keeps in attributes, which a program cannot do."""
    for warning in caught:
        match = _ASSIGNED.search(str(warning.message))
        if match is None:
            if not warning.filename.startswith(_torch.FOLDER):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            continue
        names = [name.strip() for name in match["names"].split(",")]
        kept = [name.removeprefix("self.model.") for name in names if "_flat_weights" not in name]
        if kept:
            raise GraphBreakError(
                f"forward keeps tensors in {', '.join(kept)}, and a program cannot set attributes: "
                + (_instead_of_hook(model, kept[0]) or "return them, or register them as buffers of a fixed shape")
            )


_INSTEAD = {
    "torch.nn.utils.weight_norm": "use torch.nn.utils.parametrizations.weight_norm, which sets none, in its place",
    "torch.nn.utils.spectral_norm": "use torch.nn.utils.parametrizations.spectral_norm, which sets none, in its place",
    "torch.nn.utils.prune": (
        "register the product with the mask by torch.nn.utils.parametrize, which sets none, or make the pruning "
        "permanent by torch.nn.utils.prune.remove"
    ),
}


def _instead_of_hook(model: nn.Module, name: str) -> str:
    """What to do about an attribute that a hook of torch's own sets; empty where none does."""
    path, _, attribute = name.rpartition(".")
    try:
        hooks = model.get_submodule(path)._forward_pre_hooks.values()
    except AttributeError:
        return ""
    sets = [hook for hook in hooks if attribute == getattr(hook, "_tensor_name", getattr(hook, "name", ""))]
    return next((_INSTEAD[type(hook).__module__] for hook in sets if type(hook).__module__ in _INSTEAD), "")
