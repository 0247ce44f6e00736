"""Models and losses that differentiate inside: forces, penalties, equations of physics, steps of a learner."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import grad  # a name of its own, as models have it
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import CaptureError, GraphoptError
from graphopt.errors import GraphBreakError
from graphopt.passes import FitMemory, FuseUpdate, MixedPrecision, Recompute
from tests.support.properties import examples
from tests.support.training import identical


def network(width: int = 3, out: int = 1, drop: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, out)
    )


class Forces(nn.Module):
    """Energies and the forces that follow from them."""

    def __init__(self, drop: float = 0.1) -> None:
        super().__init__()
        self.net = network(drop=drop)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.net(positions).sum()
        return energy, -grad(energy, positions, create_graph=True)[0]


class Physics(nn.Module):
    """The residual of a heat equation: a first derivative by one coordinate, a second by another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(2)

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        t, x = t.clone().requires_grad_(), x.clone().requires_grad_()
        u = self.net(torch.stack([t, x], 1))
        first = {"grad_outputs": torch.ones_like(u), "create_graph": True}
        by_t, by_x = torch.autograd.grad(u, (t, x), **first)
        (by_xx,) = torch.autograd.grad(by_x.sum(), x, create_graph=True)
        return by_t - 0.1 * by_xx


class Attribution(nn.Module):
    """What inputs count for, taken as numbers that are not differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = network(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            probe = x.detach().requires_grad_()
            unused = torch.zeros(2, requires_grad=True)
            counts, nothing = torch.autograd.grad(self.net(probe).square().sum(), [probe, unused], allow_unused=True)
        assert nothing is None
        found: torch.Tensor = self.head(self.net(x) * counts.softmax(-1))
        return found


class Regions(nn.Module):
    """Gradients inside of regions with settings of their own, by values that were made outside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probe = x * 1.0
        probe = probe.detach().requires_grad_()
        y = self.net(probe)
        total = y.sum()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (low,) = torch.autograd.grad(self.net(probe).float().sum(), probe, create_graph=True)
        with torch.no_grad():
            (plain,) = torch.autograd.grad(total, probe, retain_graph=True)
        return y + low.float() * plain


class Pairs(nn.Module):
    """Forces and stress of particles that act on each other, from one energy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(1)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = positions.detach().requires_grad_()
        strain = torch.zeros(3, 3, requires_grad=True)
        moved = positions @ (torch.eye(3) + strain)
        one, other = torch.triu_indices(len(positions), len(positions), 1)
        distances = (moved[one] - moved[other]).square().sum(1, keepdim=True).add(1e-6).sqrt()
        energy = torch.zeros(len(positions)).index_add(0, one, self.net(distances)[:, 0]).sum()
        forces, stress = torch.autograd.grad(energy, [positions, strain], create_graph=True)
        return energy + stress.square().sum(), -forces


class Square(torch.autograd.Function):
    """A square whose backward is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found: torch.Tensor = 2 * ctx.saved_tensors[0] * gradient
        return found


class Checkpointed(nn.Module):
    """Forces through a checkpointed layer with dropout, an autograd function and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.2))
        self.norm, self.last = nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = positions.detach().requires_grad_()
        hidden = checkpoint(self.first, positions, use_reentrant=False)
        energy = self.last(Square.apply(self.norm(hidden))).sum()
        return energy, -torch.autograd.grad(energy, positions, create_graph=True)[0]


class Jacobian(nn.Module):
    """A network whose Jacobian is kept small."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        jacobian: Any = torch.autograd.functional.jacobian(self.net, x, create_graph=True)
        return self.net(x) + jacobian.square().sum()


