"""The options of passes that scale the loss, under torch's names and under Paddle's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from graphopt.rewriting.precision.scaling import LossScaling

__all__ = ["LossScaleOptions"]


@dataclass(frozen=True, kw_only=True)
class LossScaleOptions:
    """The settings of ``LossScaling`` as options of a pass; None for the default, and two names for most of them."""

    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None
    hysteresis: int | None = None
    floor: float | None = None
    ceiling: float | None = None
    dynamic: bool | None = None
    max_skipped: int | None = 50
    init_loss_scaling: float | None = None
    incr_every_n_steps: int | None = None
    decr_every_n_nan_or_inf: int | None = None
    incr_ratio: float | None = None
    decr_ratio: float | None = None
    use_dynamic_loss_scaling: bool | None = None

    def given(self) -> dict[str, Any]:
        """The settings that are not the default ones."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(LossScaleOptions)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def settings(self) -> LossScaling:
        """The settings, under one set of names.

        Raises:
            GraphoptError: for both names of one setting, and for values out of range.
        """
        return LossScaling.from_options({field.name: getattr(self, field.name) for field in fields(LossScaleOptions)})
