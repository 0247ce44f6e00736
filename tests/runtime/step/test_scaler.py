"""`graphopt.scaler`: drop-in loops against the same loops with ``torch.amp.GradScaler``, and its state machine."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError, PipelineError
from graphopt.passes import ClipGradients, Offload, Recompute, ScaleLoss
from graphopt.rewriting.precision.scaling import SCALE, SKIPPED, LossScaling, checked_gradients
from graphopt.runtime.step.scaler import Scaler
from tests.support.covering import covering
from tests.support.running import Compiler
from tests.support.scaling import Fragile, batch, batches, loss_of
from tests.support.training import OPTIMIZERS, Blocks, Training, assert_same, identical, mean_square, next_token

FAST = ScaleLoss(growth_interval=2)
Loop = Callable[[nn.Module, torch.optim.Optimizer, Any, list[Any]], Iterator[float]]


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, run: list[Any]) -> Iterator[float]:
    """The usual loop."""
    for inputs in run:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, *inputs)).backward()
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


def clipping_loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, run: list[Any]) -> Iterator[float]:
    """Unscale, clip, step."""
    for inputs in run:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, *inputs)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


def accumulating_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, run: list[Any]
) -> Iterator[float]:
    """Two backward calls for each step."""
    for number, inputs in enumerate(run):
        scaler.scale(loss_of(model, *inputs) / 2).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        yield scaler.get_scale()


def injecting_loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, run: list[Any]) -> Iterator[float]:
    """Gradients made infinite from outside between backward and step."""
    for number, inputs in enumerate(run):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, *inputs)).backward()
        if number in (2, 5):
            next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


def setting_loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, run: list[Any]) -> Iterator[float]:
    """The scale and the settings changed on the way, and the state taken over by itself."""
    for number, inputs in enumerate(run):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, *inputs)).backward()
        scaler.step(optimizer)
        scaler.update([None, 128.0, torch.tensor(64.0)][number % 3])
        if number == 3:
            scaler.set_growth_factor(4.0)
            scaler.set_backoff_factor(0.25)
            scaler.load_state_dict(scaler.state_dict())
        yield scaler.get_scale()


LOOPS: dict[str, Loop] = {
    "plain": plain_loop,
    "clipping": clipping_loop,
    "accumulating": accumulating_loop,
    "injecting": injecting_loop,
    "setting": setting_loop,
}


def both(
    loop: Loop, kind: str, run: list[Any], passes: Any = (FAST,), *, make: Any = Fragile, **options: Any
) -> tuple[nn.Module, Scaler]:
    """Run a loop in eager mode with torch's scaler, and drop-in with ours; everything must be equal."""
    results = []
    for mine in (False, True):
        model = graphopt.optimize(make(), passes, **options) if mine else make()
        optimizer = OPTIMIZERS[kind](model.parameters())
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        scaler: Any = graphopt.scaler(model) if mine else torch.amp.GradScaler("cpu", growth_interval=2)
        torch.manual_seed(1)
        scales = list(loop(model, optimizer, scaler, run))
        results.append((Training().end(model, optimizer), scales, scaler.state_dict(), model, scaler))
    (expected, scales, state, _, _), (found, levels, mine_state, model, scaler) = results
    assert_same(expected, found, loop.__name__)
    assert levels == scales
    assert mine_state == state
    return model, scaler


@pytest.mark.sweep
@covering(name=list(LOOPS), kind=["adamw", "rmsprop"])
def test_loops_equal_torchs(name: str, kind: str) -> None:
    both(LOOPS[name], kind, batches("bbgggbggbbggg"))


@pytest.mark.sweep
@pytest.mark.parametrize("place", range(4))
def test_inf_in_each_gradient(place: int) -> None:
    model, _ = both(plain_loop, "adam", batches("ggbg", [place]))
    checked = checked_gradients(model.program)  # type: ignore[arg-type]
    assert checked is not None
    assert len(checked.sites) == 4


