"""Outputs that a loss leaves out: gradients are eager mode's to the last bit, numbers that are none included."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt.passes import FitMemory, MixedPrecision, Offload, Recompute
from tests.support.properties import examples


class Several(nn.Module):
    """Returns values of which each depends on others, some of them with derivatives that are infinite at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.calls.add_(1)
        h = F.dropout(self.first(x).tanh(), 0.3)
        length = (h * 0).square().sum(-1).sqrt()  # whose derivative is infinite, times zero
        left, right = self.norm(h).unbind(0)[:2]
        y = self.second(h) + torch.maximum(left, right)
        return h, length, left, torch.stack([left, right]).amax(0), y, y[:, 2:]


COUNT = 6


def bits(model: nn.Module, call: Callable[..., Any], chosen: set[int]) -> list[torch.Tensor | None]:
    """The gradients where a loss reads some of the outputs, with the sign of zeros as a number."""
    model.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(4, 6, requires_grad=True)
    outputs = call(x)
    sum((outputs[place] * (place + 1)).sin().sum() for place in sorted(chosen)).backward()  # type: ignore[union-attr]
    found = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return [None if gradient is None else gradient.clone().view(torch.int32) for gradient in found]


def same(found: list[torch.Tensor | None], wanted: list[torch.Tensor | None]) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)  # type: ignore[arg-type]


PASSES: dict[str, list[graphopt.Pass]] = {
    "none": [],
    "recompute": [Recompute("first")],
    "offload": [Offload(tier="disk", min_bytes=1, cost="roofline")],
    "fit": [FitMemory("90%", cost="roofline")],
}


@pytest.mark.sweep
@pytest.mark.parametrize("passes", PASSES)
def test_every_choice_of_outputs_has_eager_modes_gradients(passes: str) -> None:
    model = Several()
    optimized = graphopt.optimize(model, PASSES[passes])
    choices = [set(c) for n in (1, 2, 5, 6) for c in itertools.combinations(range(COUNT), n)]
    for chosen in choices if passes == "none" else choices[::5]:
        assert same(bits(model, optimized, chosen), bits(model, model, chosen)), chosen


def test_nothing_that_a_loss_leaves_out_makes_gradients_no_numbers() -> None:
    model = Several()
    found = bits(model, graphopt.optimize(model), {0})
    assert all(gradient is None or not gradient.view(torch.float32).isnan().any() for gradient in found)
    with_length = bits(model, graphopt.optimize(model), {0, 1})  # in eager mode as well
    assert any(gradient is not None and bool(gradient.view(torch.float32).isnan().any()) for gradient in with_length)


@pytest.mark.sweep
def test_each_backward_of_one_call_looks_anew() -> None:
    model = Several()
    results = []
    for call in (model, graphopt.optimize(model)):
        torch.manual_seed(1)
        x = torch.randn(4, 6, requires_grad=True)
        outputs = call(x)
        for place in (4, 0, 2):
            results.append(torch.autograd.grad(outputs[place].square().sum(), x, retain_graph=True)[0])
    assert all(torch.equal(a, b) for a, b in zip(results[:3], results[3:], strict=True))


@pytest.mark.sweep
def test_calls_whose_backwards_take_turns_are_told_apart() -> None:
    model = Several()
    results = []
    for call in (model, graphopt.optimize(model)):
        torch.manual_seed(1)
        xs = [torch.randn(4, 6, requires_grad=True) for _ in range(2)]
        one, other = call(xs[0]), call(xs[1])
        (one[4].sum() + other[0].cos().sum()).backward()
        results.append([x.grad for x in xs])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # type: ignore[arg-type]


@pytest.mark.sweep
def test_low_precision_and_sizes_that_change() -> None:
    model = Several()
    for passes in ([MixedPrecision("bf16")], []):
        optimized = graphopt.optimize(copy.deepcopy(model), passes)
        for rows in (4, 5, 7):
            x = torch.randn(rows, 6, requires_grad=True)
            optimized(x)[4].sum().backward()
            assert x.grad is not None
            assert not x.grad.isnan().any()


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "chunks": lambda x, y: torch.cat(x.chunk(2, -1)[::-1], -1) + y,
    "stack": lambda x, y: torch.stack([x, y]).unbind(0),
    "sort": lambda x, y: x.sort(-1)[0],
    "root": lambda x, y: x.clamp(min=0).sqrt(),
    "index": lambda x, y: x[:, [2, 0, 1, 1]],
    "mean": lambda x, y: torch.var_mean(x, -1, keepdim=True),
    "write": lambda x, y: x.clone().mul_(2).add_(y),
    "detached": lambda x, y: x.detach() * y,
}


class Drawn(nn.Module):
    """Ops on earlier values, all of which it returns."""

    def __init__(self, lines: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 4))
        self.lines = lines

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        pool = [x * self.weight, x + self.weight]
        for op, first, second in self.lines:
            made = OPS[op](pool[first % len(pool)], pool[second % len(pool)])
            pool += [value.expand(3, 4) for value in (made if isinstance(made, tuple) else (made,))]
        return pool


LINES = st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9))


