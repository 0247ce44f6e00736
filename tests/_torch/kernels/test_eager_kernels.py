"""Ops for which torch has other code when it traces: recurrent layers, interpolation, losses with margins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import CaptureError, Pass
from graphopt.ir.ops.values import storage_bytes
from graphopt.passes import FitMemory, MixedPrecision, Offload, Recompute
from tests.support.properties import examples
from tests.support.training import mean_square

ROWS = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, kind: str, hidden: int = 16, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layer = getattr(nn, kind)(8, hidden, **options)
        width = options.get("proj_size") or hidden
        self.last = nn.Linear(width * (2 if options.get("bidirectional") else 1), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.layer(self.first(x))[0])
        return result


def steps(model: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    losses = [run() for _ in range(3)]
    return [*losses, *(parameter.detach() for parameter in model.parameters()), torch.get_rng_state()]


def trained(base: nn.Module, passes: list[Pass] | None, x: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
    """Three steps, eager (None) or as a program."""
    model = copy.deepcopy(base)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    if passes is not None:
        step = graphopt.optimize_step(model, optimizer, passes, loss=mean_square)
        return steps(model, lambda: step(x)), step

    def eager() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mean_square(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return steps(model, eager), None


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.sweep
@examples(6)
@given(
    kind=st.sampled_from(["LSTM", "GRU", "RNN"]), layers=st.integers(1, 2), hidden=st.sampled_from([3, 16, 40]),
    both=st.booleans(), first=st.booleans(), bias=st.booleans(), p=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_recurrent_layers_equal_eagers(
    kind: str, layers: int, hidden: int, both: bool, first: bool, bias: bool, p: float
) -> None:
    torch.manual_seed(0)
    p = p if layers > 1 else 0.0
    base = Recurrent(kind, hidden, num_layers=layers, bidirectional=both, batch_first=first, bias=bias, dropout=p)
    expected, _ = trained(base, None, ROWS)
    found, step = trained(base, [], ROWS)
    assert same(found, expected)
    assert graphopt.measure_peak(lambda: step(ROWS)).allocated_peak_bytes == step.program.memory().allocated_peak_bytes


PASSES: dict[str, list[Pass]] = {
    "recompute": [Recompute(["first", "last"])],
    "fit": [FitMemory("93%", cost="roofline")],
    "offload": [Offload(("first",), tier="disk", min_bytes=0)],
}


@pytest.mark.sweep
@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_passes_keep_their_bits(kind: str, passes: list[Pass]) -> None:
    torch.manual_seed(0)
    base = Recurrent(kind, num_layers=2, dropout=0.3)
    expected, _ = trained(base, None, ROWS)
    found, step = trained(base, passes, ROWS)
    assert step.records[0].changed
    assert same(found, expected)
    assert graphopt.measure_peak(lambda: step(ROWS)).allocated_peak_bytes <= step.program.memory().allocated_peak_bytes


@pytest.mark.sweep
def test_an_lstm_under_autocast() -> None:
    torch.manual_seed(0)
    base = Recurrent("LSTM")
    model = copy.deepcopy(base)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = mean_square(model, ROWS)
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    assert torch.equal(graphopt.optimize_step(base, optimizer, [MixedPrecision()], loss=mean_square)(ROWS), expected)


def test_the_workspace_of_an_lstm_is_counted() -> None:
    program = graphopt.capture(Recurrent("LSTM", 64), (ROWS,))
    (layer,) = [node for node in program.nodes if "lstm_layer" in str(node.target) and "backward" not in node.name]
    assert storage_bytes(layer.meta["val"][3]) > 10_000


@pytest.mark.sweep
def test_an_lstm_of_varying_sizes_is_refused_with_the_way_out() -> None:
    shapes = ({1: torch.export.Dim("batch", min=2, max=64)},)
    with pytest.raises(CaptureError, match=r"known for fixed sizes only.*mkldnn\.flags\(enabled=False\)"):
        graphopt.optimize(nn.LSTM(8, 4), dynamic_shapes=shapes)(ROWS)


def test_an_lstm_with_projections_and_cells() -> None:
    torch.manual_seed(0)
    base = Recurrent("LSTM", proj_size=4)
    assert same(trained(base, [], ROWS)[0], trained(base, None, ROWS)[0])


class Cells(nn.Module):
    """A cell, called for each row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for row in x:
            state = self.cell(row, state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[return-value]


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["GRUCell", "LSTMCell", "RNNCell"])
def test_cells_equal_eagers(kind: str) -> None:
    torch.manual_seed(0)
    base = Cells(kind)
    assert same(trained(base, [], ROWS)[0], trained(base, None, ROWS)[0])


# --- ops that were decomposed ----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A function of an image, or of rows, with a factor that is trained."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1.5]))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.factor)


MODES = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3, "nearest": 2, "nearest-exact": 2, "area": 2}


@examples(12)
@given(
    mode=st.sampled_from(sorted(MODES)), factor=st.sampled_from([0.5, 1.7, 2.0, 2.5]), as_size=st.booleans(),
    align=st.booleans(), antialias=st.booleans(),
)  # fmt: skip
def test_interpolation_equals_eagers(mode: str, factor: float, as_size: bool, align: bool, antialias: bool) -> None:
    x = torch.randn(2, 3, *range(6, 6 + MODES[mode]))
    options: dict[str, Any] = {"mode": mode}
    if as_size:
        options["size"] = [int(size * factor) for size in x.shape[2:]]
    else:
        options["scale_factor"] = factor
    if "linear" in mode or mode == "bicubic":
        options["align_corners"] = align
        options["antialias"] = antialias and mode in ("bilinear", "bicubic")
    base = Scaled(lambda y: F.interpolate(y, **options))
    found, step = trained(base, [], x)
    assert same(found, trained(base, None, x)[0])
    assert len([node for node in step.program.nodes if "upsample" in node.name]) in (0, 2)


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "multi margin": lambda y: F.multi_margin_loss(y, torch.tensor([0, 3, 1, 2, 5, 4])),
    "multilabel margin": lambda y: F.multilabel_margin_loss(y, torch.tensor([[0, 2, -1, 1, 1, 1]] * 6)),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
}


@pytest.mark.sweep(but=("multi margin", "hardshrink"))
@pytest.mark.parametrize("function", LOSSES.values(), ids=LOSSES)
def test_other_ops_equal_eagers(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(6, 6)
    assert same(trained(Scaled(function), [], x)[0], trained(Scaled(function), None, x)[0])


def test_what_was_put_aside_is_back_after_a_capture() -> None:
    op = torch.ops.aten.upsample_bilinear2d.vec
    before = {key: value for key, value in op.py_kernels.items() if "Composite" in str(key) or "Autograd" in str(key)}
    graphopt.capture(Scaled(lambda y: F.interpolate(y, scale_factor=2.0)), (torch.randn(1, 3, 4, 4),))
    assert before
    assert before.items() <= op.py_kernels.items()
    assert not any("Composite" in str(key) for key in torch.ops.aten.gru_cell.default.py_kernels)
