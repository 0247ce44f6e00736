"""Casts to low precision, before differentiation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import fx

from graphopt import _torch
from graphopt.errors import GraphoptError, choice
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import DTYPE_NAMES
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Changed, Numerics, Pass, PassStage
from graphopt.rewriting.precision.autocast_rules import LOW_DTYPES, Autocast, tensor_leaves
from graphopt.rewriting.precision.cast_insertion import Rewriter
from graphopt.rewriting.precision.casts import cancel_casts, is_cast, merge_casts, repeat_casts
from graphopt.rewriting.precision.kernels import check_kernels
from graphopt.rewriting.precision.levels import Policy
from graphopt.rewriting.precision.master_weights import cast_late, hold_copies
from graphopt.rewriting.precision.op_selection import Selection, check_entries
from graphopt.rewriting.precision.options import LossScaleOptions
from graphopt.rewriting.precision.scaling import LossScaling, check_and_update, scale_backward
from graphopt.rewriting.precision.written_casts import open_regions, plain_dtypes

__all__ = ["MixedPrecision"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "16": "float16", "f16": "float16"}
_LEVELS = {"1": "O1", "2": "O2", "01": "O1", "02": "O2"}
"""Other words for dtypes and levels."""


@final
@dataclass(frozen=True)
class MixedPrecision(LossScaleOptions, Pass):
    """Run ops in bfloat16 or float16 where that is accurate enough, by casts that are part of the program.

    The casts are put into the forward program, and differentiation makes their backward: parameters, gradients and
    optimizer state stay float32. Integers, complex numbers and float64 are not touched, explicit dtypes (``x.float()``,
    ``dtype=``) and the model's own autocast regions are respected, and the random stream stays as it is.

    ``O1`` does what ``torch.autocast`` does on the device, op by op (``graphopt.rewriting.precision.autocast_lists``
    gives the rules, which are asked of the installed torch). A parameter is cast once and the cast shared; any other
    tensor is cast to a dtype once in forward, while gradients are summed in float32 as autocast sums them; what
    backward reads of a cast parameter, or of a value that was cast up, is cast again instead of kept.

    The model is captured under autocast, so that its Python reads the dtypes that tensors have there
    (``x.to(y.dtype)``). Losses and gradients equal eager PyTorch's under autocast to the last bit, but for kernels that
    call other ops, in which eager autocast casts unseen (``torch.nn.Bilinear`` on a CPU).

    ``O2`` runs every op in the low dtype but normalisation, whose arguments are cast up, whose parameters stay float32
    and whose result is cast down, and losses. Every other parameter is cast once, at the beginning of the program, but
    for one that forward changes, which is cast where it is read.
    Losses and gradients are about as far from float32's as under O1: losses within 1 % in bfloat16 and 0.2 % in float16
    on the small models of the tests, gradients within twice O1's distance. In a whole step the low-precision copies of
    the parameters live across steps beside their float32 masters, which are the model's own parameters: what the
    optimizer updates and what ``state_dict`` holds stays float32, every update renews the copies, and gradients wait
    for it in the low dtype. A parameter that is changed from outside is copied again.

    In float16 small gradients vanish, so the loss is scaled: with the options of ``ScaleLoss`` (``init_scale`` or
    ``init_loss_scaling``, and so on), and with ``graphopt.scaler(model)`` in the loop around a drop-in model. In
    bfloat16 it is not, unless ``scale_loss=True`` asks for it.

    Outputs have the dtype that they have without the pass (autocast returns low precision), so a loss outside of the
    program sees float32, and a loss inside is float32. Buffers that forward updates stay float32: what an op writes
    into one is cast to that, also where eager autocast fails with an error (``index_put_``, ``index_add_``).

    Args:
        dtype: ``bfloat16`` or ``float16``, also as ``bf16``, ``fp16``, ``half``, or torch's object.
        level: ``O1`` or ``O2``.
        allow: what to run in the low dtype whatever the level says: names of ops (``softmax``, ``aten.softmax``), of
            tensors, of modules (everything in them), or globs. A tensor counts more than a module, a longer path more
            than a shorter one, an op's name less than either.
        deny: what to run in float32, in the same words.
        scale_loss: whether to scale the loss; by default in float16 only.
        init_scale: see ``ScaleLoss``, as for all others.

    Raises:
        GraphoptError: for an unknown dtype or level, a name in both lists or one that matches nothing, and for an op
            without a kernel for the dtype on this device.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [MixedPrecision()], loss=loss).prepare(x)
        >>> [line.split(":")[0] for line in step.records[0].changed.lines]
        ['bf16']
    """

    name: ClassVar[str] = "mixed-precision"
    stage: ClassVar[PassStage] = "forward"
    also: ClassVar[tuple[PassStage, ...]] = ("joint", "step")
    numerics: ClassVar[Numerics] = "changes"
    after: ClassVar[tuple[str, ...]] = ("data-parallel",)
    changes_signature: ClassVar[bool] = True

    dtype: str = "bfloat16"
    level: str = "O1"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    scale_loss: bool | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", choice("mixed-precision: dtype", self.dtype, tuple(LOW_DTYPES), _DTYPES))
        object.__setattr__(self, "level", choice("mixed-precision: level", self.level, ("O1", "O2"), _LEVELS))
        check_entries(self.allow, self.deny)
        if self.scaling is None and self.given():
            raise GraphoptError(
                f"{', '.join(self.given())}: {self.dtype} is not scaled; give scale_loss=True too, or leave "
                f"{'it' if len(self.given()) == 1 else 'them'} out"
            )

    @property
    def scaling(self) -> LossScaling | None:
        """How the loss is scaled; None where it is not."""
        scales = self.dtype == "float16" if self.scale_loss is None else self.scale_loss
        return self.settings() if scales else None

    @property
    def autocast(self) -> torch.dtype | None:
        """O1 does what autocast does, so the model is captured under it, and its Python reads the dtypes there."""
        return LOW_DTYPES[self.dtype] if self.level == "O1" else None

    def concerns(self, program: Program) -> bool:
        """At the step stage only where copies are kept or the loss is scaled."""
        return program.stage != "step" or self.level == "O2" or self.scaling is not None

    def apply(self, program: Program) -> Changed:
        """See the class.

        Puts casts into a forward program, merges those of a joint program and scales its backward, and lets a step
        program hold low-precision copies and check its gradients.
        """
        if program.stage == "forward":
            return self._insert(program)
        return self._merge(program) if program.stage == "joint" else self._update(program)

    def _insert(self, program: Program) -> Changed:
        low = LOW_DTYPES[self.dtype]
        under = open_regions(program) > 0
        outputs = plain_dtypes(program, low) if under else _output_dtypes(program)
        rules = Autocast(low, program.fake_mode)
        policy = Policy(
            rules, "O2" if self.level == "O2" else "O1", [node for node, _ in program.inputs_of("parameter")]
        )
        selection = Selection(program, self.allow, self.deny)
        rewriter = Rewriter(program, rules, policy, selection, early=self.level == "O2", outputs=outputs, under=under)
        rewriter.run()
        if not rewriter.casts and not rewriter.changes:
            return Changed(reason="every op runs in the wanted dtype already")
        check_kernels(_calls(program))
        lower, full = _by_precision(program, low)
        lines = list(_lines(lower, full, rewriter.plain, low))
        if self.autocast is not None and not under:
            lines.append("captured without autocast: a dtype that the model's Python reads is the plain program's")
        counts = {"casts": rewriter.casts, "low precision ops": lower.total(), "fp32 ops": full.total()}
        return Changed(counts, lines=tuple(lines))

    def _merge(self, program: Program) -> Changed:
        cancelled = cancel_casts(program)
        merged = merge_casts(program)
        repeated = repeat_casts(program, parameters=self.level == "O1")
        scaled = 0 if self.scaling is None else scale_backward(program, self.scaling, self.name)
        counts = {"merged": merged, "cancelled": cancelled, "repeated in backward": repeated}
        what = "tangents scaled" if program.inputs_of("tangent") else "losses scaled"
        return Changed(counts | ({what: scaled} if scaled else {}), reason="every tensor is cast once already")

    def _update(self, program: Program) -> Changed:
        counts = dict[str, int]()
        if self.level == "O2":
            counts["gradients cast late"] = cast_late(program)
        if self.scaling is not None:
            counts["gradients checked"], kept = check_and_update(program, self.scaling, self.name)
            counts |= {"tensors kept for a skipped step": kept} if kept else {}
        if self.level == "O2":
            copies = hold_copies(program, self.name)
            counts["low-precision copies held"] = len(copies)
        return Changed(counts, reason="no parameter is cast")


def _output_dtypes(program: Program) -> list[torch.dtype | None]:
    values = [value_of(value) if isinstance(value, fx.Node) else None for value in program.output_values]
    return [value.dtype if isinstance(value, torch.Tensor) else None for value in values]


def _calls(program: Program) -> Iterator[fx.Node]:
    """The calls of a program and of the regions in it."""
    graphs = [program.graph]
    pending = list(program.attributes.values())
    while pending:
        body = pending.pop()
        graphs.append(body.graph)
        pending += [child for child in body.children() if isinstance(child, fx.GraphModule)]
    for graph in graphs:
        yield from (node for node in graph.nodes if node.op == "call_function")


def _by_precision(program: Program, low: torch.dtype) -> tuple[Counter[str], Counter[str]]:
    """How many calls of each op give results of the low dtype and of float32; casts and views do not count."""
    lower, full = Counter[str](), Counter[str]()
    for node in _calls(program):
        if not isinstance(node.target, _torch.OpOverload) or is_cast(node) or schema.is_view(node):
            continue
        dtypes = {tensor.dtype for tensor in tensor_leaves(value_of(node))}
        if low in dtypes:
            lower[schema.op_name(node)] += 1
        elif torch.float32 in dtypes:
            full[schema.op_name(node)] += 1
    return lower, full


def _lines(lower: Counter[str], full: Counter[str], plain: Counter[str], low: torch.dtype) -> Iterator[str]:
    headed = ((DTYPE_NAMES[low], lower), (DTYPE_NAMES[torch.float32], full), ("as in the plain program", plain))
    for head, counter in headed:
        if counter:
            ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
            yield f"{head}: {', '.join(f'{count} {name}' for name, count in ordered)}"
