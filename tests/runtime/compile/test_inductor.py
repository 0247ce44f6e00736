"""Peaks with the inductor backend: budgets hold, values die at their last use, and code that takes more is divided."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

import graphopt
from graphopt import Program, _torch
from graphopt.capture.call.flatten import flatten
from graphopt.ir.node import value_of
from graphopt.passes import FitMemory, Offload, Recompute
from graphopt.runtime.compile import inductor
from graphopt.runtime.programs.binding import Binding
from tests.support.changing_lengths import Lengths, sentences, trained
from tests.support.properties import examples
from tests.support.training import Blocks, Net, identical, mean_square, next_token

TOKENS = torch.randint(0, 11, (8, 64), generator=torch.Generator().manual_seed(0))
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
"""Inductor fuses ops and sums in another order."""

quiet = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def gpt(p: float = 0.0) -> Blocks:
    """A small language model whose activations outweigh its parameters."""
    torch.manual_seed(0)
    return Blocks(1, d=32, p=p)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without state, so that every step is the same program."""
    return torch.optim.SGD(model.parameters(), lr=0.1, fused=True)


def backward(model: nn.Module, loss: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The loss and all gradients, from a fixed seed; the generator's state behind them."""
    torch.manual_seed(1)
    value = loss(model, x)
    value.backward()
    found = [value.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]
    model.zero_grad(set_to_none=True)
    return found


def drop_in_peak(model: nn.Module, loss: Callable[..., torch.Tensor], x: torch.Tensor) -> int:
    """The measured peak of forward and backward above persistent memory, without the loss and its gradient."""
    measured = graphopt.measure_peak(lambda: loss(model, x).backward())
    model.zero_grad(set_to_none=True)
    return measured.allocated_peak_bytes - 8


def budgets(model: nn.Module, loss: Callable[..., torch.Tensor], x: torch.Tensor, share: float) -> tuple[int, int]:
    """(a budget that is this share of what a step allocates, with what is resident; what is resident)."""
    memory = graphopt.capture(model, (x,), loss=loss).memory()
    return memory.resident_bytes + int(memory.allocated_peak_bytes * share), memory.resident_bytes


# --- with inductor ---------------------------------------------------------------------------------------------------


@quiet
@pytest.mark.sweep
def test_a_gpt_fitted_into_a_budget_stays_within_it() -> None:
    model = gpt()
    budget, resident = budgets(model, next_token, TOKENS, 0.66)  # 0.63 is the least
    expected = backward(copy.deepcopy(model), next_token, TOKENS)
    optimized = graphopt.optimize(copy.deepcopy(model), [FitMemory(budget)], backend="inductor")
    torch.testing.assert_close(backward(optimized, next_token, TOKENS), expected, **CLOSE)
    assert optimized.records[0].changed.counts["recomputed"] > 0
    assert resident + drop_in_peak(optimized, next_token, TOKENS) <= budget

    stepped = copy.deepcopy(model)
    step = graphopt.optimize_step(stepped, sgd(stepped), [FitMemory(budget)], loss=next_token, backend="inductor")
    torch.manual_seed(1)
    torch.testing.assert_close(step(TOKENS), expected[0], **CLOSE)
    assert resident + graphopt.measure_peak(lambda: step(TOKENS)).allocated_peak_bytes <= budget


@pytest.mark.sweep
@quiet
def test_dropout_is_eagers_at_a_budget() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.5))]
    model, x = Net(*layers, nn.Linear(16, 4)), torch.randn(64, 16)
    budget, resident = budgets(model, mean_square, x, 0.75)
    expected = backward(copy.deepcopy(model), mean_square, x)
    optimized = graphopt.optimize(copy.deepcopy(model), [FitMemory(budget)], backend="inductor")
    found = backward(optimized, mean_square, x)
    torch.testing.assert_close(found[:-1], expected[:-1], **CLOSE)
    assert torch.equal(found[-1], expected[-1])  # the generator ends where eager leaves it
    assert resident + drop_in_peak(optimized, mean_square, x) <= budget


# --- with a compiler that keeps all it is given ----------------------------------------------------------------------


