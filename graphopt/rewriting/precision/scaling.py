"""Loss scaling as ops of a program: scaled backward, gradients checked and unscaled, updates that can be skipped.

Small gradients vanish in float16. Multiplying the loss by a scale lifts them; where that makes one infinite, the step
is skipped and the scale lowered. As in Micikevicius et al., "Mixed Precision Training", 2018 (arXiv 1710.03740), with
the state machine of ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.gradients import (
    GradientSite,
    all_gradients_made,
    gradient_owners,
    in_own_storage,
    site,
    update_gradients,
)
from graphopt.ir.node import Phase, value_of
from graphopt.ir.ops.updates import scale as ops
from graphopt.ir.ops.updates.scale import FOUND_INF
from graphopt.ir.program import Program
from graphopt.ir.state import PassState
from graphopt.rewriting.precision.conditional import make_conditional

__all__ = [
    "BAD",
    "GOOD",
    "SCALE",
    "SKIPPED",
    "CheckedGradients",
    "LossScaling",
    "ScalesLoss",
    "check_and_update",
    "checked_gradients",
    "counters",
    "scale_backward",
    "scaling_of",
]

SCALE = "loss-scale/scale"
"""Pass state: the scale, float32, one element."""
GOOD = "loss-scale/good_steps"
"""Pass state: good steps in a row since the scale last changed."""
BAD = "loss-scale/bad_steps"
"""Pass state: bad steps in a row since the scale last changed."""
SKIPPED = "loss-scale/skipped_steps"
"""Pass state: bad steps in a row."""

_SMALLEST = 2.0**-126
_LARGEST = torch.finfo(torch.float32).max
_PADDLE_NAMES = {
    "init_scale": "init_loss_scaling",
    "growth_interval": "incr_every_n_steps",
    "hysteresis": "decr_every_n_nan_or_inf",
    "growth_factor": "incr_ratio",
    "backoff_factor": "decr_ratio",
    "dynamic": "use_dynamic_loss_scaling",
}


@dataclass(frozen=True, slots=True)
class LossScaling:
    """How a loss is scaled.

    Attributes:
        init_scale: the scale of the first step.
        growth_factor: multiplies the scale after ``growth_interval`` good steps in a row; the scale stays where the
            product is beyond float32.
        backoff_factor: multiplies the scale after bad steps.
        growth_interval: good steps in a row before the scale grows; also right where it was lowered in between.
        hysteresis: bad steps in a row before the scale falls; a good step starts the count again. (Megatron's counts
            bad steps since the scale last grew, in a row or not.)
        floor: the scale does not fall below it. Below the smallest normal number, the default, 1 / scale overflows.
        ceiling: the scale does not grow beyond it.
        dynamic: False leaves the scale as it is; bad steps are skipped all the same.
        max_skipped: bad steps in a row after which an error names the first gradient that is not finite; None for no
            limit.

    Raises:
        GraphoptError: naming each value that is out of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    floor: float = _SMALLEST
    ceiling: float = math.inf
    dynamic: bool = True
    max_skipped: int | None = 50

    def __post_init__(self) -> None:
        above_smallest = self.floor >= _SMALLEST
        some_skipped = self.max_skipped is None or self.max_skipped >= 1
        rules = {
            f"growth_factor must be above 1 and finite, not {self.growth_factor}": 1 < self.growth_factor < math.inf,
            f"backoff_factor must lie between 0 and 1, not be {self.backoff_factor}": 0 < self.backoff_factor < 1,
            f"growth_interval must be at least 1, not {self.growth_interval}": self.growth_interval >= 1,
            f"hysteresis must be at least 1, not {self.hysteresis}": self.hysteresis >= 1,
            f"floor must be at least {_SMALLEST:.4g}, not {self.floor}: below it 1 / scale is infinite": above_smallest,
            f"init_scale must lie between floor {self.floor:.4g} and ceiling {self.ceiling:.4g}, not be "
            f"{self.init_scale}": self.floor <= self.init_scale <= min(self.ceiling, _LARGEST),
            f"max_skipped must be at least 1, or None for no limit, not {self.max_skipped}": some_skipped,
        }
        wrong = [rule for rule, holds in rules.items() if not holds]
        if wrong:
            raise GraphoptError("loss scaling: " + "; ".join(wrong))

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> LossScaling:
        """The settings that options give under torch's names or Paddle's; None stands for "not given".

        Paddle's names are ``init_loss_scaling``, ``incr_every_n_steps``, ``decr_every_n_nan_or_inf``, ``incr_ratio``,
        ``decr_ratio`` and ``use_dynamic_loss_scaling``. With any of them the floor is 1 unless given, and the ratios
        are rounded to float32, as in Paddle's kernels. Options that are no settings of loss scaling are passed over.

        Raises:
            GraphoptError: for both names of one setting, and for values out of range.
        """
        given = {name: value for name, value in options.items() if value is not None}
        twice = [f"{ours} and {theirs}" for ours, theirs in _PADDLE_NAMES.items() if ours in given and theirs in given]
        if twice:
            raise GraphoptError(f"loss scaling: {', '.join(twice)} are two names of one setting; give one of them")
        found = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        if "max_skipped" in options:
            found["max_skipped"] = options["max_skipped"]
        for ours, theirs in _PADDLE_NAMES.items():
            if theirs in given:
                value = given[theirs]
                found[ours] = float(torch.tensor(value, dtype=torch.float32)) if theirs.endswith("ratio") else value
                found.setdefault("floor", 1.0)
        return cls(**found)

    def update_arguments(self) -> tuple[float, float, int, int, float, float]:
        """The numbers that ``ops.scale.update_scale_`` takes after its tensors."""
        if not self.dynamic:
            return 1.0, 1.0, 1, 1, 0.0, math.inf
        counts = (self.growth_interval, self.hysteresis)
        return self.growth_factor, self.backoff_factor, *counts, self.floor, self.ceiling


