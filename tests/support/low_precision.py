"""A pass that computes linear layers in low precision, and models that this harms in one known place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

import torch
from torch import fx, nn

from graphopt import Changed, GraphoptError, Pass, Phase, Program
from graphopt.capture import CaptureSession
from graphopt.ir.node import Stage, info, set_value
from graphopt.ir.ops import schema
from graphopt.rewriting.pass_ import Numerics
from graphopt.runtime.comparison.trial import Trial


@final
@dataclass(frozen=True)
class LowLinear(Pass):
    """Computes linear layers in ``dtype``, but for those whose module or op is denied."""

    name: ClassVar[str] = "low-linear"
    stage: ClassVar[Stage] = "forward"
    numerics: ClassVar[Numerics] = "changes"

    dtype: str = "bfloat16"
    deny: tuple[str, ...] = ()

    def apply(self, program: Program) -> Changed:
        calls = list(program.phase_nodes(Phase.FORWARD))
        known = {info(node).module for node in calls} | {schema.op_name(node) for node in calls}
        if not known.issuperset(self.deny):
            raise GraphoptError(f"deny names {set(self.deny) - known}, and there are {known}")
        found = [
            node for node in calls if node.target is torch.ops.aten.linear.default
            and not {info(node).module, schema.op_name(node)}.intersection(self.deny)
        ]  # fmt: skip
        for node in found:
            for source in dict.fromkeys(node.all_input_nodes):
                node.replace_input_with(source, self._to(program, source, getattr(torch, self.dtype), before=node))
            set_value(node, program.propagate(node))
            readers = list(node.users)
            up = self._to(program, node, torch.float32, after=node)
            for reader in readers:
                reader.replace_input_with(node, up)
        return Changed({"low precision ops": len(found)}, reason="everything is denied")

    def _to(self, program: Program, source: fx.Node, dtype: torch.dtype, **place: fx.Node) -> fx.Node:
        (like,) = place.values()
        return program.insert(
            torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}, phase=Phase.FORWARD, like=like,
            origin="low-linear", **place,
        )  # fmt: skip


class Chain(nn.Module):
    """Linear layers of width 4 one after the other, each the identity times its factor."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in factors)
        with torch.no_grad():
            for layer, factor in zip(self.layers, factors, strict=True):
                layer.weight.copy_(torch.eye(4) * factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def chain(*factors: float, optimizer: bool = False) -> dict[str, Any]:
    """A target whose batch is all ones."""
    model = Chain(*factors)
    target = {"model": model, "example_inputs": (torch.ones(2, 4),), "loss": mean}
    return {**target, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)} if optimizer else target


def exact() -> dict[str, Any]:
    """Powers of two: every value is exact in low precision, but sums that bfloat16 rounds."""
    return chain(2.0, 0.5, 1.0)


def overflowing() -> dict[str, Any]:
    """What the third layer of five gives is too large for float16."""
    return chain(1.0, 2.0**8, 2.0**9, 2.0**-9, 2.0**-8)


def unfit() -> dict[str, Any]:
    """A weight of the third layer of five is too large for float16; all values fit."""
    return chain(2.0**-9, 1.0, 2.0**17, 1.0, 2.0**-8)


def training() -> dict[str, Any]:
    """A whole step."""
    return chain(2.0, 0.5, 1.0, optimizer=True)


def trial(target: dict[str, Any], stage: Literal["joint", "step"] = "joint") -> Trial:
    """What can be tried on a target."""
    session = CaptureSession(
        target["model"], target["example_inputs"], loss=target.get("loss"), optimizer=target.get("optimizer")
    )
    return Trial(session, stage)
