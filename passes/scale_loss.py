"""Loss scaling, for gradients that would vanish in float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage
from graphopt.rewriting.precision.options import LossScaleOptions
from graphopt.rewriting.precision.scaling import LossScaling, check_and_update, scale_backward

__all__ = ["ScaleLoss"]


@final
@dataclass(frozen=True)
class ScaleLoss(LossScaleOptions, Pass):
    """Scale the loss, unscale and check the gradients, and skip updates whose gradients are not finite.

    In a whole step all of it is part of the program, and nothing in it waits for the host: backward starts from the
    scale, the gradients that the update reads are unscaled and checked once, behind accumulation, a bad step leaves
    parameters, optimizer state and step counts as they are, and the scale is updated, by the rules of
    ``torch.amp.GradScaler`` (``graphopt.rewriting.precision.scaling.LossScaling`` has them, and where they differ).

    In a drop-in model the tangents of the outputs are scaled and gradients unscaled, and ``graphopt.scaler(model)``
    does the rest in the user's loop. What the user computes behind the model is not scaled: a model whose outputs are
    float16 gets tangents in float16, which may have vanished already; let it return float32, or the loss itself.

    A scale that is a power of two changes no bit of a gradient that neither overflows nor falls below the smallest
    normal number of its dtype. Optimizers with fused kernels skip by themselves; for others a copy of what they write
    is kept while they run. At the steps before the first good one the host looks at the check, since a skipped step
    must not leave optimizer state that it created.

    Each setting has torch's name and Paddle's; the defaults are torch's.

    Args:
        init_scale: the scale of the first step; 65536 by default. Paddle: ``init_loss_scaling``.
        growth_factor: multiplies the scale after good steps; 2 by default. Paddle: ``incr_ratio``.
        backoff_factor: multiplies the scale after bad steps; 0.5 by default. Paddle: ``decr_ratio``.
        growth_interval: good steps in a row before the scale grows; 2000 by default. Paddle: ``incr_every_n_steps``.
        hysteresis: bad steps in a row before the scale falls; 1 by default. Paddle: ``decr_every_n_nan_or_inf``.
        floor: the scale never falls below it; by default the smallest normal float32, and 1 with Paddle's names.
        ceiling: the scale never grows beyond it; by default float32's limit.
        dynamic: False for a scale that stays; True by default. Paddle: ``use_dynamic_loss_scaling``.
        max_skipped: skipped steps in a row after which an error names the first gradient that is not finite; None for
            no limit.
        init_loss_scaling: see ``init_scale``.
        incr_every_n_steps: see ``growth_interval``.
        decr_every_n_nan_or_inf: see ``hysteresis``.
        incr_ratio: see ``growth_factor``.
        decr_ratio: see ``backoff_factor``.
        use_dynamic_loss_scaling: see ``dynamic``.

    Raises:
        GraphoptError: for both names of one setting, and for values out of range.

    Example:
        >>> passes = [MixedPrecision("float16", scale_loss=False), ScaleLoss(init_scale=1024.0)]
        >>> step = graphopt.optimize_step(model, optimizer, passes, loss=loss).prepare(x)
        >>> step(x).dtype
        torch.float32
    """

    name: ClassVar[str] = "scale-loss"
    stage: ClassVar[PassStage] = "joint"
    also: ClassVar[tuple[PassStage, ...]] = ("step",)
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel",)
    changes_signature: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.settings()

    @property
    def scaling(self) -> LossScaling:
        """The settings, under one set of names."""
        return self.settings()

    def apply(self, program: Program) -> Changed:
        """See the class; at the joint stage backward is scaled, at the step stage gradients and update are changed."""
        if program.stage == "step":
            checked, kept = check_and_update(program, self.scaling, self.name)
            counts = {"gradients checked": checked, "tensors kept for a skipped step": kept}
            return Changed(counts={what: count for what, count in counts.items() if count})
        drop_in = bool(program.inputs_of("tangent"))
        scaled = scale_backward(program, self.scaling, self.name)
        if not drop_in:
            return Changed(counts={"losses scaled": scaled})
        gradients = len({value for value, _ in program.outputs_of("gradient") if value is not None})
        return Changed(counts={"tangents scaled": scaled, "gradients unscaled": gradients})