@runtime_checkable
class ScalesLoss(Protocol):
    """What a pass that scales the loss offers, so that the runtime knows how before anything is captured."""

    @property
    def scaling(self) -> LossScaling | None:
        """The settings; None where the pass, as it is set, does not scale."""
        ...


def scaling_of(passes: tuple[Any, ...]) -> LossScaling | None:
    """The settings of the pass among ``passes`` that scales the loss; None where none does."""
    found = [item.scaling for item in passes if isinstance(item, ScalesLoss)]
    return next((scaling for scaling in found if scaling is not None), None)


def counters(scaling: LossScaling, device: torch.device) -> dict[str, PassState]:
    """The tensors of the state machine: the scale and three counts."""
    one = torch.Size(())
    return {
        SCALE: PassState(one, torch.float32, device, fill=scaling.init_scale),
        GOOD: PassState(one, torch.int32, device),
        BAD: PassState(one, torch.int32, device),
        SKIPPED: PassState(one, torch.int32, device),
    }


# --- the joint stage -------------------------------------------------------------------------------------------------


def scale_backward(program: Program, scaling: LossScaling, origin: str) -> int:
    """Let backward start from the scale; in a drop-in program also unscale and check its gradients at the end.

    Args:
        program: of stage joint. With a loss, gradients of parameters stay scaled until ``check_and_update`` on the step
            program, and those of inputs are unscaled here. Without, the tangents of all outputs are scaled, in their
            own dtypes, and every gradient is unscaled.
        scaling: the settings.
        origin: the pass that asks, for people.

    Returns:
        How many tangents are scaled (1 with a loss).

    Raises:
        GraphoptError: where the program is scaled already, or backward starts from nothing that can be scaled.
    """
    if SCALE in program.pass_state:
        raise GraphoptError(f"{origin}: the loss is scaled already; leave one of the passes that scale it out")
    seed = program.names().get("loss~")
    starts = [seed] if seed is not None else [node for node, _ in program.inputs_of("tangent")]
    starts = [node for node in starts if node.users and _is_float(node)]
    if not starts:
        raise GraphoptError(f"{origin}: backward of {program.title or 'this program'} starts from no float tensor")
    scale = program.add_state(SCALE, counters(scaling, value_of(starts[0]).device)[SCALE])
    first = next(program.phase_nodes(Phase.BACKWARD), program.output_node)
    for node in starts:
        _multiply(program, node, scale, first, origin)
    if seed is None:
        gradients = [value for value, _ in program.outputs_of("gradient") if isinstance(value, fx.Node)]
        _check(program, list(dict.fromkeys(gradients)), Phase.BACKWARD, origin)
    else:
        _unscale_inputs(program, scale, origin)
    return len(starts)