def of_forces(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    energy, forces = model(x)
    return energy.square() * 0.01 + (forces - x).square().mean()


def of_square(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(*batch).square().mean()
    return found


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of a critic, with the penalty of its gradients' norms."""
    between = (x * 0.3).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    found: torch.Tensor = model(x).mean() + (slope.norm(dim=1) - 1).square().mean()
    return found


def learner(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One step of an inner loop, through which the outer one is differentiated."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    inner = torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x[:4],)).square().mean()
    slopes = torch.autograd.grad(inner, parameters, create_graph=True)
    moved = {name: p - 0.1 * slope for name, p, slope in zip(names, parameters, slopes, strict=True)}
    found: torch.Tensor = torch.func.functional_call(model, moved, (x[4:],)).square().mean()
    return found


def batched(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = model(x).sum(0)
    rows = torch.autograd.grad(y, x, torch.eye(len(y)), create_graph=True, is_grads_batched=True)
    return rows[0].square().sum()


Case = tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]
INSIDE: dict[str, Case] = {
    "forces": (Forces, of_forces, ((8, 3),)),
    "physics": (Physics, of_square, ((8,), (8,))),
    "attribution": (Attribution, of_square, ((8, 4),)),
    "regions": (Regions, of_square, ((8, 4),)),
    "jacobian": (Jacobian, of_square, ((3,),)),
    "pairs": (Pairs, of_forces, ((8, 3),)),
    "checkpointed": (Checkpointed, of_forces, ((8, 3),)),
}
IN_LOSSES: dict[str, Case] = {
    "penalty": (network, penalty, ((8, 3),)),
    "learner": (network, learner, ((8, 3),)),
    "batched": (lambda: network(3, 2), batched, ((4, 3),)),
}
PASSES: dict[str, list[Any]] = {
    "none": [],
    "recompute": [Recompute("auto")],
    "fit": [FitMemory("99%", cost="roofline")],
}


def batches(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(3)]


def trained(case: Case, passes: list[Any] | None, *, whole_step: bool) -> list[torch.Tensor]:
    """Losses, parameters and the next random number of a short training; in eager mode without passes."""
    make, loss, shapes = case
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    called: Any = model if passes is None or whole_step else graphopt.optimize(model, passes)
    step = graphopt.optimize_step(model, optimizer, passes, loss=loss) if passes is not None and whole_step else None
    losses = []
    for batch in batches(shapes):
        if step is not None:
            losses.append(step(*batch))
            continue
        value = loss(called, *batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return [*losses, *(tensor.detach() for tensor in model.state_dict().values()), torch.rand(1)]


@pytest.mark.sweep(but=("forces-recompute",))
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("name", INSIDE)
def test_training_is_eagers_to_the_last_bit(name: str, passes: str) -> None:
    expected = trained(INSIDE[name], None, whole_step=False)
    for whole_step in (False, True):
        found = trained(INSIDE[name], copy.deepcopy(PASSES[passes]), whole_step=whole_step)
        assert all(identical(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.sweep
@pytest.mark.parametrize("name", IN_LOSSES)
def test_losses_may_differentiate_as_well(name: str) -> None:
    expected = trained(IN_LOSSES[name], None, whole_step=False)
    found = trained(IN_LOSSES[name], [FuseUpdate()], whole_step=True)
    assert all(identical(one, other) for one, other in zip(found, expected, strict=True))


def test_the_stream_of_dropout_goes_on_and_the_peak_is_predicted() -> None:
    torch.manual_seed(0)
    model = Forces(drop=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    step = graphopt.optimize_step(model, optimizer, [Recompute("auto")], loss=of_forces)
    for (x,) in batches(((64, 3),)):
        step(x)
    peak = graphopt.measure_peak(lambda: step(x))
    assert peak.allocated_peak_bytes == step.program.memory().allocated_peak_bytes


def test_an_argument_that_requires_a_gradient_may_be_differentiated_by() -> None:
    class Direct(Forces):
        def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            energy = self.net(positions.requires_grad_()).sum()
            return energy, -grad(energy, positions, create_graph=True)[0]

    torch.manual_seed(0)
    model = Direct(drop=0.0)
    found = []
    for called in (model, graphopt.optimize(copy.deepcopy(model))):
        x = torch.linspace(-1, 1, 24).reshape(8, 3).requires_grad_()
        energy, forces = called(x)
        (energy + forces.square().sum()).backward()
        assert x.grad is not None
        found.append([energy, forces, x.grad, *(p.grad for p in called.parameters())])
    assert all(identical(one, other) for one, other in zip(*found, strict=True))
    with pytest.raises(CaptureError, match=r"differentiates by args\[0\], which requires no gradient.*(?s:.*)detach"):
        graphopt.optimize(copy.deepcopy(model))(torch.ones(8, 3))


def test_without_gradients_the_model_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model = Attribution().eval()
    with torch.no_grad():
        assert torch.equal(graphopt.optimize(copy.deepcopy(model))(torch.ones(2, 4)), model(torch.ones(2, 4)))


def backward_inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x).sum().backward()
    found: torch.Tensor = model(x).sum()
    return found


def by_edges(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    edge = torch.autograd.graph.get_gradient_edge(x)
    (slope,) = torch.autograd.grad(model(x).sum(), edge, create_graph=True)
    return slope.square().sum()


@pytest.mark.sweep(but=("by_edges-edges of the graph",))
@pytest.mark.parametrize(
    ("loss", "message"), [(backward_inside, r"calls backward\(\)"), (by_edges, "edges of the graph")]
)
def test_other_ways_to_gradients_are_refused_by_name(loss: Callable[..., torch.Tensor], message: str) -> None:
    with pytest.raises(GraphBreakError, match=f"{message}(?s:.*)test_inner_gradients.py(?s:.*)torch.autograd.grad"):
        graphopt.capture(network(3, 2), (torch.ones(4, 3),), loss=loss)


def test_autograds_own_errors_stay() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        probe = x.detach().requires_grad_()
        return torch.autograd.grad(model(probe).sum().detach(), probe)[0].sum()

    with pytest.raises(RuntimeError, match=r"^element 0 of tensors does not require grad"):
        graphopt.capture(network(3, 2), (torch.ones(4, 3),), loss=loss)


def test_a_forward_program_with_them_is_neither_written_as_python_nor_run() -> None:
    model, x = Forces(), torch.ones(8, 3)
    program = graphopt.capture(model, (x,), stage="forward")
    with pytest.raises(GraphoptError, match="write the joint stage"):
        program.to("python")
    with pytest.raises(GraphoptError, match="run the joint stage"):
        program.to_graph_module()([*model.parameters(), x])


def test_a_forward_program_with_an_autograd_function_runs() -> None:
    class Squares(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Square.apply(x)
            return found

    x = torch.arange(3.0)
    module = graphopt.capture(Squares(), (x.clone().requires_grad_(),), stage="forward").to_graph_module()
    assert torch.equal(module([x])[0], x * x)


class Hidden(nn.Module):
    """Gradients by a hidden layer, which autocast computes in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        (slope,) = torch.autograd.grad(self.second(hidden).sum(), hidden, create_graph=True)
        return self.second(hidden * slope)


def test_mixed_precision_where_it_casts_what_is_differentiated_by_is_refused() -> None:
    model = graphopt.optimize(Hidden(), [MixedPrecision("bfloat16", deny=["first"])])
    with pytest.raises(GraphoptError, match=r"torch.autograd.grad at .*test_inner_gradients(?s:.*)torch.autocast"):
        model(torch.ones(8, 3))


@pytest.mark.sweep
@pytest.mark.parametrize("make", [Forces, Hidden])
@pytest.mark.parametrize("how", ["O1", "ambient"])
def test_under_autocast_bits_are_eagers(how: str, make: Callable[[], nn.Module]) -> None:
    found = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model: Any = make()
        passes = [MixedPrecision("bfloat16")] if how == "O1" else []
        called = graphopt.optimize(model, passes) if optimized else model
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "ambient" or not optimized):
            results = called(torch.linspace(-1, 1, 24).reshape(8, 3))
        results = results if isinstance(results, tuple) else (results,)
        loss = sum(result.float().square().sum() for result in results)
        loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    assert all(identical(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.sweep(cases=("joint",))
@pytest.mark.parametrize("stage", ["forward", "joint"])
def test_programs_are_read_and_written(stage: Any) -> None:
    program = graphopt.capture(Forces(), (torch.ones(8, 3),), stage=stage)
    assert graphopt.Program.from_json(program.to_json()).to_text() == program.to_text()
    assert ("torch.autograd.grad(" in program.to_text()) == (stage == "forward")


@examples(2)
@given(
    seed=st.integers(0, 2**16), rows=st.integers(1, 6), times=st.integers(1, 3), drop=st.sampled_from([0.0, 0.3]),
    share=st.sampled_from([92, 96, 100]),
)  # fmt: skip
def test_any_order_of_derivatives(seed: int, rows: int, times: int, drop: float, share: int) -> None:
    """Derivatives of derivatives, as often as asked for, under any budget that can be met."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        value = model(x).square().sum()
        total = value
        for _ in range(times):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            value = slope.square().sum()
            total = total + 0.1 * value
        return total

    found = []
    for whole_step in (False, True):
        torch.manual_seed(seed)
        model = network(3, 2, drop)
        x = torch.randn(rows, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if whole_step:
            fit = FitMemory(f"{share}%", cost="roofline")
            step = graphopt.optimize_step(model, optimizer, [fit], loss=loss)
            try:
                step.prepare(x)
            except graphopt.PassError as error:
                assert "no plan fits" in str(error)  # noqa: PT017 - either way is right
                return
            value = step(x)
        else:
            value = loss(model, x)
            value.backward()
            optimizer.step()
        found.append([value.detach(), *(p.detach() for p in model.parameters()), torch.rand(1)])
    assert all(identical(one, other) for one, other in zip(*found, strict=True))
