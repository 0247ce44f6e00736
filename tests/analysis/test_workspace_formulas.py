"""What kernels allocate for themselves, by formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphopt
from graphopt import Program
from graphopt.analysis import workspace_formulas
from graphopt.analysis.costs.cost import DeviceProfile
from graphopt.analysis.workspace import measured_usage
from tests.support.training import mean_square

CPU = DeviceProfile("a CPU", {"float32": 1e12}, 1e11, 1e-6, 1e10, 10**11)


def _temporaries(program: Program, op: str) -> list[int]:
    nodes = [node for node in program.nodes if op in str(node.target)]
    return [usage.temporary for usage in measured_usage(nodes)]


def _attended(rows: int, heads: int, tokens: int, width: int, groups: int | None = None) -> Program:
    def loss(_: nn.Module, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=groups is not None)
        return mixed.float().square().mean()

    def tensor(count: int) -> torch.Tensor:
        return torch.empty(rows, count, tokens, width, dtype=torch.bfloat16, device="meta", requires_grad=True)

    return graphopt.capture(nn.Linear(1, 1), (tensor(heads), tensor(groups or heads)), loss=loss, device="h100-80gb")


def test_flash_attention_sums_the_gradient_of_queries_in_float32() -> None:
    program = _attended(2, 4, 100, 64)
    rows = 128  # of 100, rounded up to the rows of a block
    assert _temporaries(program, "flash_attention_backward") == [2 * 4 * rows * (64 + 1) * 4]
    assert _temporaries(program, "flash_attention.default") == [0]


@pytest.mark.sweep
def test_grouped_attention_makes_gradients_for_each_head_of_queries_first() -> None:
    plain, grouped = _attended(1, 8, 128, 64), _attended(1, 8, 128, 64, groups=2)
    more = 2 * 128 * 8 * 64 * 2
    (least,) = _temporaries(plain, "flash_attention_backward")
    assert _temporaries(grouped, "flash_attention_backward") == [least + more]


@pytest.mark.sweep(but=("64-False",))
@pytest.mark.parametrize(("tokens", "known"), [(64, False), (4096, True)])
def test_an_embedding_sorts_many_indices(tokens: int, known: bool) -> None:
    model = nn.Embedding(1000, 16)
    indices = torch.zeros(1, tokens, dtype=torch.int64)
    (found,) = _temporaries(
        graphopt.capture(model, (indices,), loss=mean_square, device="h100-80gb"), "embedding_dense_backward"
    )
    pieces = -(-tokens // 10) + 1000
    assert found == (4 * tokens * 8 + pieces * 16 * 4 + 3 * pieces * 8 if known else 0)


def test_calls_that_need_nothing_have_no_temporaries() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    program = graphopt.capture(model, (torch.empty(4, 8),), loss=mean_square, device="h100-80gb")
    for op in ("mm", "gelu", "sum", "mul"):
        assert set(_temporaries(program, f"aten.{op}")) <= {0}
    assert _temporaries(program, "native_layer_norm_backward") == [2 * 256 * 8 * 4]


def test_what_a_library_chooses_on_the_device_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    workspace_formulas._told.clear()
    model = nn.Conv2d(3, 4, 3)
    program = graphopt.capture(model, (torch.empty(2, 3, 8, 8),), loss=mean_square, device="h100-80gb")
    program.memory()
    program.memory()
    said = [record.message for record in caplog.records if "aten.convolution " in record.message]
    assert len(said) == 1
    assert "chosen there by a library and is counted for filters of 3 × 3 in float32" in said[0]


@pytest.mark.parametrize(
    ("how", "bytes_of_filters"),
    [
        ({}, 25 * 4 * 16 * 32),
        ({"stride": 2}, 0),
        ({"dilation": 2}, 0),
        ({"groups": 2}, 0),
        ({"dtype": torch.float16}, 0),
    ],
)
def test_filters_of_3_by_3_are_transformed_as_a_recording_shows(how: dict[str, Any], bytes_of_filters: int) -> None:
    model = nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 32, 3, padding=1, **{"dtype": None, **how}))
    model.to(how.get("dtype", torch.float32))
    x = torch.empty(2, 4, 8, 8, dtype=how.get("dtype", torch.float32))
    program = graphopt.capture(model, (x,), loss=mean_square, device="h100-80gb")
    assert _temporaries(program, "convolution.") == [0, bytes_of_filters]
    assert _temporaries(program, "convolution_backward") == [bytes_of_filters, 0]


def test_of_what_nothing_is_known_it_is_said_that_it_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    workspace_formulas._told.clear()
    program = graphopt.capture(
        nn.Linear(4, 4), (torch.empty(4, 4),), loss=lambda m, x: torch.fft.rfft(m(x)).abs().sum(), device="h100-80gb"
    )
    program.memory()
    assert any(
        "aten._fft_r2c" in r.message and "is not counted: the peak may be higher" in r.message for r in caplog.records
    )


def test_attention_on_a_cpu_is_about_what_is_measured() -> None:
    def loss(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x).square().mean()

    def found(device: Any) -> list[int]:
        x = torch.empty(1, 2, 600, 32, requires_grad=True)
        program = graphopt.capture(nn.Linear(1, 1), (x,), loss=loss, device=device)
        return _temporaries(program, "flash_attention_for_cpu")

    measured, computed = found(None), found(CPU)
    assert measured[0] > 0
    for one, other in zip(measured, computed, strict=True):
        assert abs(one - other) <= 0.5 * max(one, other)


def test_a_processor_chooses_for_convolutions_too(caplog: pytest.LogCaptureFixture) -> None:
    """What it allocates is counted where its profile knows it, and said not to be elsewhere."""
    workspace_formulas._told.clear()
    model, inputs = nn.Conv2d(2, 2, 3, dilation=2).double(), (torch.zeros(1, 2, 9, 9, dtype=torch.float64),)
    known = {"aten.convolution.default(float64[1, 2, 9, 9], float64[2, 2, 3, 3], float64[2], [1, 1], [0, 0], [2, 2], "
             "False, [0, 0], 1)": 3600}  # fmt: skip
    mine = replace(CPU, temporaries=known)
    assert _temporaries(graphopt.capture(model, inputs, device=mine), "convolution.default") == [3600]
    assert not any("aten.convolution " in record.message for record in caplog.records)
    assert _temporaries(graphopt.capture(model, inputs, device=CPU), "convolution.default") == [0]
    assert any("aten.convolution allocates for itself on a CPU" in record.message for record in caplog.records)
