"""`scaler`: the loss scale of optimized models, used like ``torch.amp.GradScaler``."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphopt.errors import GraphoptError, check_type, public, shown
from graphopt.ir.ops.updates import scale as ops
from graphopt.rewriting.precision.scaling import BAD, GOOD, SCALE, CheckedGradients, LossScaling, counters
from graphopt.rewriting.precision.scaling import scaling_of as settings_of
from graphopt.runtime.drop_in.module import Optimized
from graphopt.runtime.step.skipped_steps import SkipWatch

__all__ = ["Scaler", "scaler"]

_EMPTY = "The source state dict is empty, possibly because it was saved from a disabled scaler."


class _Stage(enum.Enum):
    READY = 0
    UNSCALED = 1
    STEPPED = 2


@dataclass
class _PerOptimizer:
    stage: _Stage = _Stage.READY
    found: dict[torch.device, torch.Tensor] = field(default_factory=dict)


class Scaler:
    """Skips optimizer steps whose gradients are not finite, and moves the loss scale; ``graphopt.scaler`` makes one.

    The methods, their order and their errors are those of ``torch.amp.GradScaler``, so a loop that uses one keeps its
    lines. Two things happen elsewhere: the models' programs multiply by the scale when backward enters them and divide
    by it before gradients leave, so ``scale`` returns what it is given, ``.grad`` is unscaled at all times, and
    ``unscale_`` only checks. Gradients of float16 parameters are taken too.

    Args:
        models: results of ``graphopt.optimize``; they share one scale.
        scaling: the settings of the pass that scales their losses; None for a scaler that is disabled.
    """

    def __init__(self, models: tuple[Optimized, ...], scaling: LossScaling | None) -> None:
        self.models = models
        self._scaling = scaling or LossScaling()
        self._enabled = scaling is not None
        self._store = models[0]._graphopt.runner.store
        for other in models[1:] if self._enabled else ():
            other._graphopt.runner.store.share(SCALE, self._store)
        self._growth_factor = self._scaling.growth_factor
        self._backoff_factor = self._scaling.backoff_factor
        self._growth_interval = self._scaling.growth_interval
        self._watch = SkipWatch(self._store, self._scaling)
        self._optimizers: dict[int, _PerOptimizer] = {}

    # --- the loop ----------------------------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """``outputs`` (a tensor or an iterable of tensors) as they are: the programs scale by themselves.

        Raises:
            ValueError: for anything else.
        """
        if self._enabled and not isinstance(outputs, torch.Tensor):
            if not isinstance(outputs, Iterable):
                raise ValueError("outputs must be a Tensor or an iterable of Tensors")
            outputs = list(outputs) if not isinstance(outputs, (list, tuple)) else outputs
            for item in outputs:
                self.scale(item)
        return outputs

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Check the gradients of an optimizer's parameters, which are unscaled already; call it before clipping.

        Raises:
            RuntimeError: where it was called since the last ``update``, or after ``step``.
        """
        if not self._enabled:
            return
        self._refuse_early("unscale_")
        mine = self._of(optimizer)
        if mine.stage is _Stage.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if mine.stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        mine.found = _check(optimizer)
        mine.stage = _Stage.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)``, unless one of its gradients is not finite.

        Optimizers with fused kernels decide on the device; for the others, and at a first step, the host waits for the
        check.

        Returns:
            What ``optimizer.step`` returns; None for a step that is skipped.

        Raises:
            RuntimeError: with a closure, or where it was called since the last ``update``.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if the scaler is enabled.")
        self._refuse_early("step")
        mine = self._of(optimizer)
        if mine.stage is _Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if mine.stage is _Stage.READY:
            self.unscale_(optimizer)
        assert len(mine.found) > 0, "No inf checks were recorded for this optimizer."
        mine.stage = _Stage.STEPPED
        if _decides_itself(optimizer, mine.found):
            return _fused_step(optimizer, mine.found, kwargs)
        if any(float(found) for found in mine.found.values()):
            return None
        return optimizer.step(**kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale by what ``step`` and ``unscale_`` found, or set it to ``new_scale``.

        Raises:
            AssertionError: where nothing was checked since the last call.
            GraphoptError: after too many skipped steps in a row, naming the first gradient that was not finite.
        """
        if not self._enabled:
            return
        self._refuse_early("update")
        if new_scale is not None:
            self._set(new_scale)
        else:
            self._move()
        self._optimizers.clear()
        notes = self._notes()
        try:
            if new_scale is None:
                self._watch.look(notes)
        finally:
            for _, flags in notes:
                flags.zero_()

    # --- looking, setting --------------------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Whether the models' passes scale the loss."""
        return self._enabled

    def get_scale(self) -> float:
        """The scale; 1.0 where disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        found = self._store.peek(SCALE)
        return float(found) if found is not None else self._scaling.init_scale

    def get_growth_factor(self) -> float:
        """What the scale is multiplied by after good steps."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set it; above 1."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """What the scale is multiplied by after bad steps."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set it; between 0 and 1."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """How many good steps in a row the scale waits for."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set it; at least 1. Good steps so far count."""
        self._growth_interval = new_interval

    def state_dict(self) -> dict[str, Any]:
        """What ``GradScaler.state_dict`` has, and the count of bad steps where that matters; {} where disabled."""
        if not self._enabled:
            return {}
        state = {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._count(GOOD),
        }
        return {**state, "_hysteresis_tracker": self._count(BAD)} if self._scaling.hysteresis > 1 else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``, of this class or of ``torch.amp.GradScaler``; also before the first call.

        Raises:
            RuntimeError: for an empty state.
            ArgumentError: for what is no state.
            GraphoptError: where entries are missing.
        """
        if not self._enabled:
            return
        check_type("state_dict", state_dict, Mapping, "what a scaler's state_dict() returned")
        if not state_dict:
            raise RuntimeError(_EMPTY)
        wanted = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
        missing = [key for key in wanted if key not in state_dict]
        if missing:
            raise GraphoptError(f"this is no state of a scaler: {', '.join(missing)} missing")
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._store.put(SCALE, torch.tensor(float(state_dict["scale"]), dtype=torch.float32))
        for target, key in ((GOOD, "_growth_tracker"), (BAD, "_hysteresis_tracker")):
            self._store.put(target, torch.tensor(int(state_dict.get(key, 0)), dtype=torch.int32))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _of(self, optimizer: torch.optim.Optimizer) -> _PerOptimizer:
        return self._optimizers.setdefault(id(optimizer), _PerOptimizer())

    def _count(self, target: str) -> int:
        found = self._store.peek(target)
        return int(found) if found is not None else 0

    def _refuse_early(self, what: str) -> None:
        if SCALE not in self._store:
            raise RuntimeError(
                f"Attempted {what} but _scale is None.  This may indicate your script did not call the optimized model "
                "in training mode earlier in the iteration."
            )

    def _state(self) -> list[torch.Tensor]:
        wanted = counters(self._scaling, self._store[SCALE].device)
        self._store.require({target: item for target, item in wanted.items() if target != SCALE})
        return [self._store[target] for target in wanted]

    def _move(self) -> None:
        found = [item for mine in self._optimizers.values() for item in mine.found.values()]
        assert len(found) > 0, "No inf checks were recorded prior to update."
        state = self._state()
        combined = found[0].to(state[0].device, non_blocking=True)
        for item in found[1:]:
            combined = combined + item.to(combined.device, non_blocking=True)
        _, _, _, hysteresis, floor, ceiling = numbers = self._scaling.update_arguments()
        if self._scaling.dynamic:
            numbers = (self._growth_factor, self._backoff_factor, self._growth_interval, hysteresis, floor, ceiling)
        ops.update_scale_(*state, combined, *numbers)

    def _set(self, new_scale: float | torch.Tensor) -> None:
        scale = self._state()[0]
        if isinstance(new_scale, torch.Tensor):
            reason = "new_scale should be a float or a 1-element torch.Tensor with requires_grad=False."
            assert new_scale.numel() == 1, reason
            assert not new_scale.requires_grad, reason
            scale.copy_(new_scale.reshape(()))
        else:
            scale.fill_(float(new_scale))

    def _notes(self) -> list[tuple[CheckedGradients, torch.Tensor]]:
        """What the models' programs checked, with the tensors in which they noted it."""
        found = {
            (id(model), checked.target): (checked, notes)
            for model in self.models
            for checked, notes in model._graphopt.checked()
        }
        return list(found.values())


def _check(optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
    """By device, a tensor of one element that is 1 where a gradient on it is not finite."""
    lists: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                values = parameter.grad.values() if parameter.grad.is_sparse else parameter.grad
                lists.setdefault((values.device, values.dtype), []).append(values)
    found = {device: torch.zeros((), device=device) for device, _ in lists}
    with torch.no_grad():
        for (device, _), gradients in lists.items():
            one = torch.ones((), device=device)
            torch.ops.aten._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], one)
    return found


