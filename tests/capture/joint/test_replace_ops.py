"""Ops of graphopt's own that take the place of traced ones: the same bits as eager PyTorch, on a CPU."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import _torch
from graphopt.ir.node import Phase, info
from graphopt.ir.ops.layers.dropout import dropout_mask, masked_dropout
from graphopt.ir.ops.layers.softmax import safe_softmax, safe_softmax_
from graphopt.ir.program import Program
from graphopt.passes import FitMemory, Recompute
from tests.support.training import captured, identical

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (0, 3), (5,), (4, 6), (2, 3, 4, 5), (2, 8, 33, 65)]
ROWS = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))


def mean_square(model: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    return model(*args).float().pow(2).mean()


class Attention(nn.Module):
    """Attention with dropout, which goes by softmax and products on a CPU, and dropout behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(32, 96), nn.Linear(32, 32)
        self.drop, self.gate = nn.Dropout(0.1), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.inward(x).view(rows, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        looked = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.3 if self.training else 0.0)
        out: torch.Tensor = x + torch.sigmoid(self.gate(x)) * self.drop(
            self.outward(looked.transpose(1, 2).reshape(x.shape))
        )
        return out


def stacked() -> nn.Module:
    torch.manual_seed(0)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Attention() for _ in range(2)])

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, mask)
            return x

    return Stack()


def hiding() -> torch.Tensor:
    """A causal mask that hides a column of one sequence, all from a row of another and all of a third one."""
    mask = torch.ones(4, 1, 16, 16, dtype=torch.bool).tril()
    mask[0, :, :, 2] = False
    mask[1, :, 3] = False
    mask[2] = False
    return mask


def trained(model: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    """The loss, all gradients, and where the generator stands."""
    torch.manual_seed(5)
    loss = mean_square(model, *args)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]


def ops(program: Program, phase: Phase) -> list[str]:
    return [node.name.rstrip("_0123456789") for node in program.phase_nodes(phase) if node.op == "call_function"]


