"""The update of a step program: one call of a torch.optim object, traced from the optimizer itself."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphopt.capture.effects.checks import refuse_coupling, step_hooks
from graphopt.capture.step.opaque import OpaqueUpdate, measure_update, trace_opaque
from graphopt.capture.step.optimizer_tracer import FUSED, OptimizerTracer, UpdateTrace
from graphopt.capture.step.update_on_shards import NotOnShardsError
from graphopt.capture.step.update_settings import NO_SETTINGS, UpdateSettings, group_settings
from graphopt.errors import CaptureError, GraphoptError, quoted
from graphopt.ir.host import refuse_shortage
from graphopt.ir.words.written_units import counted
from graphopt.rewriting.shards import Shards, WholeParameter, check_dense, whole_parameter

__all__ = ["has_state", "settings", "settings_key", "trace_optimizer"]

logger = logging.getLogger(__name__)

_not_traced: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
_opaque: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, OpaqueUpdate]] = weakref.WeakKeyDictionary()
"""What was found of optimizers that run in eager mode, with the parameters that they held then."""

_told_as_it_is: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that run in eager mode, and that this was told of."""

_told_of_others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that do not hold all that gets a gradient, and that this was told of."""


def has_state(optimizer: torch.optim.Optimizer, model: nn.Module, target: str) -> bool:
    """Whether an optimizer has a piece of state (``state_target``) of a parameter of the model."""
    name, _, key = target.rpartition("/")
    return key in optimizer.state.get(model.get_parameter(name), {})


def settings(optimizer: torch.optim.Optimizer) -> UpdateSettings:
    """What a trace depends on: that there are no hooks, and all of the groups but learning rates.

    An optimizer that runs in eager mode reads its settings itself; which parameters it holds counts all the same.
    """
    if optimizer in _not_traced:
        return UpdateSettings(settings_key(optimizer), {})
    return group_settings(optimizer.param_groups, step_hooks(optimizer))


def settings_key(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Something that is equal as long as the settings are, found at less cost than they are."""
    if optimizer in _not_traced:
        return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
    return step_hooks(optimizer), *(
        (*map(id, group["params"]), *((k, v) for k, v in sorted(group.items()) if k not in NO_SETTINGS))
        for group in optimizer.param_groups
    )


def trace_optimizer(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, torch.Tensor],
    *,
    first: bool,
    mode: Any,
    shards: Shards | None = None,
) -> UpdateTrace:
    """Trace one ``optimizer.step()`` on fake copies of the parameters; the optimizer itself is not touched.

    Where it cannot be traced, since it reads values in Python, keeps numbers there or has hooks, the update is one call
    of the optimizer as it is.

    Args:
        optimizer: any ``torch.optim`` optimizer; implementation flags (``fused``, ``foreach``) that the user set are
            followed, and where none is set the fused implementation is taken for those that have one: eager mode's own
            choice, a loop, reads a value of each parameter's state, which no program can.
        trained: the parameters that get a gradient, by name, in gradient order.
        first: trace the call that creates the state, or (False) any later one.
        mode: the fake mode in which to build example values.
        shards: the part of each parameter that is updated; state is then for these elements only.

    Raises:
        CaptureError: where the optimizer owns nothing that is trained.
        GraphoptError: where it cannot be sharded.
    """
    names = {id(parameter): name for name, parameter in trained.items()}
    groups = [
        (index, [p for p in group["params"] if id(p) in names]) for index, group in enumerate(optimizer.param_groups)
    ]
    owned = {id(p) for _, members in groups for p in members}
    if not owned:
        raise CaptureError(
            "the optimizer holds none of the parameters that get a gradient: was it made before the model was replaced "
            "or moved? make it from model.parameters()"
        )
    order = [n for n, p in trained.items() if id(p) in owned]
    _tell_of_others(optimizer, [name for name, parameter in trained.items() if id(parameter) not in owned])
    for name in order if shards is not None else ():
        check_dense(name, trained[name])
    tracer = OptimizerTracer(optimizer, order, trained, names, mode, shards)
    reason = _not_traced.get(optimizer) or _takes_closure(optimizer) or step_hooks(optimizer)
    rows = {name: known for name in order if (known := whole_parameter(trained[name])) is not None}
    if rows:
        whole = OptimizerTracer(optimizer, order, trained, names, mode, wholes=rows)
        return _on_rows(optimizer, tracer, whole, rows, first, reason)
    if shards is not None:
        whole = OptimizerTracer(optimizer, order, trained, names, mode, kept=shards)
        return _for_shards(optimizer, tracer, whole, shards, first, reason)
    if not reason:
        try:
            found = tracer.run(first)
        except Exception as error:
            refuse_shortage(error, f"the update of {type(optimizer).__name__}")
            reason = _reason(error)
        else:
            tracer.tell_choice()
            return found
    _not_traced[optimizer] = reason
    return _as_it_is(optimizer, {name: trained[name] for name in order}, tracer.parameters, mode, first, reason)


_BY_ELEMENTS = "use an optimizer that works element by element (SGD, Adam, AdamW, Adagrad, RMSprop)"
_LEFT_OUT = "leave shard-optimizer out"


def _not_sharded(optimizer: torch.optim.Optimizer, why: str, advice: str) -> GraphoptError:
    """The error for an optimizer whose update cannot be that of shards of parameters."""
    return GraphoptError(f"{type(optimizer).__name__} cannot be sharded, {why}\n  what to do: {advice}")


def _traced(tracer: OptimizerTracer, first: bool) -> UpdateTrace | None:
    """An update, where it can be traced."""
    try:
        return tracer.run(first)
    except Exception:
        return None


