"""`optimize`: a drop-in model behaves as the model it was made from, whatever is called with it."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend

import graphopt
from graphopt import CaptureError, GraphoptError, Pass
from graphopt.ir.node import value_of
from graphopt.passes import FitMemory, Recompute
from tests.support.covering import covering
from tests.support.running import Compiler, Gate, Mixed, X, gradients, network, rows, same, sgd
from tests.support.training import Net, assert_same, assert_same_training, mean_square, train

SGD = "momentum"


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_another_shape_is_captured_once_more() -> None:
    model, compiler = network(), Compiler()
    optimized = graphopt.optimize(copy.deepcopy(model), backend=compiler)
    for count in (4, 6, 4, 6):
        assert same(gradients(optimized, rows(count)), gradients(model, rows(count)))
    assert compiler.halves == 2


@pytest.mark.sweep
def test_one_program_serves_a_range_of_sizes() -> None:
    model, compiler = network(), Compiler()
    batches = [(rows(count),) for count in (4, 7, 2, 33)]
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("net.3")], dynamic_shapes=shapes, backend=compiler)
    assert_same(train(copy.deepcopy(model), sgd, mean_square, batches), train(optimized, sgd, mean_square, batches), "")
    assert compiler.halves == 1
    for bad in (1, 65):
        with pytest.raises(
            GraphoptError, match=rf"dimension 0 of args\[0\] is {bad}, and dynamic_shapes allows 2 to 64"
        ):
            optimized(rows(bad))
    model.load_state_dict(optimized.state_dict())
    assert same(gradients(optimized, rows(5)), gradients(model, rows(5)))


@pytest.mark.sweep
def test_sizes_with_one_name_must_agree() -> None:
    dim = torch.export.Dim("rows", min=2, max=64)
    optimized = graphopt.optimize(Gate(), dynamic_shapes={"x": {0: dim}, "y": {0: dim}})
    optimized(rows(4), rows(4))
    optimized(rows(9), rows(9))
    with pytest.raises(GraphoptError, match=r"dimension 0 of args\[1\] is 3, and it must equal 5"):
        optimized(rows(5), rows(3))
    with pytest.raises(CaptureError, match="dynamic_shapes names"):
        graphopt.optimize(Gate(), dynamic_shapes={"z": {0: dim}})(X, X)


def test_one_tensor_at_two_places_and_two_tensors_later() -> None:
    model = Gate()
    for first, second in (((X, X), (X, X.sin())), ((X, X.sin()), (X, X))):
        optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("a")])
        for batch in (first, second, first):
            assert same(gradients(optimized, *batch), gradients(model, *batch))
            assert torch.equal(optimized(*batch), model(*batch))


def test_gradients_of_one_tensor_at_two_places_add_up() -> None:
    model = Gate()
    optimized = graphopt.optimize(copy.deepcopy(model))
    for pattern in ((0, 0), (0, 1), (0, 0)):
        found = []
        for candidate in (model, optimized):
            leaves = [X.clone().requires_grad_(), X.cos().requires_grad_()]
            mean_square(candidate, *(leaves[i] for i in pattern)).backward()
            found.append([leaf.grad for leaf in leaves])
        assert same(*found)


def test_piling_captures_up_is_said(caplog: pytest.LogCaptureFixture) -> None:
    optimized = graphopt.optimize(nn.Linear(8, 2), dynamic_shapes=None)
    with caplog.at_level(logging.WARNING, "graphopt"):
        for count in range(1, 9):
            optimized(rows(count))
    assert "captured 8 programs for different calls" in caplog.text
    assert "dynamic_shapes" in caplog.text


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("dtype0-network",))
@pytest.mark.parametrize("make", [lambda: network(p=0.0), Mixed], ids=["network", "network with regions"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ambient_autocast(dtype: torch.dtype, make: Callable[[], nn.Module]) -> None:
    model, compiler = make(), Compiler()
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("**net.3")], backend=compiler)
    for enabled in (True, False, True):
        found = []
        for candidate in (model, optimized):
            candidate.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                result = candidate(X)
            result.float().square().mean().backward()
            found.append([result, *(parameter.grad for parameter in candidate.parameters())])
        assert found[1][0].dtype == found[0][0].dtype
        assert same(*found)
    assert compiler.halves == 2


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_capture_under_autocast_can_be_lowered_elsewhere(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        program = graphopt.capture(network(), (X,), stage="forward")
        expected = graphopt.capture(network(), (X,))
    assert program.lower is not None
    lowered = program.lower(program)
    assert value_of(lowered.find("net.5")["net.5"]).dtype == dtype
    assert lowered.to_text() == expected.to_text()


@pytest.mark.sweep
@pytest.mark.parametrize("passes", [[], [Recompute(["a.net.3", "c"])]], ids=["plain", "recompute"])
def test_autocast_regions_stay_casts(passes: list[Pass]) -> None:
    assert_same_training(Mixed(), SGD, mean_square, [(X,)], passes, steps=3)
    program = graphopt.capture(Mixed(), (X,))
    dtypes = {t.name: t.dtype for t in program.tensors}
    assert (dtypes["a.net.3"], dtypes["c"], dtypes["b.net.3"]) == (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.sweep
def test_a_model_moved_to_another_precision_is_captured_anew() -> None:
    model, compiler = network(), Compiler()
    optimized = graphopt.optimize(copy.deepcopy(model), backend=compiler)
    optimized(X)
    assert same(gradients(optimized.double(), X.double()), gradients(model.double(), X.double()))
    assert compiler.halves == 2


# --- backends --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_is_close_and_replays_random_numbers() -> None:
    model = network(p=0.5)
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("net.5")], backend="inductor")
    for seed in (1, 2):
        expected, state = gradients(model, X, seed=seed), torch.get_rng_state()
        torch.testing.assert_close(gradients(optimized, X, seed=seed), expected, rtol=1e-4, atol=1e-6)
        assert torch.equal(torch.get_rng_state(), state)
    assert optimized.records[0].changed.counts["random ops replayed"] > 0


def test_a_callable_gets_both_halves() -> None:
    model, compiler = network(), Compiler()
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("net.3")], backend=compiler)
    assert same(gradients(optimized, X), gradients(model, X))
    forward, backward = ([n.name for n in module.graph.nodes] for module, _ in compiler.given)
    assert [n.name for n in optimized.forward_graph.graph.nodes] == forward
    assert [n.name for n in optimized.backward_graph.graph.nodes] == backward
    for module, inputs in compiler.given:
        shapes = [value_of(n).shape for n in module.graph.find_nodes(op="placeholder")]
        assert [value.shape for value in inputs] == shapes


@pytest.mark.sweep
def test_torch_s_own_backends_take_both_halves() -> None:
    """They say that they take one list, and take ``*args``."""
    model = network()
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("net.3")], backend=lookup_backend("aot_eager"))
    assert same(gradients(optimized, X), gradients(model, X))


def test_wrong_backends_are_refused() -> None:
    with pytest.raises(GraphoptError, match="no backend 'inducto'; did you mean 'inductor'"):
        graphopt.optimize(network(), backend="inducto")  # type: ignore[arg-type]
    with pytest.raises(GraphoptError, match="returned int, which cannot be called"):
        graphopt.optimize(network(), backend=lambda module, inputs: 3)(X)  # type: ignore[arg-type, return-value]


# --- copies ----------------------------------------------------------------------------------------------------------


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.sweep(but=("torch.save-False",))
@covering(how=list(COPIES), called=[False, True])
def test_copies_are_optimized_models_of_their_own(how: str, called: bool) -> None:
    model = network()
    optimized = graphopt.optimize(model, [Recompute("net.3")])
    if called:
        gradients(optimized, X)
    other = COPIES[how](optimized)
    assert isinstance(other, Net)
    assert type(other).__name__ == "Net"
    assert list(other.state_dict()) == list(model.state_dict())
    assert all(p is q for p, q in zip(optimized.parameters(), model.parameters(), strict=True))
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert same(gradients(other, X), gradients(model, X))
    assert other.records[0].changed
    with torch.no_grad():
        other.net[0].weight.zero_()
    assert model.net[0].weight.any()


def test_the_model_and_its_optimized_form_share_everything() -> None:
    model = network()
    optimized = graphopt.optimize(model)
    assert isinstance(optimized, Net)
    assert list(optimized.state_dict()) == list(model.state_dict())
    optimized(X)
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert same(gradients(optimized, X), gradients(copy.deepcopy(model), X))
    model.net[0].weight = nn.Parameter(torch.ones(16, 8))
    assert same(gradients(optimized, X), gradients(copy.deepcopy(model), X))


# --- what is called with it ------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("no_grad",))
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_and_in_eval_mode_run_the_plain_forward(context: Callable[[], Any]) -> None:
    model, compiler = Net(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)), Compiler()
    optimized = graphopt.optimize(copy.deepcopy(model), backend=compiler)
    for _ in range(2):
        found = []
        for candidate in (model, optimized):
            torch.manual_seed(1)
            with context():
                results = [candidate.train()(X)]
            results += [candidate.eval()(X), *candidate.buffers()]
            found.append([*results, *gradients(candidate, X)])  # of eval mode
            candidate.train()(X).sum().backward()
        assert same(*found)
    assert compiler.halves == 1


class TwoLosses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.c(torch.tanh(self.a(x)).exp()))
        return {"one": hidden.sum(), "two": self.b(hidden).square().sum(), "hidden": hidden, "number": 3}


LOSSES: dict[str, Callable[[dict[str, Any]], torch.Tensor]] = {
    "weighted": lambda found: found["one"] + 2 * found["two"],
    "first": lambda found: found["one"],
    "second": lambda found: found["two"],
    "through an output": lambda found: found["two"] * found["hidden"].mean() ** found["number"],
}


@pytest.mark.sweep
@covering(loss=LOSSES, passes={"recompute": [Recompute("c")], "plain": []})
def test_several_losses(passes: list[Pass], loss: Callable[[dict[str, Any]], torch.Tensor]) -> None:
    assert_same_training(TwoLosses(), SGD, lambda model, x: loss(model(x)), [(X,)], passes, steps=3)


def test_hooks_of_the_model_run_once_per_call() -> None:
    model, calls, x = network(), list[str](), X.clone().requires_grad_()

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        calls.append("before")
        return (args[0] * 2,)

    def after(module: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        calls.append("after")
        return result * 3

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    model.register_full_backward_hook(lambda module, given, returned: calls.append("backward"))
    expected = [None if g is None else g.clone() for g in gradients(model, x)]
    assert calls == ["before", "after", "backward"]
    optimized = graphopt.optimize(model, [Recompute("net.3")])
    for _ in range(2):  # the call that captures, and a later one
        calls.clear()
        assert same(gradients(optimized, x), expected)
        assert calls == ["before", "after", "backward"]


class Scaled(nn.Module):
    """Reads plain attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.weights = nn.Linear(4, 4), 2.0, torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * self.scale * self.weights
        return result if self.training else result * 10