def test_gradients_are_unscaled() -> None:
    plain, scaled = Fragile(), graphopt.optimize(Fragile(), [ScaleLoss()])
    x, factors = batch(0)
    for _ in range(2):
        for model in (plain, scaled):
            inputs = x.clone().requires_grad_()
            loss_of(model, inputs, factors).backward()
            model.inputs = inputs.grad  # type: ignore[assignment]
        assert identical(plain.inputs, scaled.inputs)
        assert all(identical(p.grad, q.grad) for p, q in zip(plain.parameters(), scaled.parameters(), strict=True))
    assert graphopt.scaler(scaled).get_scale() == 65536.0


def test_backward_runs_at_the_present_scale() -> None:
    model = graphopt.optimize(nn.Linear(1, 1, bias=False), [ScaleLoss(init_scale=2.0**100)])
    scaler, optimizer = graphopt.scaler(model), torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for new in (2.0**20, 2.0**120, 2.0**30, None):
        optimizer.zero_grad()
        model(torch.full((1, 1), 2.0**60)).sum().backward()  # infinite at a scale of 2^68 and more
        found.append(bool(model.weight.grad.isfinite().all()))  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update(new)
    assert found == [False, True, False, True]


def test_scaling_lifts_small_half_precision_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    scaled = graphopt.optimize(copy.deepcopy(plain), [ScaleLoss(init_scale=2.0**14)])
    x, weights = torch.randn(8, 4).half(), torch.randn(8, 4).half() * 1e-6
    for model in (plain, scaled):
        (model(x).float() * weights.float() * 0.05).sum().backward()
    reference = copy.deepcopy(plain).double()
    reference.zero_grad()
    (reference(x.double()) * weights.double() * 0.05).sum().backward()

    def error(model: nn.Module) -> float:
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        return sum(float((p.grad.double() - r.grad).abs().sum()) for p, r in pairs)  # type: ignore[union-attr]

    assert error(scaled) < error(plain)


# --- several models, optimizers, losses ------------------------------------------------------------------------------


def several(mine: bool, *, bad_first: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Two models, two optimizers, two losses; once, one model's gradient is made infinite."""
    models: list[nn.Module] = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2)]
    torch.manual_seed(5)
    for model in models:
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    if mine:
        models = [graphopt.optimize(model, [FAST]) for model in models]
    makers = [OPTIMIZERS["momentum"], OPTIMIZERS["adam"]]
    optimizers = [make(model.parameters()) for make, model in zip(makers, models, strict=True)]
    for optimizer in optimizers:
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    scaler: Any = graphopt.scaler(*models) if mine else torch.amp.GradScaler("cpu", growth_interval=2)
    scales = []
    for number in range(6):
        x, target = batch(number)[0], torch.ones(5, 2)
        one, two = (model(x) for model in models)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((0.6 * one + 0.4 * two - target).square().mean()).backward(retain_graph=True)
        scaler.scale((0.6 * one - 0.4 * two - target).square().mean()).backward()
        if number == 3:
            next(models[0 if bad_first else 1].parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [p for model in models for p in model.parameters()]


@pytest.mark.sweep(but=("True",))
@pytest.mark.parametrize("bad_first", [False, True])
def test_two_models_optimizers_and_losses(bad_first: bool) -> None:
    scales, expected = several(False, bad_first=bad_first)
    levels, found = several(True, bad_first=bad_first)
    assert levels == scales
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_two_optimizers_of_one_model() -> None:
    results = []
    for mine in (False, True):
        model = graphopt.optimize(Fragile(), [FAST]) if mine else Fragile()
        scaler: Any = graphopt.scaler(model) if mine else torch.amp.GradScaler("cpu", growth_interval=2)
        parts = [torch.optim.RMSprop(part.parameters()) for part in model.children()]
        for inputs in batches("ggbgb", [3]):
            scaler.scale(loss_of(model, *inputs)).backward()
            for part in parts:
                scaler.step(part)
                part.zero_grad()
            scaler.update()
        results.append([*model.parameters(), torch.tensor(scaler.get_scale())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_parameters_outside_of_the_model() -> None:
    model, head = graphopt.optimize(Fragile(), [FAST]), nn.Linear(2, 1)
    scaler = graphopt.scaler(model)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    head(model(*batch(0))).sum().backward()
    head.weight.grad.fill_(math.nan)  # type: ignore[union-attr]
    before = [p.clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 32768.0


@pytest.mark.sweep
def test_sparse_gradients_outside_of_the_model() -> None:
    model, table = graphopt.optimize(Fragile(), [FAST]), nn.Embedding(4, 2, sparse=True)
    scaler, (x, factors) = graphopt.scaler(model), batch(0)
    optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=0.1)
    for bad in (False, True):
        optimizer.zero_grad()
        weight = math.inf if bad else 1.0
        (model(x, factors) * table(torch.tensor([0, 0, 1, 2, 2])) * weight).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (32768.0 if bad else 65536.0)
    assert all(p.isfinite().all() for p in [*model.parameters(), *table.parameters()])


# --- the state machine -----------------------------------------------------------------------------------------------


def ready() -> tuple[nn.Module, Scaler, torch.optim.Optimizer]:
    """A model that was called, with gradients, its scaler and an optimizer."""
    model = graphopt.optimize(Fragile(), [FAST])
    loss_of(model, *batch(0)).backward()
    return model, graphopt.scaler(model), torch.optim.SGD(model.parameters(), lr=0.1)


def test_errors_of_the_state_machine_are_torchs() -> None:
    _, scaler, optimizer = ready()
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=re.escape("unscale_() has already been called on this optimizer since the")):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=re.escape("step() has already been called since the last update().")):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=re.escape("unscale_() is being called after step().")):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 0.0)
    with pytest.raises(AssertionError, match=r"No inf checks were recorded for this optimizer\."):
        scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3)
    with pytest.raises(AssertionError, match="new_scale should be a float or a 1-element"):
        scaler.update(torch.ones(2))


