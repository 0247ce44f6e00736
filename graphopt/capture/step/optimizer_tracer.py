"""A stand-in for an optimizer over tensors without data, whose ``step`` is traced into a graph."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.step.opaque import stand_in
from graphopt.capture.step.update_on_shards import holds_shard, parameter_of, run_on_shards
from graphopt.ir.node import InputSpec, value_of
from graphopt.rewriting.shards import Shards, WholeParameter, holds_elements

__all__ = ["FUSED", "NOTED", "ChangingNumberError", "OptimizerTracer", "UpdateTrace", "state_target"]

logger = logging.getLogger(__name__)

_told: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers whose implementation was chosen here, and that this was told of."""

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

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that have fused kernels on a CPU and on CUDA."""


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


class OptimizerTracer:
    """Builds a stand-in optimizer over fake tensors and traces its step.

    Args:
        optimizer: any ``torch.optim`` optimizer, which is not touched.
        order: the names of the parameters that it updates.
        trained: parameters by name.
        names: those of parameters, by ``id``.
        mode: the fake mode in which to build example values.
        shards: the part of each parameter that is updated; None for all of it.
        kept: the shards that the optimizer may keep where whole parameters are updated.
        wholes: the whole parameters of what the optimizer holds.
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
        """The update.

        Args:
            first: that of the call that creates the state, or (False) any later one.

        Raises:
            ChangingNumberError: for an optimizer that counts in Python.
        """
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
                    raise ChangingNumberError(
                        f"it keeps {key!r} as a Python {type(value).__name__} that changes at every step"
                    )

    def _refuse_attributes(self, shadow: torch.optim.Optimizer, rates: list[Any]) -> None:
        """The same for what it keeps in its parameter groups and in attributes."""
        for group, own, rate in zip(shadow.param_groups, self._optimizer.param_groups, rates, strict=True):
            before = {**own, **self._implementation(own), "lr": rate, "params": group["params"]}
            changed = [key for key, value in group.items() if not _same(value, before.get(key))]
            if changed:
                raise ChangingNumberError(f"its step changes {changed[0]!r} of its parameter groups")
        for name, value in shadow.__dict__.items():
            if name not in NOTED and not _same(value, self._optimizer.__dict__.get(name)):
                raise ChangingNumberError(f"its step changes its attribute {name!r}")

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
        usable = isinstance(self._optimizer, FUSED) and not group.get("maximize", False) and "fused" in group
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


class ChangingNumberError(Exception):
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