def _unscale_inputs(program: Program, scale: fx.Node, origin: str) -> None:
    """Unscale the gradients of inputs of a program with a loss; no update depends on them."""
    inputs = {spec.target for _, spec in program.inputs_of("input")}
    values = list(program.output_values)
    wanted = [
        index
        for index, spec in enumerate(program.outputs)
        if spec.role == "gradient" and spec.target in inputs and isinstance(values[index], fx.Node)
    ]
    if not wanted:
        return
    common: dict[str, Any] = {"before": program.output_node, "phase": Phase.BACKWARD, "origin": f"{origin}: unscale"}
    inverse = _inverse(program, scale, common)
    for index in wanted:
        gradient = values[index]
        own = program.insert(torch.ops.aten.mul.Tensor, (gradient, inverse), like=gradient, **common)
        dtype = value_of(gradient).dtype
        if value_of(own).dtype != dtype:
            own = program.insert(torch.ops.aten._to_copy.default, (own,), {"dtype": dtype}, like=gradient, **common)
        program.hand_over_name(f"{program.outputs[index].target}~", gradient, own)
        values[index] = own
    program.set_outputs(values, program.outputs)


def _inverse(program: Program, scale: fx.Node, common: Mapping[str, Any]) -> fx.Node:
    """``1 / scale`` in float32, rounded as ``torch.amp.GradScaler`` rounds it."""
    wide = program.insert(torch.ops.aten._to_copy.default, (scale,), {"dtype": torch.float64}, **common)
    inverse = program.insert(torch.ops.aten.reciprocal.default, (wide,), **common)
    return program.insert(torch.ops.aten._to_copy.default, (inverse,), {"dtype": torch.float32}, **common)


def _is_float(node: fx.Node) -> bool:
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _multiply(program: Program, start: fx.Node, scale: fx.Node, first: fx.Node, origin: str) -> None:
    """Put ``start * scale``, in the dtype of ``start``, where ``start`` was read."""
    readers = list(start.users)
    common: dict[str, Any] = {"phase": Phase.BACKWARD, "like": start, "origin": f"{origin}: scaled"}
    place: dict[str, Any] = {"after": start} if start.op == "call_function" else {"before": first}
    scaled = program.insert(torch.ops.aten.mul.Tensor, (start, scale), hint="scaled", **place, **common)
    dtype = value_of(start).dtype
    if value_of(scaled).dtype != dtype:
        scaled = program.insert(torch.ops.aten._to_copy.default, (scaled,), {"dtype": dtype}, after=scaled, **common)
    for reader in readers:
        reader.replace_input_with(start, scaled)


# --- check and unscale -----------------------------------------------------------------------------------------------