def test_nothing_works_before_the_first_call() -> None:
    model = graphopt.optimize(Fragile(), [FAST])
    scaler, optimizer = graphopt.scaler(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for what, call in (
        ("unscale_", lambda: scaler.unscale_(optimizer)),
        ("step", lambda: scaler.step(optimizer)),
        ("update", scaler.update),
    ):
        with pytest.raises(RuntimeError, match=f"Attempted {what} but _scale is None"):
            call()
    assert scaler.get_scale() == 65536.0


def test_scale_returns_what_it_gets() -> None:
    _, scaler, _ = ready()
    one, two = torch.ones(()), torch.ones(3)
    assert scaler.scale(one) is one
    assert scaler.scale([one, (two, one)]) == [one, (two, one)]
    assert all(a is b for a, b in zip(scaler.scale(item for item in (one, two)), (one, two), strict=True))


def test_settings_come_from_the_pass() -> None:
    options = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
    scaler = graphopt.scaler(graphopt.optimize(Fragile(), [ScaleLoss(**options)]))
    assert scaler.is_enabled()
    assert scaler.get_scale() == 8.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 7)
    assert scaler.state_dict() == torch.amp.GradScaler("cpu", **options).state_dict()
    patient = graphopt.scaler(graphopt.optimize(Fragile(), [ScaleLoss(hysteresis=2)]))
    assert patient.state_dict()["_hysteresis_tracker"] == 0


@pytest.mark.sweep
def test_scale_grows_after_the_interval_is_lowered() -> None:
    model = graphopt.optimize(Fragile(), [ScaleLoss(growth_interval=50)])
    scaler, optimizer = graphopt.scaler(model), torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(5):
        loss_of(model, *batch(number)).backward()
        scaler.step(optimizer)
        scaler.update()
        if number == 3:
            scaler.set_growth_interval(2)
    assert scaler.get_scale() == 131072.0


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["before the first call", "later"])
def test_state_goes_to_and_from_torchs_scaler(when: str) -> None:
    _, scaler, optimizer = ready()
    scaler.step(optimizer)
    scaler.update()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.state_dict() == scaler.state_dict()
    model = graphopt.optimize(Fragile(), [ScaleLoss()])
    other = graphopt.scaler(model)
    if when == "later":
        loss_of(model, *batch(0)).backward()
    state = {**theirs.state_dict(), "scale": 1024.0, "_growth_tracker": 1}
    other.load_state_dict(state)
    assert other.state_dict() == state
    model.zero_grad()
    loss_of(model, *batch(1)).backward()
    assert float(model._graphopt.runner.store[SCALE]) == 1024.0  # type: ignore[operator, index]
    other.step(torch.optim.SGD(model.parameters(), lr=0.1))
    other.update()
    assert other.get_scale() == 2048.0  # the second good step of two
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        other.load_state_dict({})
    with pytest.raises(GraphoptError, match=r"no state of a scaler: growth_factor, .* missing"):
        other.load_state_dict({"scale": 1.0})


