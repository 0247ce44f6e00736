"""The update of a step program: one call of a torch.optim object, traced from the optimizer itself."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.effects.checks import refuse_coupling, step_hooks
from graphopt.capture.step.opaque import OpaqueUpdate, measure_update, stand_in, trace_opaque
from graphopt.capture.step.update_on_shards import NotOnShardsError, holds_shard, parameter_of, run_on_shards
from graphopt.capture.step.update_settings import NO_SETTINGS, UpdateSettings, group_settings
from graphopt.errors import CaptureError, GraphoptError, quoted
from graphopt.ir.host import refuse_shortage
from graphopt.ir.node import InputSpec, value_of
from graphopt.ir.words.written_units import counted
from graphopt.rewriting.shards import Shards, WholeParameter, check_dense, holds_elements, whole_parameter

__all__ = ["NOTED", "UpdateTrace", "settings", "settings_key", "trace_optimizer"]

logger = logging.getLogger(__name__)

_not_traced: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()
_opaque: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, OpaqueUpdate]] = weakref.WeakKeyDictionary()
"""What was found of optimizers that run in eager mode, with the parameters that they held then."""

_told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose implementation was chosen here, and that this was told of."""

_told_as_it_is: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that run in eager mode, and that this was told of."""

_told_of_others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers that do not hold all that gets a gradient, and that this was told of."""

NOTED = (
    "state",
    "param_groups",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
    "_warned_capturable_if_run_uncaptured",
    "_need_device_dtype_check_for_fused",
    "_opt_called",
)
"""What a stand-in for an optimizer has otherwise: what is compared by itself, hooks, and what torch notes there."""

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


@dataclass
class UpdateTrace:
    """One call of ``optimizer.step()`` as a graph of in-place ops.

    Attributes:
        graph: placeholders for ``inputs``; returns the state tensors that the call created.
        inputs: what each placeholder is: parameter, gradient, state or hyperparameter.
        created: the state that the call creates, aligned with what the graph returns; empty once all of it exists.
        constants: tensors that the update makes from Python numbers, by the name under which the graph gets them.
        shards: the part of each parameter and gradient that the graph works on, as a flat tensor; None for all of it.
    """

    graph: fx.Graph
    inputs: list[InputSpec]
    created: list[InputSpec]
    constants: dict[str, torch.Tensor]
    shards: Shards | None = None


def state_target(parameter: str, key: str) -> str:
    """How a piece of optimizer state is called: ``layers.0.weight/exp_avg``."""
    return f"{parameter}/{key}"


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
    tracer = _Tracer(optimizer, order, trained, names, mode, shards)
    reason = _not_traced.get(optimizer) or _takes_closure(optimizer) or step_hooks(optimizer)
    rows = {name: known for name in order if (known := whole_parameter(trained[name])) is not None}
    if rows:
        whole = _Tracer(optimizer, order, trained, names, mode, wholes=rows)
        return _on_rows(optimizer, tracer, whole, rows, first, reason)
    if shards is not None:
        whole = _Tracer(optimizer, order, trained, names, mode, kept=shards)
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
    return tracer.opaque(first, reason)


_BY_ELEMENTS = "use an optimizer that works element by element (SGD, Adam, AdamW, Adagrad, RMSprop)"
_LEFT_OUT = "leave shard-optimizer out"


def _not_sharded(optimizer: torch.optim.Optimizer, why: str, advice: str) -> GraphoptError:
    """The error for an optimizer whose update cannot be that of shards of parameters."""
    return GraphoptError(f"{type(optimizer).__name__} cannot be sharded, {why}\n  what to do: {advice}")


def _traced(tracer: _Tracer, first: bool) -> UpdateTrace | None:
    """An update, where it can be traced."""
    try:
        return tracer.run(first)
    except Exception:
        return None


