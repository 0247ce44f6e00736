"""A whole step where a loop was: validation, eval mode, lines of the old loop, passes of an optimized model."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import graphopt
from graphopt import GraphoptError, PipelineError
from graphopt.passes import ClipGradients, Recompute
from tests.support.running import sgd
from tests.support.training import identical

X = torch.linspace(-1, 1, 24).reshape(6, 4)


def same(one: object, other: object) -> bool:
    """Whether nested values are equal, tensors to the last bit."""
    (ours, spec), (theirs, other_spec) = tree_flatten(one), tree_flatten(other)
    pairs = zip(ours, theirs, strict=True)
    return spec == other_spec and all(identical(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state()))


@pytest.mark.sweep(
    cases=("False-no_grad-True", "False-inference_mode-True", "True-no_grad-True", "True-inference_mode-True")
)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
def test_without_gradients_a_step_is_the_loss_of_eager_mode(
    captured: bool, around: type[torch.no_grad], training: bool
) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=square)
    if captured:
        step(X)
    eager = copy.deepcopy(model).train(training)
    model.train(training)
    held, parameters = step.state_dict(), [parameter.clone() for parameter in model.parameters()]
    with around():
        torch.manual_seed(3)
        wanted = square(eager, X)
        torch.manual_seed(3)
        loss = step(X)
    assert torch.equal(loss, wanted)
    assert not loss.requires_grad
    assert same(dict(model.state_dict()), dict(eager.state_dict()))
    assert same([*model.parameters()], parameters)
    assert same(step.state_dict(), held)


def test_evaluate_is_the_loss_in_eval_mode_and_changes_nothing() -> None:
    model = network()
    model[2].eval()
    optimizer = sgd(model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=square)
    step(X)
    flags, before = [module.training for module in model.modules()], state(model, optimizer)
    wanted = square(copy.deepcopy(model).eval(), X).detach()
    assert torch.equal(step.evaluate(X), wanted)
    assert same(state(model, optimizer), before)
    assert [module.training for module in model.modules()] == flags
    with pytest.raises(ZeroDivisionError):
        graphopt.optimize_step(model, optimizer, loss=lambda model, x: 1 / 0).evaluate(X)
    assert [module.training for module in model.modules()] == flags


def test_in_eval_mode_it_trains_as_a_loop_would_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network().eval()
    eager = copy.deepcopy(model)
    optimizer, plain = sgd(model.parameters()), sgd(eager.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=square)
    for _ in range(3):
        loss = square(eager, X)
        loss.backward()
        plain.step()
        plain.zero_grad()
        assert torch.equal(step(X), loss.detach())
    assert same(dict(model.state_dict()), dict(eager.state_dict()))
    (said,) = [text for text in caplog.messages if "is in eval mode" in text]
    assert "dropout off and statistics frozen: call model.train()" in said


def test_the_loss_says_that_backward_has_run() -> None:
    model = network()
    loss = graphopt.optimize_step(model, sgd(model.parameters()), loss=square)(X)
    with pytest.raises(GraphoptError, match=r"has run backward and the update already: leave out loss.backward\(\)"):
        loss.backward()
    saved = io.BytesIO()
    torch.save(copy.deepcopy(loss), saved)
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=False), loss)
    loss *= 2
    assert float(loss) == loss.item()


def test_an_optimizer_step_of_the_old_loop_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    optimizer = sgd(model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=square)
    optimizer.step()
    assert caplog.messages == []  # nothing has been trained yet
    for _ in range(2):
        step(X)
        optimizer.step()
    (said,) = caplog.messages
    assert "optimizer.step() finds no gradients" in said
    assert "ClipGradients" in said


@pytest.mark.sweep
def test_hooks_of_the_user_on_the_optimizer_are_called() -> None:
    model, seen = network(), []
    optimizer = sgd(model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=square)
    step(X)
    handle = optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    step(X)
    step(X)
    handle.remove()
    step(X)
    assert seen == [1, 1]


# --- passes of a model that is optimized already ---------------------------------------------------------------------


def test_the_passes_of_an_optimized_model_are_taken_over() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    outer = graphopt.optimize(copy.deepcopy(model), [Recompute(["0", "1", "2"])])
    steps = [
        graphopt.optimize_step(outer, sgd(outer.parameters()), [ClipGradients(max_norm=0.1)], loss=square),
        graphopt.optimize_step(
            model, sgd(model.parameters()), [Recompute(["0", "1", "2"]), ClipGradients(max_norm=0.1)], loss=square
        ),
    ]
    assert torch.equal(*(step(X) for step in steps))
    assert [[record.name for record in step.records] for step in steps] == [["recompute", "clip-gradients"]] * 2
    assert same(dict(outer.state_dict()), dict(model.state_dict()))


def test_a_pass_that_is_given_twice_is_refused() -> None:
    model = graphopt.optimize(network(), [Recompute("0")])
    with pytest.raises(PipelineError, match=r"'recompute' is given here and in graphopt\.optimize around the model"):
        graphopt.optimize_step(model, sgd(model.parameters()), [Recompute("1")], loss=square)


# --- a loop that changes what the model gives ------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x).square().mean(), self.other(x).sum()


@pytest.mark.sweep(but=("used2",))
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_a_loss_can_be_changed_in_place(used: tuple[int, ...]) -> None:
    model = Two()
    gradients = []
    for current in (model, graphopt.optimize(copy.deepcopy(model))):
        outputs = current(X)
        loss = outputs[used[0]]
        loss *= 0.5
        for index in used[1:]:
            loss += outputs[index]
        loss.backward()
        gradients.append([parameter.grad for parameter in current.parameters()])
    assert [g is None for g in gradients[0]] == [g is None for g in gradients[1]]
    assert same(*gradients)


@pytest.mark.sweep
def test_a_glob_for_checkpoints_leaves_tangents_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("**")])
    gradients = []
    for current in (model, optimized):
        square(current, X).backward()
        gradients.append([parameter.grad for parameter in current.parameters()])
    assert same(*gradients)
    with pytest.raises(GraphoptError, match=r"'tangent\[0\]' cannot be a checkpoint"):
        graphopt.optimize(copy.deepcopy(model), [Recompute("tangent[0]")], example_inputs=(X,))