class Compiler:
    """Stands in for inductor: the graph as it is.

    Args:
        hoards: keep all that it is given alive to the end.

    Attributes:
        given: the number of inputs of each graph it was given.
    """

    def __init__(self, *, hoards: bool) -> None:
        self.given: list[int] = []
        self._hoards = hoards

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any], owned: Any) -> _torch.InductorCode:
        self.given.append(len(inputs))
        if not self._hoards:
            (box,) = module.graph.find_nodes(op="placeholder")
            with module.graph.inserting_after([*box.users][-1] if box.users else box):
                module.graph.call_method("clear", (box,))
            module.recompile()
        return _torch.InductorCode(module.forward, module.forward, ())


@pytest.fixture
def hoarder(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """In place of inductor, a compiler that keeps all it is given."""
    made = Compiler(hoards=True)
    monkeypatch.setattr(_torch, "compile_with_inductor", made)
    return made


@pytest.fixture
def frugal(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """In place of inductor, a compiler that drops what it is given at its last use."""
    made = Compiler(hoards=False)
    monkeypatch.setattr(_torch, "compile_with_inductor", made)
    return made


@pytest.mark.sweep
def test_what_takes_too_much_is_divided_until_the_budget_holds(hoarder: Compiler) -> None:
    model = gpt(0.1)
    budget, resident = budgets(model, next_token, TOKENS, 0.8)
    expected = backward(copy.deepcopy(model), next_token, TOKENS)
    optimized = graphopt.optimize(copy.deepcopy(model), [FitMemory(budget)], backend="inductor")
    assert all(map(identical, backward(optimized, next_token, TOKENS), expected))
    assert len(hoarder.given) > 2
    assert resident + drop_in_peak(optimized, next_token, TOKENS) <= budget


@pytest.mark.sweep
def test_a_whole_step_that_takes_too_much_is_divided(hoarder: Compiler) -> None:
    model = gpt()
    budget, resident = budgets(model, next_token, TOKENS, 0.75)
    expected = backward(copy.deepcopy(model), next_token, TOKENS)
    step = graphopt.optimize_step(model, sgd(model), [FitMemory(budget)], loss=next_token, backend="inductor")
    torch.manual_seed(1)
    assert torch.equal(step(TOKENS), expected[0])
    assert len(hoarder.given) > 2
    assert resident + graphopt.measure_peak(lambda: step(TOKENS)).allocated_peak_bytes <= budget


@pytest.mark.sweep
def test_what_takes_no_more_is_not_divided(frugal: Compiler) -> None:
    graphopt.optimize(gpt(), [FitMemory("80%")], backend="inductor")(TOKENS)
    assert len(frugal.given) == 2


def test_forward_and_backward_of_a_step_are_compiled_apart(frugal: Compiler) -> None:
    model, x = Net(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    graphopt.optimize_step(model, sgd(model), loss=mean_square, backend="inductor", example_inputs=(x,))
    assert len(frugal.given) == 2


def test_code_that_cannot_be_checked_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(args: list[Any]) -> Any:
        raise ValueError("no data")

    def compiler(module: fx.GraphModule, inputs: Sequence[Any], owned: Any) -> _torch.InductorCode:
        return _torch.InductorCode(module.forward, refuse, ())

    monkeypatch.setattr(_torch, "compile_with_inductor", compiler)
    model, x = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    expected = backward(copy.deepcopy(model), mean_square, x)
    with pytest.warns(
        RuntimeWarning,
        match=r"could not be checked \(ValueError: no data\), and may take more than the .* budget may not hold",
    ):
        optimized = graphopt.optimize(model, backend="inductor", example_inputs=(x,))
    assert all(map(identical, backward(optimized, mean_square, x), expected))


def test_code_that_takes_more_in_any_parts_is_reported(frugal: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inductor._Chain.peaks

    def one_more(chain: inductor._Chain) -> list[int]:
        return [peak + bool(frugal.given) for peak in plain(chain)]

    monkeypatch.setattr(inductor._Chain, "peaks", one_more)
    model, x = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    expected = backward(copy.deepcopy(model), mean_square, x)
    step = graphopt.optimize_step(model, sgd(model), loss=mean_square, backend="inductor")
    with pytest.warns(RuntimeWarning, match=r"inductor's code takes .*, more than the .* budget may not hold"):
        assert torch.equal(step(x), expected[0])


def test_views_of_parameters_are_not_taken_for_freed() -> None:
    owned: list[set[str]] = []

    def compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        owned.append({node.name for node in inductor._Chain(module, inputs)._owned})
        return fx.GraphModule(module, module.graph).forward

    model = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    graphopt.optimize(model, backend=compiler, example_inputs=(torch.randn(4, 8),))
    assert owned == [set(), {"tanh"}]


# --- parts -----------------------------------------------------------------------------------------------------------


@functools.cache
def fitted_program(p: float) -> tuple[Program, nn.Module]:
    """A joint program with values that are recomputed."""
    model = gpt(p)
    program = graphopt.capture(model, (TOKENS,), loss=next_token)
    graphopt.Pipeline([FitMemory("85%")]).run(program)
    return program, model


@pytest.mark.sweep
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_dry_run_predicts_the_measured_peak(p: float) -> None:
    program, model = fitted_program(p)
    module = program.to_graph_module()
    chain = inductor._Chain(module, [value_of(node) for node in program.placeholders])
    inputs = Binding(program, copy.deepcopy(model)).gather(flatten((TOKENS,), paths=False)[0])

    def run() -> Any:
        with torch.no_grad():
            return module.forward(inputs)

    measured = graphopt.measure_peak(run).allocated_peak_bytes
    assert max(chain.peaks()) == pytest.approx(measured, rel=1e-3)


@pytest.mark.sweep
@examples(6)
@given(p=st.sampled_from([0.0, 0.1]), cuts=st.lists(st.integers(1, 400), max_size=6))
def test_dividing_changes_neither_results_nor_the_peak(p: float, cuts: list[int]) -> None:
    program, model = fitted_program(p)
    module = program.to_graph_module()
    chain = inductor._Chain(module, [value_of(node) for node in program.placeholders])
    whole = max(chain.peaks())
    for cut in cuts:
        part = max(chain.parts, key=lambda part: len(part.calls))
        chain.divide(part, inductor._middle(part.calls) if cut % 3 else 1 + cut % (len(part.calls) - 1))
    assert max(chain.peaks()) == whole
    outcomes = []
    for run in (module.forward, chain.runner()):
        inputs = Binding(program, copy.deepcopy(model)).gather(flatten((TOKENS,), paths=False)[0])
        torch.manual_seed(2)
        with torch.no_grad():
            outcomes.append(run(inputs))
        assert inputs == []
    assert all(map(identical, *outcomes))


@pytest.mark.sweep
@pytest.mark.parametrize("passes", [[Recompute("blocks.*")], [Offload(tier="disk", min_bytes=1)]])
def test_what_waits_elsewhere_or_runs_again_survives_division(hoarder: Compiler, passes: list[graphopt.Pass]) -> None:
    model = gpt(0.1)
    expected = backward(copy.deepcopy(model), next_token, TOKENS)
    optimized = graphopt.optimize(copy.deepcopy(model), passes, backend="inductor")
    assert all(map(identical, backward(optimized, next_token, TOKENS), expected))
    assert drop_in_peak(optimized, next_token, TOKENS) <= optimized.program.memory().allocated_peak_bytes


def padded_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of the next word with targets moved by one place, as models of transformers compute it."""
    moved = F.pad(targets, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(model(tokens).flatten(0, 1), moved.flatten(), ignore_index=-100)


@pytest.mark.sweep
@quiet
def test_code_for_sizes_that_vary_serves_them_all() -> None:
    model = Lengths()
    lengths = [9, 12, 20, 33]
    found = trained("step", model, padded_loss, sentences(lengths), backend="inductor")
    wanted = trained("eager", model, padded_loss, sentences(lengths))
    assert found.captures == 2
    for mine, eager in zip(found.tensors, wanted.tensors, strict=True):
        torch.testing.assert_close(mine, eager)