def _for_shards(
    optimizer: torch.optim.Optimizer, tracer: _Tracer, whole: _Tracer, shards: Shards, first: bool, reason: str
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
    optimizer: torch.optim.Optimizer, tracer: _Tracer, whole: _Tracer, update: UpdateTrace, shards: Shards, advice: str
) -> UpdateTrace:
    """The update of whole parameters as one of shards, of which some is exchanged in between."""
    try:
        return tracer.run_again(update, whole.parameters, shards)
    except NotOnShardsError as error:
        why = f"since its update takes whole parameters, of each of which ranks have shards: {error}"
        raise _not_sharded(optimizer, why, advice) from None


def _on_rows(
    optimizer: torch.optim.Optimizer,
    tracer: _Tracer,
    whole: _Tracer,
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
    if isinstance(optimizer, _FUSED):
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


class _Tracer:
    """Builds a stand-in optimizer over fake tensors and traces its step.

    With ``kept`` the optimizer keeps shards, perhaps, where whole parameters are updated; with ``wholes`` these are the
    whole ones of what the optimizer holds.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        order: list[str],
        trained: Mapping[str, torch.Tensor],
        names: dict[int, str],
        mode: Any,
        shards: Shards | None = None,
        *,
        kept: Shards | None = None,
        wholes: Mapping[str, WholeParameter] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._kept, self._wholes = kept or {}, wholes or {}
        self._trained = trained
        self._order = order
        self._names = names
        self._mode = mode
        self._shards = shards
        with mode:
            self._fake = {n: self._example(n, trained[n]) for n in order}
            self._gradients = {n: self._example(n, trained[n]) for n in order}
            self._rates = [self._rate(index, group) for index, group in enumerate(optimizer.param_groups)]

    def _example(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor like a parameter, its gradient or its state, or like this rank's shard of it."""
        if name in self._wholes:
            known = self._wholes[name]
            return torch.empty_strided(known.size, known.strides, dtype=value.dtype, device=value.device)
        if self._shards is None:
            return _fake_like(value)  # type: ignore[no-any-return]
        return torch.empty(self._shards[name][1], dtype=value.dtype, device=value.device)

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """What stands for the parameters, by name."""
        return self._fake

    def _rate(self, index: int, group: Mapping[str, Any]) -> Any:
        """What stands for a learning rate: a float64 tensor for fused kernels, otherwise a float that stays an input.

        (Fused kernels round a float32 rate differently from the Python float that eager gives them.)
        """
        rate = group["lr"]
        if isinstance(rate, torch.Tensor):
            return _fake_like(rate)
        if {**group, **self._implementation(group)}.get("fused"):
            return torch.empty((), dtype=torch.float64)
        return _torch.symbolic_float(f"lr{index}", float(rate))

    def run(self, first: bool) -> UpdateTrace:
        state = self._existing_state() if first else self._state_after_first()
        keys = [(n, k) for n in self._order for k, v in state.get(n, {}).items() if isinstance(v, torch.Tensor)]
        inputs = [*self._fake.values(), *self._gradients.values(), *(state[n][k] for n, k in keys), *self._rates]
        made: list[InputSpec] = []

        def step(flat: list[Any]) -> list[torch.Tensor]:
            supply = iter(flat)
            parameters = {n: next(supply) for n in self._order}
            gradients = {n: next(supply) for n in self._order}
            traced = {n: dict(state.get(n, {})) for n in self._order}
            for n, k in keys:
                traced[n][k] = next(supply)
            rates = [next(supply) for _ in self._rates]
            shadow = self._shadow(parameters, gradients, traced, rates)
            _torch.unwrapped_step(shadow)()
            self._refuse_counting(state, {n: shadow.state.get(p, {}) for n, p in parameters.items()})
            self._refuse_attributes(shadow, rates)
            made.clear()
            results = []
            for n in self._order:
                for k, v in shadow.state.get(parameters[n], {}).items():
                    if isinstance(v, torch.Tensor) and (n, k) not in keys:
                        made.append(InputSpec("state", state_target(n, k)))
                        results.append(v)
            return results

        module = _torch.trace_update(step, inputs)
        specs = [
            *(InputSpec("parameter", n) for n in self._order),
            *(InputSpec("gradient", n) for n in self._order),
            *(InputSpec("state", state_target(n, k)) for n, k in keys),
            *(InputSpec("hyperparameter", f"lr[{i}]") for i in range(len(self._rates))),
        ]
        constants = {str(n.target): getattr(module, str(n.target)) for n in module.graph.find_nodes(op="get_attr")}
        return UpdateTrace(module.graph, specs, list(made), constants, self._shards)

    def run_again(self, whole: UpdateTrace, wholes: Mapping[str, torch.Tensor], shards: Shards) -> UpdateTrace:
        """The update of whole parameters, on shards of them.

        Args:
            whole: the update.
            wholes: the whole parameters, by name; without data.
            shards: this rank's part of each.

        Raises:
            NotOnShardsError: where it cannot be.
        """
        places = whole.graph.find_nodes(op="placeholder")
        with self._mode:
            inputs = [
                torch.empty_like(self._fake[parameter_of(spec)], dtype=value.dtype)
                if holds_shard(spec, value, wholes)
                else _fake_like(value)
                for spec, value in zip(whole.inputs, map(value_of, places), strict=True)
                if spec.role != "hyperparameter"
            ]

        def step(flat: list[Any]) -> list[Any]:
            return run_on_shards(whole.graph, whole.inputs, flat, wholes, shards, whole.constants)

        module = _torch.trace_update(step, [*inputs, *self._rates])
        return UpdateTrace(module.graph, whole.inputs, whole.created, {}, self._shards)

    def _refuse_counting(self, before: Mapping[str, dict[str, Any]], after: Mapping[str, dict[str, Any]]) -> None:
        """Numbers that the optimizer keeps in Python and changes at every step cannot be part of a static program."""
        for name, state in after.items():
            for key, value in state.items():
                old = before.get(name, {}).get(key)
                if old is not None and not isinstance(value, torch.Tensor) and value != old:
                    raise _ChangingNumberError(
                        f"it keeps {key!r} as a Python {type(value).__name__} that changes at every step"
                    )

    def _refuse_attributes(self, shadow: torch.optim.Optimizer, rates: list[Any]) -> None:
        """The same for what it keeps in its parameter groups and in attributes."""
        for group, own, rate in zip(shadow.param_groups, self._optimizer.param_groups, rates, strict=True):
            before = {**own, **self._implementation(own), "lr": rate, "params": group["params"]}
            changed = [key for key, value in group.items() if not _same(value, before.get(key))]
            if changed:
                raise _ChangingNumberError(f"its step changes {changed[0]!r} of its parameter groups")
        for name, value in shadow.__dict__.items():
            if name not in NOTED and not _same(value, self._optimizer.__dict__.get(name)):
                raise _ChangingNumberError(f"its step changes its attribute {name!r}")

    def opaque(self, first: bool, reason: str) -> UpdateTrace:
        """The update as one call of the optimizer."""
        updated = {name: self._trained[name] for name in self._order}
        before, holds = _opaque.get(self._optimizer), settings_key(self._optimizer)
        if before is None or before[0] != holds:
            before = _opaque[self._optimizer] = holds, measure_update(self._optimizer, updated, reason, self._mode)
            if self._optimizer not in _told_as_it_is:
                _told_as_it_is.add(self._optimizer)
                logger.warning(
                    "%s runs in eager mode behind the program: %s", type(self._optimizer).__name__, before[1]
                )
        known = before[1]
        with self._mode:
            loss = torch.empty(()) if _takes_closure(self._optimizer) else None
        graph, inputs = trace_opaque(self._optimizer, self._order, self._fake, known, first=first, loss=loss)
        return UpdateTrace(graph, inputs, [], {})

    def _existing_state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's present state with fake tensors, by parameter name."""
        found: dict[str, dict[str, Any]] = {}
        with self._mode:
            for parameter, state in self._optimizer.state.items():
                name = self._names.get(id(parameter))
                if name in self._fake:
                    found[name] = {
                        key: self._example(name, value) if holds_elements(key, value, parameter) else _fake_like(value)
                        for key, value in self._whole(name, parameter, state).items()
                    }
        return found

    def _whole(self, name: str, parameter: torch.Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """State of a parameter, with something like the parameter in the place of its shard."""
        length = self._kept.get(name, (0, -1))[1]
        return {
            key: torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
            if isinstance(value, torch.Tensor) and value.shape == (length,)
            else value
            for key, value in state.items()
        }

    def _state_after_first(self) -> dict[str, dict[str, Any]]:
        """What the first step would leave, found by running it on fake tensors."""
        with self._mode:
            parameters = {n: torch.empty_like(p) for n, p in self._fake.items()}
            gradients = {n: torch.empty_like(p) for n, p in self._fake.items()}
            shadow = self._shadow(parameters, gradients, {}, self._rates)
            self._initial(shadow, parameters)
            _torch.unwrapped_step(shadow)()
        return {n: dict(shadow.state.get(p, {})) for n, p in parameters.items()}

    def _initial(self, shadow: torch.optim.Optimizer, parameters: dict[str, torch.Tensor]) -> None:
        """State that the constructor made (Adagrad) exists before the first step."""
        for name, state in self._existing_state().items():
            shadow.state[parameters[name]] = dict(state)

    def _shadow(
        self,
        parameters: Mapping[str, torch.Tensor],
        gradients: Mapping[str, torch.Tensor],
        state: Mapping[str, dict[str, Any]],
        rates: list[torch.Tensor],
    ) -> torch.optim.Optimizer:
        shadow = stand_in(self._optimizer, {self._trained[n]: parameter for n, parameter in parameters.items()})
        for group, rate in zip(shadow.param_groups, rates, strict=True):
            group.update({**self._implementation(group), "lr": rate})
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
            if state.get(name):
                shadow.state[parameter] = state[name]
        return shadow

    def _skips_elements(self, group: Mapping[str, Any]) -> bool:
        """Whether the fused kernel leaves elements as they are: torch's SGD does for 16-bit parameters on a CPU."""
        return isinstance(self._optimizer, torch.optim.SGD) and any(
            _torch.device_kind(parameter) == "cpu" and parameter.element_size() == 2 for parameter in group["params"]
        )

    def _implementation(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Which of the optimizer's own implementations to trace, where the user left the choice open."""
        chosen = group.get("fused") or group.get("foreach") or group.get("capturable")
        undecided = group.get("fused") is None and group.get("foreach") is None
        if chosen or group.get("differentiable") or not undecided:
            return {}
        usable = isinstance(self._optimizer, _FUSED) and not group.get("maximize", False) and "fused" in group
        if usable and not self._skips_elements(group):
            return {"fused": True}
        return {"foreach": True} if "foreach" in group else {}

    def tell_choice(self) -> None:
        """Log, once for an optimizer, that its fused kernel was chosen where that rounds otherwise than the default."""
        chosen = any(self._implementation(group).get("fused") for group in self._optimizer.param_groups)
        if not chosen or isinstance(self._optimizer, torch.optim.SGD) or self._optimizer in _told:
            return
        _told.add(self._optimizer)
        logger.info(
            "%s by its fused kernel, since no implementation was asked for: last bits differ from those of the loop "
            "before; for equal bits, give the optimizer fused=True in both, or foreach=False",
            type(self._optimizer).__name__,
        )


class _ChangingNumberError(Exception):
    """An optimizer keeps numbers in Python that change at every step, so that no static program can be its update."""


def _same(value: Any, before: Any) -> bool:
    """Whether something that an optimizer keeps is what it was before a step."""
    if value is before:
        return True
    if isinstance(value, dict) and type(value) is type(before):
        return value.keys() == before.keys() and all(_same(item, before[key]) for key, item in value.items())
    if isinstance(value, (list, tuple)) and type(value) is type(before):
        return len(value) == len(before) and all(map(_same, value, before))
    try:
        if isinstance(value, torch.Tensor) and _torch.is_plain_tensor(value):  # what a step has changed is none here
            with _torch.without_dispatch_modes():
                return value.dtype == before.dtype and torch.equal(value, before)
        return type(value) is type(before) and bool(value == before)
    except Exception:  # objects of the user's that cannot be compared
        return False


def _fake_like(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
