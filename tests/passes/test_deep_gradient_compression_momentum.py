"""DeepGradientCompression with the momentum of SGD: taken over with buffers, settings and state, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import graphopt
from graphopt import GraphoptError
from graphopt.ir.ops.communication.residual import accumulate_
from graphopt.passes import DataParallel, DeepGradientCompression
from graphopt.rewriting.distributed.sparse.optimizer_momentum import momenta_of, why_not_taken_over
from tests.support.ranks import run_ranks
from tests.support.sweeping import sweeping

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Said:
    """What each of two ranks found; only in some cases where nothing that is swept is asked for."""
    swept = sweeping(request)
    calls = [f"taken({name!r}, changed={way})" for name in (CASES if swept else PICKED) for way in (False, True)]
    calls += ["switched()", "resumed()", "skipped()", "entries()"] if swept else []
    script = "from tests.support.compressing_momentum import *\nsaid = {}\n"
    script += "".join(f"said.update({call})\n" for call in calls) + "say(said)\n"
    return [found for (found,) in run_ranks(script, 2, tmp_path_factory.mktemp("two") / "store")]


CASES = {
    "weight decay, clipping": "SGD(momentum=0.9, weight_decay=0.01) of 2 gradients",
    "nesterov": "SGD(momentum=0.8, nesterov=True) of 2 gradients",
    "dampening": "SGD(momentum=0.9, dampening=0.5, weight_decay=0.01) of 2 gradients",
    "weights alone": "SGD(momentum=0.9, weight_decay=0.1) of 2 gradients",
    "biases alone": "",
}


PICKED = ("weight decay, clipping", "nesterov")
"""What `make test` has of them."""


@pytest.mark.sweep(but=tuple(f"{name}-{changed}" for name in PICKED for changed in ("", ", changed")))
@pytest.mark.parametrize("changed", ["", ", changed"])
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_a_plain_loop(two: Said, name: str, changed: str) -> None:
    """Parameters and buffers in float64 after dense and sparse steps; also where the momentum is changed on the way."""
    for found in two:
        off, same, lines = found[name + changed]
        assert off < 1e-12
        assert same
        if not changed:
            assert [line for line in lines if CASES[name] in line] if CASES[name] else not lines


@pytest.mark.sweep
@pytest.mark.parametrize("case", ["dense", "switched", "resumed"])
def test_states_go_on_to_the_last_bit(two: Said, case: str) -> None:
    """Dense steps are the optimizer's own; the pass may come later; a run that is resumed is the same run."""
    assert all(found[case] for found in two)


@pytest.mark.sweep
def test_the_optimizer_goes_on_without_the_pass(two: Said) -> None:
    """From the state of one rank."""
    for found in two:
        off, same = found["back"]
        assert off < 1e-6
        assert same


@pytest.mark.sweep
def test_a_first_step_that_is_skipped_makes_no_buffers(two: Said) -> None:
    for found in two:
        nothing, same, buffers = found["skipped"]
        assert nothing
        assert same
        assert buffers == 5