def test_what_is_set_on_one_of_the_two_models_is_set_on_the_other() -> None:
    model = Scaled()
    optimized = graphopt.optimize(model, [Recompute("auto")])
    changes: list[Callable[[nn.Module], object]] = [
        lambda model: setattr(model, "scale", 3.0),
        lambda model: setattr(model, "weights", torch.arange(4.0)),
        lambda model: setattr(model, "linear", nn.Linear(4, 4, bias=False)),
        lambda model: model.eval(),
        lambda model: model.train(),
        lambda model: model.register_forward_hook(lambda module, args, result: result + 1),
    ]
    for number, change in enumerate(changes):
        change((model, optimized)[number % 2])
        assert model.training == optimized.training
        expected = gradients(copy.deepcopy(model), rows(3)[:, :4])
        assert same(gradients(optimized, rows(3)[:, :4]), expected), number
    model._forward_hooks.clear()
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # the given model is as it was
        assert type(one) is Scaled
        assert one.scale == 3.0


def test_a_forward_that_is_set_on_the_optimized_model_is_its_own() -> None:
    model = Scaled()
    x, before = rows(3)[:, :4], model(rows(3)[:, :4])
    optimized = graphopt.optimize(model)
    optimized.forward = lambda x: Scaled.forward(optimized, x) * 2
    assert torch.equal(optimized(x), before * 2)
    assert torch.equal(model(x), before)