@examples(6)
@given(
    lines=st.lists(
        st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6
    ),
    chosen=st.sets(st.integers(0, 13), min_size=1, max_size=3),
)
def test_any_outputs_of_any_program(lines: list[tuple[str, int, int]], chosen: set[int]) -> None:
    model = Drawn(lines)
    results = []
    for call in (model, graphopt.optimize(model)):
        model.zero_grad()
        x = torch.tensor([[0.0, 1.0, -2.0, 0.5], [0.0, -0.0, 3.0, 1.0], [1.0, 1.0, 1.0, -1.0]], requires_grad=True)
        outputs = call(x)
        read = [outputs[place % len(outputs)] for place in sorted(chosen)]
        read = [value for value in read if value.requires_grad] or [outputs[0]]
        sum((value * torch.arange(12.0).view(3, 4).sub(5)).sum() for value in read).backward()  # type: ignore[union-attr]
        gradients = [x.grad, model.weight.grad]
        results.append([None if g is None else g.clone().view(torch.int32) for g in gradients])
    assert same(*results), results


class Vector(nn.Module):
    """Returns vectors, whose gradients have one layout, so that calls of backward write over either operand."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8))
        self.power = power

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * self.weight
        return h.sin(), (h * 0).abs().pow(self.power), (h * 0).rsqrt() * h


def consuming(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """A compiler that makes what it returns of a copy, and leaves nothing of what it was given."""
    del inputs
    kept = copy.deepcopy(module)
    for node in reversed(list(module.graph.nodes)):
        module.graph.erase_node(node)
    return kept


@pytest.mark.sweep(but=("eager-2.5",))
@pytest.mark.parametrize("power", [0.3, -1.5, 2.5])
@pytest.mark.parametrize("backend", ["eager", consuming])
def test_what_is_left_out_is_not_computed_in_place_either(power: float, backend: Any) -> None:
    model = Vector(power)
    results = []
    for call in (model, graphopt.optimize(model, backend=backend)):
        for chosen in ({0}, {0, 1}, {0, 2}, {1}):
            model.zero_grad()
            x = torch.linspace(1, 2, 8).requires_grad_()
            outputs = call(x)
            sum(outputs[place].sum() for place in sorted(chosen)).backward()  # type: ignore[union-attr]
            results.append([x.grad.clone(), model.weight.grad.clone()])  # type: ignore[union-attr]
    for wanted, found in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


class HandsOn(nn.Module):
    """Returns what it is given, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:2], x * self.weight, (x * 0 * self.weight).sum().sqrt()


def test_a_model_behind_another_one_is_told_of_its_own_backward() -> None:
    models = nn.ModuleList([Several(), HandsOn()])
    results = []
    for first, second in (models, [graphopt.optimize(model) for model in models]):
        for chosen in ({0}, {1}, {0, 1}, {0}, {1}):
            models.zero_grad()
            torch.manual_seed(1)
            x = torch.randn(4, 6, requires_grad=True)
            outputs = second(first(x)[0])
            sum(outputs[place].sin().sum() for place in sorted(chosen)).backward()  # type: ignore[union-attr]
            results.append([x.grad, *(None if p.grad is None else p.grad.clone() for p in models.parameters())])
    for wanted, found in zip(results[:5], results[5:], strict=True):
        pairs = list(zip(wanted, found, strict=True))
        assert all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)  # type: ignore[arg-type]


class WithLogits(nn.Module):
    """Returns a loss beside the values that it is of, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 256)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(x).tanh())
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.sweep(but=("True",))
@pytest.mark.parametrize("keeps", [False, True])
def test_zeros_for_a_gradient_that_does_not_come_are_gone_before_backward_runs(keeps: bool) -> None:
    model = graphopt.optimize(WithLogits())
    x, labels = torch.randn(32, 64), torch.zeros(32, dtype=torch.long)

    def run() -> object:
        found = model(x, labels)
        found["loss"].backward()
        return found

    def dropping() -> None:
        model(x, labels)["loss"].backward()

    call = run if keeps else dropping
    call()
    model.zero_grad()
    measured = graphopt.measure_peak(call).allocated_peak_bytes
    logits = 32 * 256 * 4
    predicted = model.program.memory().allocated_peak_bytes
    assert predicted - 2 * logits <= measured <= predicted


class Clamped(nn.Module):
    """Changes parameters in front of reading them."""

    def __init__(self, changed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.changed = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), changed
        self.embedding = nn.Embedding(9, 6, max_norm=0.5)

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            for layer in self.layers[: self.changed]:
                layer.weight.clamp_(-0.1, 0.1)
        return [layer(self.embedding(tokens)) for layer in self.layers]


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_parameters_that_forward_changes_have_no_gradient_where_eager_mode_has_none(
    changed: int, read: tuple[int, ...]
) -> None:
    def trained(around: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor | None]:
        model = around(Clamped(changed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=True)
        found: list[torch.Tensor | None] = []
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(torch.arange(4))
            sum(outputs[place].sum() for place in read).backward()  # type: ignore[union-attr]
            found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return [*found, *(p.detach() for p in model.parameters())]

    assert same(trained(graphopt.optimize), trained(lambda model: model))
