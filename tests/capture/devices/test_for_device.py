"""Programs captured for a device that need not be here: without data, as that device would run them."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import GraphoptError, Phase, Pipeline, Program
from graphopt.analysis.costs.cost import PROFILES, DeviceProfile, costs_of
from graphopt.errors import ArgumentError, CaptureError
from graphopt.passes import ClipGradients, FitMemory, FuseUpdate, MixedPrecision, Recompute
from graphopt.rewriting.distributed.prediction.workload import workload_of
from tests.support.properties import examples
from tests.support.training import mean_square


class Block(nn.Module):
    """A block of a transformer, with what a CUDA device runs otherwise than a CPU."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, columns, width = x.shape
        query, key, value = self.into(self.norm(x)).view(rows, columns, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return x + self.scale * self.drop(self.out(mixed.transpose(1, 2).reshape(x.shape)))


def _captured(model: nn.Module, *batch: torch.Tensor | None, device: Any = "h100-80gb", step: bool = False) -> Program:
    optimizer = torch.optim.AdamW(model.parameters()) if step else None
    return graphopt.capture(model, batch, loss=mean_square, optimizer=optimizer, device=device)


def _ops(program: Program) -> Counter[str]:
    return Counter(str(node.target).partition(".")[2] for node in program.nodes if node.op == "call_function")


def test_a_program_is_the_same_from_a_model_with_data_without_data_and_on_meta() -> None:
    with_data = Block()
    with graphopt.without_data():
        without = Block()
    on_meta = copy.deepcopy(with_data).to("meta")
    optimizers = {model: torch.optim.AdamW(model.parameters()) for model in (with_data, without, on_meta)}
    texts = [
        graphopt.capture(model, (x,), loss=mean_square, optimizer=optimizer, device="h100-80gb").to_text()
        for model, optimizer in optimizers.items()
        for x in (torch.empty(2, 9, 32), torch.empty(2, 9, 32, device="meta"))
    ]
    assert len(set(texts)) == 1
    assert "# device: h100-80gb, captured without data" in texts[0]


@pytest.mark.sweep
def test_a_program_for_a_cpu_is_that_of_an_ordinary_capture() -> None:
    model, x = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.GELU()))), torch.empty(64, 8)
    cpu = DeviceProfile("a CPU", {"float32": 1e12}, 1e11, 1e-6, 1e10, 10**11)
    with_data = graphopt.capture(model, (x,), loss=mean_square)
    without = _captured(model.to("meta"), x.to("meta"), device=cpu)
    assert without.to_text().replace("# device: a CPU, captured without data\n", "") == with_data.to_text()
    assert without.memory().bytes == with_data.memory(measure=False).bytes
    plans = [Pipeline([FitMemory("80%", cost="a100-80gb")]).run(program)[0].changed for program in (with_data, without)]
    assert plans[0].counts == plans[1].counts
    assert (plans[0].tensors, plans[0].lines) == (plans[1].tensors, plans[1].lines)


def test_nothing_of_the_model_changes_and_nothing_is_allocated() -> None:
    with graphopt.without_data():
        model = nn.Sequential(nn.Linear(30_000, 30_000, device="cuda"), nn.ReLU())
        x = torch.zeros(64, 30_000, device="cuda")
    before = dict(model.named_parameters())
    program = _captured(model, x, step=True)
    assert dict(model.named_parameters()) == before
    assert all(parameter.grad is None for parameter in before.values())
    assert program.memory().resident_bytes > 3 * 4 * 30_000**2
    assert next(iter(before.values())).is_meta


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dtype", "masked", "device", "wanted"),
    [
        (torch.bfloat16, False, "h100-80gb", "_scaled_dot_product_flash_attention"),
        (torch.float16, False, "a100-40gb", "_scaled_dot_product_flash_attention"),
        (torch.float16, False, "v100-32gb", "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "h100-80gb", "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, True, "h100-80gb", "_scaled_dot_product_efficient_attention"),
        (torch.float64, False, "h100-80gb", "_safe_softmax"),
    ],
)
def test_attention_runs_in_the_kernels_of_the_device(
    dtype: torch.dtype, masked: bool, device: str, wanted: str
) -> None:
    mask = torch.ones(9, 9, dtype=torch.bool) if masked else None
    found = _ops(_captured(Block().to(dtype), torch.empty(2, 9, 32, dtype=dtype), mask, device=device))
    names = [name for name in found if "attention" in name or "softmax" in name]
    assert names[0].startswith(wanted)
    assert not any("for_cpu" in name for name in names)


