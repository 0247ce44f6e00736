"""Clipping gradients by their norm or by value, inside a whole step."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import fx

from graphopt.errors import GraphoptError
from graphopt.ir.gradients import all_gradients_made, gradient_owners, in_own_storage, update_gradients
from graphopt.ir.node import Phase, value_of
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.sharding.sharded_update import agree_on_norms
from graphopt.rewriting.gradient_norm import norm_state
from graphopt.rewriting.memory.recompute.gathered_parameters import gathered_names, sharding_group
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage

__all__ = ["ClipGradients"]

_ORIGIN = "clip-gradients"
_aten = torch.ops.aten


@final
@dataclass(frozen=True)
class ClipGradients(Pass):
    """Clip the gradients that the update reads, all together by their norm, or each element by value.

    Equal to ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` on the parameters of the optimizer between
    ``backward()`` and ``step()``, to the last bit in float32; norms of gradients in lower precision are taken in
    float32. Under gradient accumulation the mean gradients are clipped, once; behind loss scaling the unscaled ones. A
    step that loss scaling skips is skipped all the same. Parameters without a gradient count for nothing.

    In a drop-in model use torch's functions, which find ``.grad`` unscaled.

    Args:
        max_norm: the largest norm of all gradients as one vector; above 0, and infinite to keep their norm alone. Give
            it or ``max_value``.
        max_value: the largest absolute value of an element; above 0.
        norm_type: the p of the p-norm; ``inf`` for the largest absolute value.
        keep_norm: keep the norm from before clipping, for ``TrainStep.gradient_norm``.

    Raises:
        GraphoptError: where not exactly one limit is given, or a value is out of range.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [ClipGradients(max_norm=1.0)], loss=loss).prepare(x)
        >>> step.records[0].name, step(x).ndim
        ('clip-gradients', 0)

        Its norm, for a log:

        >>> step = graphopt.optimize_step(model, optimizer, [ClipGradients(1.0, keep_norm=True)], loss=loss)
        >>> step(x).ndim, step.gradient_norm.ndim
        (0, 0)
    """

    name: ClassVar[str] = "clip-gradients"
    stage: ClassVar[PassStage] = "step"
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("scale-loss", "mixed-precision", "data-parallel", "compress-gradients")

    changes_signature: ClassVar[bool] = True

    max_norm: float | None = None
    max_value: float | None = None
    norm_type: float = 2.0
    keep_norm: bool = False

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        max_value: float | None = None,
        norm_type: float = 2.0,
        keep_norm: bool = False,
    ) -> None:
        for name, value in (("max_norm", max_norm), ("max_value", max_value), ("norm_type", norm_type)):
            object.__setattr__(self, name, None if value is None else float(value))
        object.__setattr__(self, "keep_norm", bool(keep_norm))
        if (max_norm is None) == (max_value is None):
            raise GraphoptError("clip-gradients takes one limit: max_norm, for all gradients together, or max_value")
        limit = max_norm if max_norm is not None else max_value
        assert limit is not None
        if keep_norm and max_norm is None:
            raise GraphoptError("clip-gradients: keep_norm is for max_norm, since max_value takes no norm")
        if not 0 < limit <= (math.inf if keep_norm else sys.float_info.max):
            raise GraphoptError(f"clip-gradients: the limit must be above 0 and finite, not {limit}")
        if not norm_type > 0:
            raise GraphoptError(f"clip-gradients: norm_type must be above 0, not {norm_type}")

    def apply(self, program: Program) -> Changed:
        """See the class; rewrites a step program."""
        if str(self) in program.history:
            return Changed(reason="the gradients are clipped already")
        gradients = in_own_storage(program, update_gradients(program), _ORIGIN)
        if not gradients:
            return Changed(reason="the update reads no gradients")
        _check(gradients)
        if self.max_value is not None:
            _clamp(program, gradients, self.max_value)
        else:
            self._by_norm(program, gradients)
        return Changed(counts={"gradients clipped": len(gradients)})

    def _by_norm(self, program: Program, gradients: list[fx.Node]) -> None:
        """The ops of ``clip_grad_norm_``: norms in the order of the parameters, their norm, coefficient, product."""
        owners = gradient_owners(program)
        order = {spec.target: place for place, (_, spec) in enumerate(program.inputs_of("parameter"))}
        places = [(order.get(name, len(order)), g) for g in gradients for name in owners.get(g, ("",))]
        places.sort(key=lambda item: item[0])
        norms: dict[fx.Node, fx.Node] = {}
        for group in _by_dtype(gradients):
            low = value_of(group[0]).dtype in (torch.float16, torch.bfloat16)
            options = {"dtype": torch.float32} if low else {}
            made = _insert(program, _aten._foreach_norm.Scalar, (group, self.norm_type), options)
            norms |= {g: _insert(program, operator.getitem, (made, i)) for i, g in enumerate(group)}
        every = [norms[gradient] for _, gradient in places]
        stacked = _insert(program, _aten.stack.default, (every,))
        total = _insert(program, _aten.linalg_vector_norm.default, (stacked, self.norm_type))
        if self.keep_norm:
            _insert(program, _aten.copy_.default, (norm_state(program, total), total))
        total = _insert(program, _aten.add.Tensor, (total, 1e-6))
        coefficient = _insert(program, _aten.reciprocal.default, (total,))
        coefficient = _insert(program, _aten.mul.Tensor, (coefficient, self.max_norm))
        coefficient = _insert(program, _aten.clamp.default, (coefficient, None, 1.0))
        for group in _by_dtype(gradients):
            _insert(program, _aten._foreach_mul_.Tensor, (group, coefficient))
        ranks = sharding_group(program)
        if ranks is not None:  # of each gradient this rank has a shard
            whole = sorted({name for g in gradients for name in owners.get(g, ())} - gathered_names(program))
            if whole:
                raise GraphoptError(
                    f"clip-gradients: {whole[0]!r} is whole on every rank, while others are sharded, and would count "
                    "once for each rank: give it to fully_shard too"
                )
            agree_on_norms(program, ranks, self.name)


def _check(gradients: Sequence[fx.Node]) -> None:
    """Refuse gradients that cannot be clipped together."""
    odd = next((node for node in gradients if not value_of(node).is_floating_point()), None)
    if odd is not None:
        raise GraphoptError(f"clip-gradients: {odd.name} is a gradient of dtype {value_of(odd).dtype}")
    devices = sorted({str(value_of(node).device) for node in gradients})
    if len(devices) > 1:
        raise GraphoptError(f"clip-gradients: gradients on {', '.join(devices)}; all must lie on one device")


def _clamp(program: Program, gradients: Sequence[fx.Node], limit: float) -> None:
    """The ops of ``clip_grad_value_``."""
    for group in _by_dtype(gradients):
        _insert(program, _aten._foreach_clamp_min_.Scalar, (group, -limit))
        _insert(program, _aten._foreach_clamp_max_.Scalar, (group, limit))


def _insert(program: Program, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
    return program.insert(target, args, kwargs, before=all_gradients_made(program), phase=Phase.UPDATE, origin=_ORIGIN)


def _by_dtype(gradients: Sequence[fx.Node]) -> list[list[fx.Node]]:
    groups: dict[torch.dtype, list[fx.Node]] = {}
    for gradient in gradients:
        groups.setdefault(value_of(gradient).dtype, []).append(gradient)
    return list(groups.values())