def test_too_many_skipped_steps_name_the_gradient() -> None:
    model = graphopt.optimize(Fragile(), [ScaleLoss(max_skipped=2)])
    scaler, optimizer = graphopt.scaler(model), torch.optim.SGD(model.parameters(), lr=0.1)

    def step(*bad: int) -> None:
        optimizer.zero_grad()
        loss_of(model, *batch(0)).backward()  # its flags must not hide what the next backward finds
        loss_of(model, *batch(0, bad)).backward()
        scaler.step(optimizer)
        scaler.update()

    step(1)
    step()
    step(0, 3)
    with pytest.raises(GraphoptError, match=r"(?s)2 steps in a row .* first of 2 .* is that of second\.bias \("):
        step(0, 3)
    with pytest.raises(GraphoptError, match=r"(?s)3 steps in a row .* the one gradient .* is that of first\.weight \("):
        step(0)
    step()
    assert int(model._graphopt.runner.store[SKIPPED]) == 0  # type: ignore[operator, index]
    optimizer.zero_grad()
    for _ in range(2):
        loss_of(model, *batch(0)).backward()
        model.first.weight.grad.fill_(math.nan)  # type: ignore[union-attr, operator]
        scaler.step(optimizer)
        if _:
            with pytest.raises(GraphoptError, match="every gradient that this program computed is finite"):
                scaler.update()
        else:
            scaler.update()


# --- disabled, wrong, copied -----------------------------------------------------------------------------------------


def test_a_disabled_scaler_is_transparent() -> None:
    results = []
    for mine in (False, True):
        model = graphopt.optimize(Fragile(), [Recompute(())]) if mine else Fragile()
        scaler: Any = graphopt.scaler(model) if mine else torch.amp.GradScaler("cpu", enabled=False)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        for inputs in batches("ggg"):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, *inputs)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.step(optimizer, closure=None)
            scaler.update()
        scaler.load_state_dict({})
        assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict(), scaler.scale("x")) == (
            1.0,
            False,
            {},
            "x",
        )
        results.append(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_what_scaler_takes() -> None:
    model, other = (graphopt.optimize(Fragile(), [FAST]) for _ in range(2))
    assert graphopt.scaler(model) is graphopt.scaler(model)
    with pytest.raises(GraphoptError, match="has a scaler already, of other models"):
        graphopt.scaler(model, other)
    with pytest.raises(GraphoptError, match=r"takes the results of graphopt\.optimize, and got a Fragile that is none"):
        graphopt.scaler(Fragile())
    with pytest.raises(GraphoptError, match="at least one model"):
        graphopt.scaler()
    with pytest.raises(GraphoptError, match="scale their losses differently"):
        graphopt.scaler(other, graphopt.optimize(Fragile(), [ScaleLoss(init_scale=4.0)]))
    late = [graphopt.optimize(Fragile(), [FAST]) for _ in range(2)]
    for item in late:
        loss_of(item, *batch(0)).backward()
    with pytest.raises(GraphoptError, match="share it before the first call of the models"):
        graphopt.scaler(*late)


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_keep_the_scale(how: str) -> None:
    model, scaler, optimizer = ready()
    next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    again = graphopt.scaler(twin)
    assert again is not scaler
    assert again.get_scale() == scaler.get_scale() == 32768.0
    loss_of(twin, *batch(1)).backward()
    again.step(torch.optim.SGD(twin.parameters(), lr=0.1))
    again.update(4.0)
    assert (again.get_scale(), scaler.get_scale()) == (4.0, 32768.0)
    assert set(twin.state_dict()) == set(model.state_dict())


def test_clipping_is_for_whole_steps() -> None:
    with pytest.raises(
        PipelineError, match="clip-gradients rewrites the optimizer's update, which a drop-in model does"
    ):
        graphopt.optimize(Fragile(), [ClipGradients(1.0)])


def test_a_gradient_penalty_is_refused() -> None:
    model = graphopt.optimize(Fragile(), [FAST])
    x, factors = batch(0)
    x.requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(model, x, factors), x, create_graph=True)
    with pytest.raises(graphopt.CaptureError, match="differentiated a second time"):
        slope.square().sum().backward()


