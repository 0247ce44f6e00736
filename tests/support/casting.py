"""What the tests of mixed precision share: models without dropout, eager PyTorch under autocast, rewritten programs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from examples.models import GPT, GPTConfig, next_token_loss
from graphopt import Pass, Phase, Pipeline, Program
from graphopt.capture import CaptureSession
from graphopt.ir.node import info, value_of
from graphopt.rewriting.precision.casts import is_cast
from graphopt.runtime.programs.rewrite import Rewritten, rewrite
from tests.support.training import Loss, identical, mean_square, results
from tests.support.zoo import ZOO, own_loss

LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every probability of dropping out at 0."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "dropout_p", "attention_dropout", "dropout_prob", "dropout_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def model_of(name: str) -> tuple[nn.Module, list[tuple[Any, ...]], Loss]:
    """A model without dropout, two batches and its loss; ``GPT`` is the example's, all others are from the zoo."""
    torch.manual_seed(0)
    if name != "GPT":
        model, batches = ZOO[name].build(2)
        return without_dropout(model), [(batch,) for batch in batches], own_loss
    model = GPT(GPTConfig(vocab=31, context=16, d=32, layers=2, heads=2)).train()
    return model, [tuple(torch.randint(31, (2, 12)) for _ in range(2)) for _ in range(2)], next_token_loss


def under(dtype: str, loss: Loss = mean_square) -> Loss:
    """The loss as eager PyTorch computes it under autocast."""

    def cast(model: nn.Module, *batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=LOW[dtype]):
            return loss(model, *batch)

    return cast


def rewrite_all(
    model: nn.Module, batch: Sequence[Any], passes: str | Sequence[Pass], loss: Loss | None = mean_square
) -> Rewritten:
    """A capture with its passes, up to the joint program."""
    return rewrite(CaptureSession(model, tuple(batch), loss=loss), Pipeline(passes), until="joint")


def forward_program(model: nn.Module, batch: Sequence[Any], *passes: Pass, loss: Loss | None = None) -> Program:
    """A forward program after passes."""
    pipeline = Pipeline(passes)
    program = CaptureSession(model, tuple(batch), loss=loss).forward(pipeline.autocast)
    pipeline.run(program)
    return program


def loss_and_gradients(
    model: nn.Module, batch: Sequence[Any], passes: str | Sequence[Pass], loss: Loss = mean_square
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a rewritten joint program gives."""
    found, _ = results(rewrite_all(model, batch, passes, loss).program, copy.deepcopy(model), *batch)
    gradients = {spec.target: value for spec, value in found.items() if spec.role == "gradient"}
    return next(value for spec, value in found.items() if spec.role == "loss"), gradients


def eager_loss_and_gradients(
    model: nn.Module, batch: Sequence[Any], loss: Loss = mean_square
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What eager PyTorch gives."""
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    value = loss(model, *batch)
    value.backward()
    return value.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_as_under_autocast(
    model: nn.Module, batch: Sequence[Any], dtype: str, passes: str | Sequence[Pass], loss: Loss = mean_square
) -> None:
    """Loss and gradients are those of eager PyTorch under autocast, to the last bit; the loss in float32."""
    value, gradients = loss_and_gradients(model, batch, passes, loss)
    expected, theirs = eager_loss_and_gradients(model, batch, under(dtype, loss))
    assert identical(value, expected.float())
    assert gradients.keys() == theirs.keys()
    wrong = [name for name in theirs if not identical(gradients[name], theirs[name])]
    assert not wrong, f"{len(wrong)} of {len(theirs)} gradients differ: {wrong[:5]}"


def casts(program: Program, *phases: Phase) -> list[fx.Node]:
    """The casts of some phases, forward's by default."""
    return [node for node in program.phase_nodes(*phases or (Phase.FORWARD,)) if is_cast(node)]


def dtype_of(program: Program, name: str) -> torch.dtype:
    """The dtype of the tensor of a name."""
    (node,) = program.find(name).values()
    return value_of(node).dtype


def made_by(program: Program, op: str) -> list[torch.dtype]:
    """The dtypes of the results of an op, in program order."""
    return [
        value_of(node).dtype
        for node in program.graph.nodes
        if node.op == "call_function" and str(node.target).split(".")[1:2] == [op]
    ]


def origins(program: Program) -> list[str]:
    """Where each cast in a forward program comes from."""
    return [info(node).origin for node in casts(program)]