def _for_shards(
    optimizer: torch.optim.Optimizer,
    tracer: OptimizerTracer,
    whole: OptimizerTracer,
    shards: Shards,
    first: bool,
    reason: str,
) -> UpdateTrace:
    """The update of shards: as torch's own optimizers make it of them, or else of whole parameters, made one of shards.

    An optimizer of the user's may look at shapes (``if parameter.ndim == 2``), which shards do not have.

    Args:
        optimizer: whose update it is.
        tracer: of shards.
        whole: of whole parameters.
        shards: this rank's part of each parameter.
        first: trace the call that creates the state.
        reason: why it runs in eager mode; empty where it does not.

    Raises:
        GraphoptError: where it cannot be sharded.
    """
    if reason:
        raise _not_sharded(optimizer, f"since its update runs in eager mode: {reason}", _LEFT_OUT)
    advice = f"{_BY_ELEMENTS}, or {_LEFT_OUT}"
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        update = _traced(whole, first)
        if update is not None:
            return _on_shards(optimizer, tracer, whole, update, shards, advice)
    try:
        found = tracer.run(first)
        refuse_coupling(optimizer, found.graph)
    except Exception as error:
        refuse_shortage(error, f"the update of {type(optimizer).__name__}")
        update = _traced(whole, first)
        if update is not None:
            return _on_shards(optimizer, tracer, whole, update, shards, advice)
        if isinstance(error, GraphoptError):
            raise
        why = f"since its update runs in eager mode: {_reason(error)}"
        raise _not_sharded(optimizer, why, f"{_traceable(optimizer)}{_LEFT_OUT}") from None
    tracer.tell_choice()
    return found


def _on_shards(
    optimizer: torch.optim.Optimizer,
    tracer: OptimizerTracer,
    whole: OptimizerTracer,
    update: UpdateTrace,
    shards: Shards,
    advice: str,
) -> UpdateTrace:
    """The update of whole parameters as one of shards, of which some is exchanged in between."""
    try:
        return tracer.run_again(update, whole.parameters, shards)
    except NotOnShardsError as error:
        why = f"since its update takes whole parameters, of each of which ranks have shards: {error}"
        raise _not_sharded(optimizer, why, advice) from None


def _on_rows(
    optimizer: torch.optim.Optimizer,
    tracer: OptimizerTracer,
    whole: OptimizerTracer,
    rows: Mapping[str, WholeParameter],
    first: bool,
    reason: str,
) -> UpdateTrace:
    """The update of parameters that are shards already, each of a number of rows (``fully_shard``)."""
    advice = f"keep your loop with graphopt.optimize, or {_BY_ELEMENTS}"
    try:
        update = None if reason else whole.run(first)
    except Exception as error:
        refuse_shortage(error, f"the update of {type(optimizer).__name__}")
        update, reason = None, _reason(error)
    if update is None:
        raise _not_sharded(optimizer, f"since its update runs in eager mode: {reason}", advice)
    shards = {name: (known.first, tracer.parameters[name].numel()) for name, known in rows.items()}
    return _on_shards(optimizer, tracer, whole, update, shards, advice)


def _traceable(optimizer: torch.optim.Optimizer) -> str:
    """What to give in the place of an optimizer whose update reads numbers in Python; more stands behind it."""
    if isinstance(optimizer, FUSED):
        return f"give {type(optimizer).__name__} fused=True in place of the implementation that it has; or "
    return "use AdamW, Adam or Adagrad with fused=True, or SGD, RMSprop or Adadelta; or "


def _tell_of_others(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Warn, once for an optimizer, of parameters to which eager mode would give gradients."""
    if names and optimizer not in _told_of_others:
        _told_of_others.add(optimizer)
        logger.warning(
            "the step computes no gradients for %s (%s first) that require them, where eager mode adds them up in "
            ".grad: the optimizer does not hold them; give them to the optimizer, or requires_grad_(False)",
            counted(len(names), "parameters"), names[0],
        )  # fmt: skip


def _takes_closure(optimizer: torch.optim.Optimizer) -> str:
    """That an optimizer evaluates the model by itself, in words; empty where it does not."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needed = closure is not None and closure.default is closure.empty
    return "it evaluates the model several times for one update" if needed else ""


def _reason(error: Exception) -> str:
    """Why an optimizer cannot be traced."""
    text = quoted(error).splitlines()[0]
    if "_local_scalar_dense" in text or "data-dependent" in text or "capturable" in text:
        return "it reads tensors' values in Python"
    if "FakeTensor" in text:
        return "it computes with tensors that are neither its state nor a learning rate"
    return text


def _as_it_is(
    optimizer: torch.optim.Optimizer,
    updated: dict[str, torch.Tensor],
    examples: Mapping[str, torch.Tensor],
    mode: Any,
    first: bool,
    reason: str,
) -> UpdateTrace:
    """The update as one call of the optimizer, for a reason that is told."""
    before, holds = _opaque.get(optimizer), settings_key(optimizer)
    if before is None or before[0] != holds:
        before = _opaque[optimizer] = holds, measure_update(optimizer, updated, reason, mode)
        if optimizer not in _told_as_it_is:
            _told_as_it_is.add(optimizer)
            logger.warning("%s runs in eager mode behind the program: %s", type(optimizer).__name__, before[1])
    known = before[1]
    with mode:
        loss = torch.empty(()) if _takes_closure(optimizer) else None
    graph, inputs = trace_opaque(optimizer, list(updated), examples, known, first=first, loss=loss)
    return UpdateTrace(graph, inputs, [], {})