@pytest.mark.sweep
def test_updates_at_the_entries_that_arrive_are_those_of_dense_sums(two: Said) -> None:
    assert [found["entries"] for found in two] == [[True, True]] * 2


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    momentum=st.floats(0.01, 0.99),
    dampening=st.sampled_from([0.0, 0.25, 0.9]),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
    order=st.permutations([0, 1, 2]),
)
def test_accumulating_with_a_buffer_adds_what_sgd_would_add(
    seed: int, momentum: float, dampening: float, nesterov: bool, weight_decay: float, order: list[int]
) -> None:
    """The buffer is the optimizer's to the last bit, in any layout; the residual is the sum of its directions."""
    dampening = 0.0 if nesterov else dampening
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).permute(order))
    given_to = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": weight_decay}
    optimizer = torch.optim.SGD([p], lr=0.0, foreach=False, **given_to)
    buffer, residual = torch.zeros_like(p), torch.zeros(p.numel(), dtype=torch.float64)
    expected = torch.zeros_like(p)
    for step in range(4):
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        optimizer.step()
        kept = optimizer.state[p]["momentum_buffer"]
        g = p.grad + weight_decay * p.detach()
        expected += g + momentum * kept if nesterov else kept
        options = {"dampening": dampening if step else 0.0, "buffer": True, "weight_decay": weight_decay}
        accumulate_(p.grad, buffer, residual, momentum, nesterov, parameter=p.detach(), **options)
        assert torch.equal(buffer, kept)
    torch.testing.assert_close(residual.as_strided(p.shape, p.stride()), expected, rtol=1e-12, atol=1e-12)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """A process group of two ranks of which only this one exists; its exchanges do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def whole_step(model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> graphopt.TrainStep:
    given_to = {"sparsity": (0.9,), "min_elements": 100, "rampup_step": 1, **options}
    return graphopt.optimize_step(
        model,
        optimizer(model.parameters()),
        [DataParallel(), DeepGradientCompression(**given_to)],
        loss=lambda model, x: model(x).square().mean(),
    )


def momentum_sgd(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


class _ManySteps(torch.optim.SGD):
    """An SGD that counts in Python, so that it runs in eager mode."""

    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


REFUSED: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], str]] = {
    "momentum twice": (momentum_sgd(), {"momentum": 0.9}, r"given momentum=0.9 as well: leave that out of the pass"),
    "nesterov": (momentum_sgd(), {"nesterov": True}, r"given nesterov=True as well"),
    "both": (momentum_sgd(), {"momentum": 0.5, "weight_decay": 0.1}, r"momentum=0.5 and weight_decay=0.1 as well"),
    "foreach": (momentum_sgd(foreach=True), {}, r"0.weight/momentum_buffer is updated in another way: leave foreach="),
    "maximize": (momentum_sgd(fused=True, maximize=True), {}, r"leave foreach= and maximize= of SGD out"),
    "Adam": (torch.optim.Adam, {}, r"keeps state of its own \(0.weight/.*SGD and of no other optimizer"),
    "NAdam": (torch.optim.NAdam, {}, r"keeps state of its own \(0.weight/.*correction='feedback' for Adam"),
    "Muon": (torch.optim.Muon, {}, r"for other optimizers use correction='feedback'"),
    "as it is": (lambda parameters: _ManySteps(parameters, momentum=0.9), {}, r"is updated in another way"),
}


@pytest.mark.sweep(but=("nesterov",))
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_taken_over_is_refused(name: str) -> None:
    optimizer, options, message = REFUSED[name]
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    with pytest.raises(GraphoptError, match=message):
        whole_step(model, optimizer, **options).prepare(torch.randn(4, 16))


@pytest.mark.sweep
@pytest.mark.usefixtures("two_ranks")
def test_a_buffer_that_lies_otherwise_is_refused() -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = momentum_sgd()(model.parameters())
    step = whole_step(model, lambda _: optimizer)
    x = torch.randn(4, 16)
    step(x)
    optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(16, 16).t()
    with pytest.raises(GraphoptError, match=r"momentum has the strides \[1, 16\], and the gradient \[16, 1\]"):
        step(x)


@pytest.mark.usefixtures("two_ranks")
def test_tensors_whose_momentum_cannot_be_shared_stay_dense() -> None:
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.one + self.two)

    step = whole_step(Added(), momentum_sgd())
    step(torch.randn(4, 16))
    lines = step.records[-1].changed.lines
    assert any(line.startswith("dense, ") and "gets the same gradient" in line for line in lines)


def test_a_momentum_is_taken_over_where_gradient_and_buffer_lie_alike() -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = momentum_sgd()(model.parameters())
    program = graphopt.capture(model, (torch.randn(4, 16),), loss=lambda m, x: m(x).sum(), optimizer=optimizer)
    momentum = momenta_of(program, "the pass")["weight"]
    gradient = torch.zeros(16, 16)
    assert why_not_taken_over(momentum, gradient) == ""
    for other in (gradient.t(), gradient[:, :1].expand(16, 16)):
        assert "another order in memory" in why_not_taken_over(momentum, other)
    assert why_not_taken_over(momentum, gradient.double()) == "the optimizer keeps its momentum in torch.float32"


@pytest.mark.usefixtures("two_ranks")
def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """Though each sparsity and the first update have programs of their own."""
    model = nn.Linear(16, 16, bias=False)
    step = whole_step(model, momentum_sgd(), sparsity=(0.8, 0.9), rampup_step=4)
    with caplog.at_level(logging.WARNING, logger="graphopt"):
        for _ in range(5):
            step(torch.randn(4, 16))
    (said,) = [record.getMessage() for record in caplog.records if "momentum" in record.getMessage()]
    assert said == (
        "deep-gradient-compression: the momentum of SGD(momentum=0.9) of 1 gradient is applied before it is exchanged, "
        "in the optimizer's buffer, which differs from rank to rank: save the optimizer's state on each"
    )


def test_without_a_momentum_of_the_optimizer_the_pass_has_its_own() -> None:
    assert str(DeepGradientCompression()) == "deep-gradient-compression"
    assert str(DeepGradientCompression(momentum=0.9)) == "deep-gradient-compression{momentum=0.9}"