# --- the ops by themselves -------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("torch.float32", "torch.float64"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_in_two_calls_gives_the_bits_of_dropout(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, p, turned in itertools.product(SHAPES, [0.1, 0.3, 0.37, 0.5, 0.9], [False, True]):
        x, gradient = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        if turned and x.dim() > 1:
            x, gradient = x.transpose(-1, -2), gradient.transpose(-1, -2).contiguous()
        x.requires_grad_()
        torch.manual_seed(1)
        expected = F.dropout(x, p)
        expected.backward(gradient)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        like = torch.empty_like(x)
        mask = dropout_mask(like.shape, like.stride(), p, device=like.device)
        result = masked_dropout(x.detach(), mask, p)
        assert torch.equal(torch.get_rng_state(), state)
        assert identical(result, expected.detach())
        assert result.stride() == expected.stride()
        assert identical(masked_dropout(gradient, mask, p), x.grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safe_softmax_gives_the_bits_of_the_op_it_stands_for(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, kind in itertools.product([s for s in SHAPES if s], range(6)):
        x = torch.randn(shape, generator=generator).to(dtype)
        if x.numel():
            rows = x.view(-1, shape[-1])
            if kind in (1, 4):
                rows[0] = -math.inf
            if kind in (2, 4):
                rows[-1, 0] = math.nan
            if kind == 3:
                rows[:, 0] = -math.inf
            if kind == 4:
                rows[-1, -1] = math.inf
            if kind == 5:
                rows[:] = -math.inf
        for dim in {-1, 0}:
            expected = torch.ops.aten._safe_softmax.default(x, dim)
            result = safe_softmax(x, dim)
            assert torch.equal(result.isnan(), expected.isnan())
            assert identical(result.nan_to_num(), expected.nan_to_num())
            assert result.stride() == expected.stride()
        expected = safe_softmax(x, -1)
        assert identical(safe_softmax_(x, -1).nan_to_num(), expected.nan_to_num())
        assert identical(x.nan_to_num(), expected.nan_to_num())


# --- in programs -----------------------------------------------------------------------------------------------------


NAMED = [Recompute("layers.*")]
FITTED = [FitMemory("75%", cost="roofline")]


@pytest.mark.sweep(but=("float32",))
@pytest.mark.parametrize(
    ("dtype", "passes"),
    [
        (torch.float32, []),
        (torch.float32, NAMED),
        (torch.float32, FITTED),
        (torch.bfloat16, []),
        (torch.bfloat16, NAMED),
    ],
    ids=["float32", "float32-named", "float32-fitted", "bfloat16", "bfloat16-named"],
)
def test_training_with_dropout_and_hidden_rows_equals_eager(dtype: torch.dtype, passes: list[graphopt.Pass]) -> None:
    """In 16 bits too, where ATen's dropout of one call rounds its gradient otherwise than eager PyTorch does."""
    for args in ((ROWS.to(dtype),), (ROWS.to(dtype), hiding())):
        model = stacked().to(dtype)
        expected = trained(copy.deepcopy(model), *args)
        assert all(map(identical, trained(graphopt.optimize(model, passes), *args), expected))


@pytest.mark.sweep
def test_sizes_that_differ_from_call_to_call_keep_their_bits() -> None:
    model = stacked()
    optimized = graphopt.optimize(
        copy.deepcopy(model), [Recompute("layers.*")], dynamic_shapes={"x": {0: torch.export.Dim("rows", min=2)}}
    )
    for rows in (4, 3):
        model.zero_grad(), optimized.zero_grad()
        assert all(map(identical, trained(optimized, ROWS[:rows]), trained(model, ROWS[:rows])))
    assert "masked_dropout" in ops(optimized.program, Phase.FORWARD)


@pytest.mark.sweep
def test_a_result_of_dropout_is_made_again_from_its_mask() -> None:
    """Nothing is drawn again where the result of dropout is dropped and its mask is kept."""
    program = captured(stacked(), ROWS, loss=mean_square)
    graphopt.Pipeline([FitMemory("90%", cost="roofline")]).run(program)
    again = ops(program, Phase.RECOMPUTE)
    assert again
    assert not any("rng" in op for op in again)


@pytest.mark.sweep
def test_the_mask_of_a_checkpoint_is_kept_with_it() -> None:
    program = captured(stacked(), ROWS, loss=mean_square)
    graphopt.Pipeline([Recompute("layers.*.drop")]).run(program)
    drawn = [node for node in program.nodes if "run_with_rng_state" in node.name]
    assert {info(node).module for node in drawn} == {"layers.0", "layers.1"}  # of attention alone


class Dropping(nn.Module):
    """One kind of dropout between two layers."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        self.inward, self.outward, self.kind, self.p = nn.Linear(32, 32), nn.Linear(32, 32), kind, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        if self.kind == "in place":
            x = F.dropout(x, self.p, self.training, inplace=True)
        elif self.kind == "turned":
            x = F.dropout(x.transpose(1, 2), self.p, self.training).transpose(1, 2)
        elif self.kind == "expanded":
            x = F.dropout(x[:, :1].expand(-1, 16, -1), self.p, self.training) + x
        elif self.kind == "alpha":
            x = F.alpha_dropout(x, self.p, self.training)
        elif self.kind == "channels":
            x = F.dropout1d(x, self.p, self.training)
        else:
            x = F.scaled_dot_product_attention(x, x, x, dropout_p=self.p, is_causal=True)
        out: torch.Tensor = self.outward(torch.tanh(x))
        return out


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["in place", "turned", "expanded", "alpha", "channels", "attention"])
def test_dropout_of_nothing_of_some_and_of_all_equals_eager(kind: str) -> None:
    """Where nothing or all is dropped, nothing is drawn."""
    for p in (0.0, 0.3, 1.0):
        model = Dropping(kind, p)
        expected = trained(copy.deepcopy(model), ROWS)
        assert all(map(identical, trained(graphopt.optimize(model, [Recompute("inward")]), ROWS), expected)), p


def test_inductor_gets_ops_that_it_can_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given torch's ops in place of graphopt's, but for the one that draws."""
    seen: set[str] = set()

    def compiler(module: torch.fx.GraphModule, inputs: Sequence[Any], owned: Any) -> _torch.InductorCode:
        seen.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return _torch.InductorCode(module.forward, module.forward, ())

    monkeypatch.setattr(_torch, "compile_with_inductor", compiler)
    model = stacked()
    expected = trained(copy.deepcopy(model), ROWS, hiding())
    optimized = graphopt.optimize(model, [], backend="inductor")
    assert all(map(identical, trained(optimized, ROWS, hiding()), expected))
    assert {name for name in seen if name.startswith("graphopt")} == {"graphopt.dropout_mask.default"}