class Autocast(nn.Module):
    """A model that computes in float16 and returns float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return self.inner(x).float()


@pytest.mark.sweep
def test_autocast_with_a_scaler() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, run: list[Any]) -> Iterator[float]:
        for x in run:
            optimizer.zero_grad()
            scaler.scale(mean_square(model, x)).backward()
            scaler.step(optimizer)
            scaler.update()
            yield scaler.get_scale()

    run = [torch.randn(6, 8) * (1e5 if number == 3 else 1.0) for number in range(12)]
    both(loop, "adamw", run, make=Autocast)


# --- other passes, backends, signatures ------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("passes", [[FAST, Recompute("blocks.*")], [FAST, Recompute("blocks.*"), Offload(min_bytes=1)]])
def test_with_other_passes(passes: Any) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, run: list[Any]) -> Iterator[float]:
        for tokens in run:
            optimizer.zero_grad()
            scaler.scale(next_token(model, tokens)).backward()
            scaler.step(optimizer)
            scaler.update()
            yield scaler.get_scale()

    torch.manual_seed(3)
    base = Blocks(layers=1)
    tokens = [torch.randint(11, (2, 6)) for _ in range(3)]
    both(loop, "adamw", tokens, passes, make=lambda: copy.deepcopy(base))


@pytest.mark.sweep
def test_behind_a_compiler() -> None:
    both(plain_loop, "adam", batches("ggbgg"), backend=Compiler())


def test_one_scale_for_all_signatures() -> None:
    model, scaler = both(plain_loop, "sgd", [(x[: 2 + n % 3], f) for n, (x, f) in enumerate(batches("ggbggg"))])
    assert len(model._graphopt.runner.captures.all()) == 2  # type: ignore[union-attr, operator]
    assert scaler.get_scale() > 0


@pytest.mark.sweep
def test_sizes_that_vary() -> None:
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "factors": None}
    run = [(x[: 3 + n % 3], f) for n, (x, f) in enumerate(batches("ggbggg"))]
    model, _ = both(plain_loop, "adam", run, dynamic_shapes=shapes)
    assert len(model._graphopt.runner.captures.all()) == 1  # type: ignore[union-attr, operator]
    found = []
    for candidate in (graphopt.optimize(Fragile(), [FAST], dynamic_shapes=shapes), Fragile()):
        inputs = [batch(number)[0][: 3 + number].clone().requires_grad_() for number in range(3)]
        for x in inputs:
            loss_of(candidate, x, torch.ones(4)).backward()
        found.append([x.grad for x in inputs])
    assert all(identical(one, other) for one, other in zip(*found, strict=True))


def test_predicted_and_measured_peak() -> None:
    torch.manual_seed(0)
    model = graphopt.optimize(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), [FAST])
    x = torch.randn(16, 64)

    def step() -> torch.Tensor:
        result = model(x)
        result.square().mean().backward()
        return result

    step()
    model.zero_grad()
    measured = graphopt.measure_peak(step).allocated_peak_bytes
    predicted = model.program.memory().allocated_peak_bytes  # type: ignore[operator, union-attr]
    assert abs(measured - predicted) <= max(64, predicted / 1000)


def test_scaling_protocol() -> None:
    assert ScaleLoss(init_scale=2.0).scaling == LossScaling(init_scale=2.0)