def _check(program: Program, gradients: list[fx.Node], phase: Phase, origin: str) -> fx.Node:
    """Unscale ``gradients`` in place, and note which are not finite; returns the pass state with the notes.

    The notes are in the order in which backward makes the gradients.
    """
    _refuse(gradients, origin)
    gradients = in_own_storage(program, gradients, origin)
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    gradients.sort(key=order.__getitem__)
    device = value_of(gradients[0]).device
    owners = gradient_owners(program)
    targets = "\n".join(site(node, owners).tensor for node in gradients)
    target = f"loss-scale/nonfinite/{len(gradients)}-{zlib.crc32(targets.encode()):08x}"
    nonfinite = program.add_state(target, PassState((len(gradients),), torch.float32, device, saved=False))
    scale = next(node for node, spec in program.inputs_of("pass_state") if spec.target == SCALE)
    common: dict[str, Any] = {"before": all_gradients_made(program), "phase": phase, "origin": f"{origin}: unscale"}
    if phase is Phase.UPDATE:
        program.insert(torch.ops.aten.zero_.default, (nonfinite,), **common)
    inverse = _inverse(program, scale, common)
    program.insert(ops.check_and_unscale_, (gradients, nonfinite, inverse), **common)
    return nonfinite


def _refuse(gradients: list[fx.Node], origin: str) -> None:
    if not gradients:
        raise GraphoptError(f"{origin}: there are no gradients to unscale")
    odd = [node for node in gradients if not _is_float(node)]
    if odd:
        raise GraphoptError(f"{origin}: {odd[0].name} is a gradient of dtype {value_of(odd[0]).dtype}; only floats")
    devices = sorted({str(value_of(node).device) for node in gradients})
    if len(devices) > 1:
        raise GraphoptError(f"{origin}: the gradients lie on {', '.join(devices)}; loss scaling works on one device")


@dataclass(frozen=True)
class CheckedGradients:
    """What a program checks.

    Attributes:
        target: the pass state with one element for each gradient, not 0 where the gradient was not finite.
        sites: what these gradients are, in the order in which backward makes them.
    """

    target: str
    sites: tuple[GradientSite, ...]


def checked_gradients(program: Program) -> CheckedGradients | None:
    """The gradients that a rewritten program checks; None where it checks none."""
    kept = {node: spec.target for node, spec in program.inputs_of("pass_state")}
    for node in program.graph.find_nodes(op="call_function", target=ops.check_and_unscale_):
        gradients: Any = node.args[0]
        nonfinite: Any = node.args[1]
        owners = gradient_owners(program)
        return CheckedGradients(kept[nonfinite], tuple(site(gradient, owners) for gradient in gradients))
    return None


# --- the step stage --------------------------------------------------------------------------------------------------


def check_and_update(program: Program, scaling: LossScaling, origin: str) -> tuple[int, int]:
    """Unscale and check the gradients of a step program, make its update conditional, and update the scale behind it.

    The tensor named ``found_inf`` stands between check and update; a pass that makes ranks agree changes what reads it.

    Args:
        program: of stage step, of a joint program on which ``scale_backward`` was called.
        scaling: the settings.
        origin: the pass that asks, for people.

    Returns:
        How many gradients are checked, and how many tensors are kept to be put back (beside what the optimizer's fused
        ops skip by themselves).

    Raises:
        GraphoptError: where the gradients were not scaled, or are checked already.
    """
    if SCALE not in program.pass_state:
        raise GraphoptError(f"{origin}: this step program's backward is not scaled; the joint stage has to be first")
    if FOUND_INF in program.names():
        raise GraphoptError(f"{origin}: the gradients are checked already")
    gradients = update_gradients(program)
    nonfinite = _check(program, gradients, Phase.UPDATE, origin)
    place: dict[str, Any] = {"before": all_gradients_made(program), "phase": Phase.UPDATE, "origin": f"{origin}: check"}
    any_nonfinite = torch.ops.aten.amax.default
    found = program.insert(any_nonfinite, (nonfinite, [0]), names=(FOUND_INF,), hint=FOUND_INF, **place)
    kept = make_conditional(program, found, origin)
    device = value_of(nonfinite).device
    state = [program.add_state(target, wanted) for target, wanted in counters(scaling, device).items()]
    arguments = (*state, found, *scaling.update_arguments())
    end: dict[str, Any] = {"before": program.output_node, "phase": Phase.UPDATE}
    program.insert(ops.update_scale_, arguments, origin=f"{origin}: update of the scale", **end)
    return len(gradients), kept