def _decides_itself(optimizer: torch.optim.Optimizer, found: Mapping[torch.device, torch.Tensor]) -> bool:
    """Whether the optimizer's kernels skip on the device, and it has the state that they would otherwise create."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or any(d.type == "cpu" for d in found):
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return all(parameter in optimizer.state for parameter in parameters)


def _fused_step(optimizer: Any, found: Mapping[torch.device, torch.Tensor], kwargs: Mapping[str, Any]) -> Any:
    """A step of an optimizer that reads ``found_inf`` from its attributes, as ``torch.amp.GradScaler`` sets them."""
    first, *others = found.values()
    for other in others:
        first = first + other.to(first.device, non_blocking=True)
    optimizer.grad_scale, optimizer.found_inf = None, first
    try:
        return optimizer.step(**kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _described(given: object) -> str:
    """What was given to ``scaler`` by mistake, and what to do about it."""
    if isinstance(given, nn.Module):
        return f"a {type(given).__name__} that is none: model = graphopt.optimize(model, ...) makes one"
    if isinstance(given, (list, tuple)):
        return f"{shown(given)}: give the models one by one, scaler(*models)"
    return shown(given)


@public
def scaler(*models: nn.Module) -> Scaler:
    """The loss scale of optimized models, in place of ``torch.amp.GradScaler`` in a loop that is otherwise unchanged.

    Where the models' passes scale no loss (bfloat16, float32) the scaler is disabled, and does what a disabled
    ``GradScaler`` does. The same models give the same object again.

    Args:
        models: results of ``graphopt.optimize`` with a pass that scales the loss; several share one scale, and are
            given together before their first call.

    Raises:
        GraphoptError: for something else, for models whose passes scale differently, and for a model that has a scaler
            together with others already.

    Example:
        >>> model = graphopt.optimize(model, [MixedPrecision("float16")])
        >>> scaler = graphopt.scaler(model)
        >>> scaler.scale(loss(model, x)).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
    """
    found: list[Optimized] = []
    for model in models:
        if not isinstance(model, Optimized):
            raise GraphoptError(
                f"scaler takes the results of graphopt.optimize, and got {_described(model)}; a whole step of "
                "optimize_step scales, skips and updates the scale by itself"
            )
        found.append(model)
    if not found:
        raise GraphoptError("scaler needs at least one model: graphopt.scaler(model)")
    settings = [settings_of(model._graphopt.options.pipeline.passes) for model in found]
    if any(item != settings[0] for item in settings):
        raise GraphoptError("the models' passes scale their losses differently; give each model a scaler of its own")
    known: list[Scaler | None] = [model._graphopt.scaler for model in found]
    if known[0] is not None and known[0].models == tuple(found):
        return known[0]
    if any(item is not None for item in known):
        raise GraphoptError("one of the models has a scaler already, of other models; make one scaler for all of them")
    made = Scaler(tuple(found), settings[0])
    for model in found:
        model._graphopt.scaler = made
    return made
