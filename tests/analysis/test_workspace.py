"""What ops allocate while they run is counted, or bounded where it depends on values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import graphopt
from graphopt.analysis import workspace


class Exponential(nn.Module):
    """A matrix exponential of a weight of some norm."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-scale, scale, 24 * 24).view(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.matrix_exp(self.weight) @ x).mean()


def predicted_and_measured(model: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = graphopt.optimize_step(model, optimizer, loss=lambda model, x: model(x).mean())
    step(x)
    peak = graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes
    return step.program.memory().allocated_peak_bytes, peak


@pytest.mark.sweep(but=("0.001",))
@pytest.mark.parametrize("scale", [0.0, 1e-3, 0.05, 0.5])
def test_a_matrix_exponential_is_bounded_for_every_norm(scale: float) -> None:
    predicted, measured = predicted_and_measured(Exponential(scale), torch.ones(24, 2))
    assert measured <= predicted
    if scale == 0.5:
        assert measured == predicted  # the largest norm takes what is said


def test_orthogonal_parametrizations_are_bounded() -> None:
    predicted, measured = predicted_and_measured(parametrizations.orthogonal(nn.Linear(24, 24)), torch.ones(4, 24))
    assert measured <= predicted


class Grouped(nn.Module):
    """Products of rows with the matrix of their group, between casts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4 * 16 * 48).view(4, 16, 48))
        self.register_buffer("ends", torch.tensor([24, 48, 72, 96], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=self.ends).float().square().mean()


@pytest.mark.parametrize("ends", [[24, 48, 72, 96], [96, 96, 96, 96], [0, 90, 96, 96]])
def test_products_by_groups_are_bounded_for_all_sizes_of_groups(ends: list[int]) -> None:
    model = Grouped()
    model.ends.copy_(torch.tensor(ends))  # type: ignore[operator, arg-type]
    predicted, measured = predicted_and_measured(model, torch.ones(96, 16))
    assert measured <= predicted
    if 96 in ends[:1]:
        assert measured == predicted  # one group with all rows takes what is said


SCATTERS = {
    "slice": lambda v: torch.slice_scatter(v, v[:2] * 2, 0, 0, 2),
    "select": lambda v: torch.select_scatter(v, v[0] * 2, 0, 1),
    "diagonal": lambda v: torch.diagonal_scatter(v, torch.diagonal(v) * 2),
    "twice": lambda v: torch.select_scatter(torch.slice_scatter(v, v[:2] * 2, 0, 0, 2), v[0] * 2, 0, 1),
}


@pytest.mark.sweep(but=("twice",))
@pytest.mark.parametrize("name", list(SCATTERS))
def test_ops_that_copy_all_of_the_storage_behind_a_view_are_counted_so(name: str) -> None:
    """Eight rows of five elements, cut out of the middle of 64 rows of 64."""

    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return SCATTERS[name]((x @ self.weight)[20:28, 3:8]).square()

    predicted, measured = predicted_and_measured(Scattered(), torch.randn(64, 64))
    assert measured == predicted


def fused(change: str = "") -> graphopt.Program:
    """A program whose fused update may read a tensor of another size, as one from a file may."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    program = graphopt.capture(model, (torch.randn(6, 2),), loss=lambda m, x: m(x).sum(), optimizer=optimizer)
    (call,) = (node for node in program.nodes if "_fused_sgd_" in str(node.target))
    lists = [list(given) for given in call.args[:3]]
    x = next(node for node, _ in program.inputs_of("input"))
    if change == "parameter":
        lists[0][0] = x
    elif change == "gradient":
        lists[1][0] = lists[1][1]
    elif change == "buffer":
        lists[2][0] = lists[2][1]
    elif change == "length":
        lists[1].pop()
    elif change == "rate":
        call.kwargs = {**call.kwargs, "lr": x}
    call.args = tuple(lists)
    return program


@pytest.mark.sweep(but=("gradient",))
@pytest.mark.parametrize("change", ["parameter", "gradient", "buffer", "length", "rate"])
def test_a_fused_update_whose_tensors_do_not_fit_is_not_run(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel would write past the end of the smaller one."""
    ran: list[str] = []
    prepare = workspace.prepare
    monkeypatch.setattr(workspace, "_measured", {})
    monkeypatch.setattr(workspace, "prepare", lambda node, fill: ran.append(str(node.target)) or prepare(node, fill))
    fused().memory()
    assert any("_fused_sgd_" in target for target in ran)
    ran.clear()
    monkeypatch.setattr(workspace, "_measured", {})
    fused(change).memory()
    assert ran
    assert not any("_fused_sgd_" in target for target in ran)