def test_attention_that_the_user_keeps_out_of_fused_kernels_is_made_of_products() -> None:
    x = torch.empty(2, 9, 32, dtype=torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = _ops(_captured(Block().to(torch.bfloat16), x))
    assert not any("dot_product" in name for name in found)


def test_heads_of_odd_width_are_padded_for_flash_attention() -> None:
    def attend(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x).float().square().mean()

    x = torch.empty(1, 2, 16, 20, dtype=torch.bfloat16, requires_grad=True)
    program = graphopt.capture(nn.Linear(1, 1), (x,), loss=attend, device="h100-80gb")
    (kernel,) = [node for node in program.nodes if "flash_attention.default" in str(node.target)]
    assert kernel.args[0].meta["val"].shape[-1] == 24  # type: ignore[union-attr]
    assert kernel.kwargs["scale"] == 20**-0.5


def test_dropout_and_norms_are_one_kernel_each() -> None:
    found = _ops(_captured(Block(), torch.empty(2, 9, 32)))
    assert found["native_dropout.default"] == found["fused_rms_norm.default"] == 1
    assert found["fused_rms_norm_backward.default"] == 1
    assert not any("dropout_mask" in name for name in found)


def test_autocast_for_cuda_casts_by_the_lists_for_cuda() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return module(x).float().square().mean()

    def norm_dtype(device: str | None, call: Any) -> torch.dtype:
        program = graphopt.capture(model, (torch.empty(2, 8),), loss=call, device=device)
        (norm,) = [node for node in program.nodes if "native_layer_norm.default" in str(node.target)]
        return norm.args[0].meta["val"].dtype  # type: ignore[union-attr]

    assert norm_dtype("h100-80gb", loss) is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm_dtype(None, mean_square) is torch.bfloat16


@pytest.mark.sweep
def test_passes_rewrite_a_program_without_data() -> None:
    model = nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    passes = Pipeline([MixedPrecision("bf16"), Recompute("1"), ClipGradients(1.0)])
    program = graphopt.capture(
        model, (torch.empty(8, 64, 32),), loss=mean_square, optimizer=optimizer, device="h100-80gb", stage="forward"
    )
    while True:
        records = passes.run(program)
        assert all(any(record.changed.counts.values()) for record in records)
        if program.lower is None:
            break
        program = program.lower(program)
    assert program.stage == "step"
    assert list(program.phase_nodes(Phase.RECOMPUTE))
    fused = Pipeline([FuseUpdate()])
    plain = _captured(model, torch.empty(8, 64, 32), step=True)
    assert fused.run(plain)[0].changed.counts["updates moved"] > 0


def test_times_are_those_of_the_device_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = _captured(nn.Sequential(Block(), Block(), Block()), torch.empty(256, 256, 32), step=True)
    monkeypatch.setattr("graphopt.analysis.costs.cost.Measurements.run", _fail)
    monkeypatch.setattr("graphopt.analysis.workspace._measure", _fail)
    seconds = {name: sum(costs_of(program.memory(), name).seconds) for name in ("measured", "roofline", "h100-80gb")}
    assert len(set(seconds.values())) == 1
    assert Pipeline([FitMemory("90%")]).run(program)[0].changed.counts["recomputed"]


@pytest.mark.sweep
def test_mixed_precision_tries_no_kernels_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.rewriting.precision.kernels._attempt", _fail)
    program = graphopt.capture(Block(), (torch.empty(2, 9, 32),), loss=mean_square, device="h100-80gb", stage="forward")
    (record,) = Pipeline([MixedPrecision("bf16")]).run(program)
    assert record.changed.counts["casts"]
    assert program.lower is not None
    Pipeline([MixedPrecision("bf16")]).run(program.lower(program))


@pytest.mark.sweep
def test_exchange_is_planned_by_the_figures_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.analysis.costs.cost.Measurements.run", _fail)
    monkeypatch.setattr("graphopt.rewriting.distributed.prediction.workload._selection_seconds", _fail)
    program = _captured(Block(), torch.empty(2, 9, 32), step=True)
    found, named = (workload_of(program, cost) for cost in ("measured", "h100-80gb"))
    assert (found.backward, found.rates) == (named.backward, named.rates)


def _fail(*_: Any, **__: Any) -> None:
    raise AssertionError("something was run")


@pytest.mark.sweep
def test_auto_is_what_the_device_has_for_tensors() -> None:
    program = _captured(Block(), torch.empty(4, 64, 32), step=True)
    (record,) = Pipeline([FitMemory("auto")]).run(program)
    assert "is within the budget of 84.4 GB" in record.changed.reason
    assert 80 * 10**9 < PROFILES["h100-80gb"].usable_bytes < PROFILES["h100-80gb"].memory_bytes


def test_a_program_is_saved_and_read_with_its_device() -> None:
    program = _captured(Block(), torch.empty(2, 9, 32), step=True)
    read = Program.from_json(program.to_json())
    assert read.to_text() == program.to_text()
    assert read.memory().bytes == program.memory().bytes
    assert costs_of(read.memory(), "measured").seconds == costs_of(program.memory(), "measured").seconds


@pytest.mark.parametrize("run", [Program.to_graph_module])
def test_a_program_without_data_cannot_run(run: Any) -> None:
    program = _captured(Block(), torch.empty(2, 9, 32))
    with pytest.raises(GraphoptError, match=r"captured without data for h100-80gb.*cannot run"):
        run(program)


def test_a_loss_without_gradients_is_refused() -> None:
    with pytest.raises(CaptureError, match="nothing in Linear requires a gradient"):
        _captured(nn.Linear(3, 3).requires_grad_(False), torch.empty(2, 3))


@pytest.mark.parametrize(
    ("device", "said"),
    [("h10080gb", "did you mean 'h100-80gb'"), ("h100", "'h100-80gb'"), (0, "got 0 \\(int\\)"), ("tpu", "one of")],
)
def test_an_unknown_device_is_refused_with_the_near_names(device: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        _captured(nn.Linear(3, 3), torch.empty(2, 3), device=device)


def test_sizes_that_vary_are_refused() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    with pytest.raises(CaptureError, match="device= plans for fixed sizes"):
        graphopt.capture(
            nn.Linear(3, 3), (torch.empty(4, 3),), loss=mean_square, dynamic_shapes=({0: rows},), device="h200"
        )


def test_what_cannot_be_copied_without_data_is_refused() -> None:
    model = nn.Linear(3, 3)
    model.sparse = nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    with pytest.raises(CaptureError, match=r"'sparse' is a tensor of layout torch\.sparse_coo"):
        _captured(model, torch.empty(2, 3))
    model = nn.Linear(3, 3)
    model.stream = open(__file__)  # noqa: SIM115 - what cannot be copied is what is tested
    with model.stream, pytest.raises(CaptureError, match="Linear cannot be copied without its data"):
        _captured(model, torch.empty(2, 3))


@pytest.mark.sweep
def test_recurrent_layers_are_counted_by_their_products_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from graphopt.capture.joint import device_kernels

    device_kernels._told.clear()

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)[0].square().mean()

    program = graphopt.capture(nn.LSTM(4, 4), (torch.empty(3, 2, 4),), loss=loss, device="h100-80gb")
    assert "cuDNN" in caplog.text
    assert not any("mkldnn" in name or "lstm_layer" in name for name in _ops(program))


def test_tied_and_shared_tensors_stay_one() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    model[1].weight = model[0].weight
    program = _captured(model, torch.zeros(2, 4, dtype=torch.int64), step=True)
    assert len(program.inputs_of("parameter")) == 1
    assert len(program.outputs_of("loss")) == 1


@pytest.mark.sweep
@given(width=st.integers(1, 9), rows=st.integers(1, 5), layers=st.integers(1, 3), bias=st.booleans())
@examples(5)
def test_bytes_are_those_of_a_capture_with_data(width: int, rows: int, layers: int, bias: bool) -> None:
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width, bias=bias), nn.Tanh())))
    cpu = DeviceProfile("a CPU", {"float32": 1e12}, 1e11, 1e-6, 1e10, 10**11)
    x = torch.empty(rows, width)
    with_data = graphopt.capture(model, (x,), loss=mean_square)
    assert _captured(model, x, device=cpu).memory().bytes == with_data.memory(measure=False).bytes