class _Described(nn.Linear):
    def extra_repr(self) -> str:
        return f"mine, {super().extra_repr()}"


class _Named(nn.Linear):
    def __repr__(self) -> str:
        return "what its class says"


def test_the_text_of_a_model_says_that_it_is_optimized() -> None:
    for model in (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), _Described(4, 4), _Named(4, 4)):
        optimized = graphopt.optimize(model, "fit-memory{budget=100%}")
        own = repr(model)
        begin = "optimized by graphopt: fit-memory{budget=100%}; "
        assert repr(optimized) == str(optimized) == f"{begin}nothing captured yet\n{own}"
        optimized(torch.randn(2, 4)).sum().backward()
        assert repr(optimized) == f"{begin}1 program captured\n{own}"
        assert repr(model) == own
    assert repr(graphopt.optimize(nn.ReLU())) == "optimized by graphopt: no passes; nothing captured yet\nReLU()"
    assert "(0): optimized by graphopt: no passes" in repr(nn.Sequential(graphopt.optimize(nn.ReLU())))


def test_the_text_of_a_model_in_parts() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.up(x).relu()
            return self.down(h) if h.sum() > 0 else h

    optimized = graphopt.optimize(Branching(), [FitMemory("1MB")])
    optimized(torch.randn(2, 4)).sum().backward()
    first, *_ = repr(optimized).splitlines()
    assert re.fullmatch(r"optimized by graphopt: fit-memory\{budget=1MB\}; [12] parts? captured, .*", first)
    said = str(optimized.records)
    assert "is within its share of the budget" in said
    assert "GB" not in said
    assert not re.search(r"(?<![\d.])1 (parts|calls|values|tensors)\b", said)
