"""`optimize_step`: the optimizer stays the source of truth, and whole steps are what the same eager steps are."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import CaptureError, GraphoptError, Pass, TrainStep
from graphopt.passes import Recompute
from tests.support.covering import covering
from tests.support.running import Compiler, Gate, Mixed, X, adamw, gradients, network, rows, same, sgd
from tests.support.training import Training, assert_same, assert_same_training, identical, mean_square, train

RECOMPUTE: list[Pass] = [Recompute("net.3")]
Parameters = Iterable[nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]


def stepping(
    make: Make, batches: list[tuple[Any, ...]], between: Callable[[int, torch.optim.Optimizer], None], **options: Any
) -> tuple[Training, TrainStep]:
    """Train the network with whole steps; ``between(number, optimizer)`` runs after each."""
    model = network()
    optimizer, found = make(model.parameters()), Training()
    step = graphopt.optimize_step(model, optimizer, RECOMPUTE, loss=mean_square, **options)
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        found.add(f"{number}.loss", step(*batch))
        between(number, optimizer)
    return found.end(model, optimizer), step


def eager(
    make: Make, batches: list[tuple[Any, ...]], between: Callable[[int, torch.optim.Optimizer], None]
) -> Training:
    """The same in eager mode."""
    model = network()
    optimizer, found = make(model.parameters()), Training()
    torch.manual_seed(1)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = mean_square(model, *batch)
        loss.backward()
        optimizer.step()
        found.add(f"{number}.loss", loss)
        between(number, optimizer)
    return found.end(model, optimizer)


def nothing(number: int, optimizer: torch.optim.Optimizer) -> None:
    """Between two steps."""


BATCHES = [(X.roll(number, 0),) for number in range(6)]


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], str, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, "fused", {"lr": 0.1}),
    "SGD with weight decay": (torch.optim.SGD, "fused", {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, "fused", {"lr": 0.1, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, "fused", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, "fused", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, "fused", {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, "fused", {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, "fused", {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, "foreach", {"lr": 0.01}),
    "centered RMSprop": (torch.optim.RMSprop, "foreach", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adagrad": (torch.optim.Adagrad, "fused", {"lr": 0.05}),
    "Adagrad with decay": (torch.optim.Adagrad, "fused", {"lr": 0.05, "lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, "foreach", {}),
    "Rprop": (torch.optim.Rprop, "foreach", {}),
}


@pytest.mark.sweep
@covering(kind=list(OPTIMIZERS), named={"implementation left open": False, "implementation named": True})
def test_optimizers_update_as_in_eager_mode(kind: str, named: bool) -> None:
    cls, implementation, options = OPTIMIZERS[kind]
    explicit = {**options, implementation: True}
    expected = eager(lambda p: cls(p, **explicit), BATCHES[:5], nothing)  # type: ignore[arg-type]
    found, step = stepping(lambda p: cls(p, **(explicit if named else options)), BATCHES[:5], nothing)  # type: ignore[arg-type]
    assert_same(expected, found, kind)
    assert step.records[0].changed


FUSED_BY_DEFAULT = ("Adam", "AdamW", "Adagrad")
"""Optimizers that a whole step runs by another kernel than eager mode, where they are asked for none."""


@pytest.mark.sweep(but=("AdamW", "RMSprop"))
@pytest.mark.parametrize("name", [*FUSED_BY_DEFAULT, "SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "Rprop", "ASGD"])
@pytest.mark.filterwarnings("ignore:.* runs in eager mode")
def test_the_bits_of_an_optimizer_that_is_asked_for_no_kernel(name: str) -> None:
    cls: Any = getattr(torch.optim, name)
    found, _ = stepping(lambda p: cls(p, lr=0.01), BATCHES[:4], nothing)
    if name in FUSED_BY_DEFAULT:
        assert_same(eager(lambda p: cls(p, lr=0.01, fused=True), BATCHES[:4], nothing), found, name)
        plain, _ = stepping(lambda p: cls(p, lr=0.01, foreach=False), BATCHES[:4], nothing)
        assert_same(eager(lambda p: cls(p, lr=0.01), BATCHES[:4], nothing), plain, name)
    else:
        assert_same(eager(lambda p: cls(p, lr=0.01), BATCHES[:4], nothing), found, name)


@pytest.mark.parametrize("where", ["README.md", "graphopt/README.md", "optimize_step"])
def test_users_are_told_of_them(where: str) -> None:
    text = graphopt.optimize_step.__doc__ if where == "optimize_step" else Path(where).read_text(encoding="utf-8")
    told = " ".join(str(text).replace("``", "`").split())
    assert re.search("`Adam`, `AdamW` and `Adagrad` (that are asked for none |without .*)?run their fused kernel", told)


@pytest.mark.sweep(but=("fused",))
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: torch.optim.AdamW(p), 1),
        (lambda p: torch.optim.AdamW(p, fused=True), 0),
        (lambda p: torch.optim.SGD(p), 0),
    ],
    ids=["AdamW", "fused", "SGD"],
)
def test_a_kernel_that_nobody_asked_for_is_told_once(
    make: Callable[..., torch.optim.Optimizer], told: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    step = graphopt.optimize_step(model, make(model.parameters()), loss=mean_square)
    with caplog.at_level("INFO", "graphopt"):
        for count in (8, 8, 4):
            step(rows(count))
    assert sum("since no implementation was asked for" in line for line in caplog.messages) == told


@pytest.mark.sweep(but=("True",))
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_get_gradients_in_eager_mode_only_are_told_once(
    frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(not frozen), nn.Linear(8, 4))
    step = graphopt.optimize_step(model, sgd([*model[0].parameters(), *model[2].parameters()]), loss=mean_square)
    for count in (8, 8, 4):
        step(rows(count))
    told = [line for line in caplog.messages if "the optimizer does not hold them" in line]
    assert len(told) == (not frozen)
    assert all(
        line.startswith("the step computes no gradients for 2 parameters (1.weight first) that require them")
        for line in told
    )


def test_other_mistakes_with_optimizers() -> None:
    model = network()
    with pytest.raises(GraphoptError, match=r"optimizer is a torch\.optim optimizer over .*, got 3"):
        graphopt.optimize_step(model, 3)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="holds none of the parameters of this Net"):
        graphopt.optimize_step(model, sgd(network().parameters()), loss=mean_square)


@pytest.mark.sweep(cases=("<lambda>-nothing in Net requires a gradient",))
@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (None, r"returns a tensor of shape \(4, 8\): reduce it"),
        (lambda model, x: model(x)[0], r"returns a tensor of shape \(8,\): reduce it"),
        (lambda model, x: 3.0, "returns 0 tensors"),
        (lambda model, x: model(x).detach().sum(), "nothing in Net requires a gradient"),
    ],
)
def test_a_loss_is_one_scalar_that_needs_gradients(loss: Callable[..., Any] | None, reason: str) -> None:
    model = network()
    with pytest.raises(CaptureError, match=reason):
        graphopt.optimize_step(model, sgd(model.parameters()), loss=loss)(X)


# --- the optimizer stays the source of truth ------------------------------------------------------------------------


def groups(parameters: Parameters) -> torch.optim.Optimizer:
    first, second, *rest = parameters
    return torch.optim.AdamW(
        [
            {"params": [first], "lr": 0.05, "weight_decay": 0.2},
            {"params": rest, "betas": (0.5, 0.9)},
            {"params": [second]},
        ],
        lr=0.01,
        fused=True,
    )


def test_parameter_groups_and_a_scheduler_act_without_recapture() -> None:
    def with_schedule(run: Callable[..., Any], **options: Any) -> Any:
        schedules: dict[int, torch.optim.lr_scheduler.LRScheduler] = {}

        def make(parameters: Parameters) -> torch.optim.Optimizer:
            optimizer = groups(parameters)
            schedules[0] = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=0.1, total_steps=10, cycle_momentum=False
            )
            return optimizer

        def between(number: int, optimizer: torch.optim.Optimizer) -> None:
            schedules[0].step()
            if number == 3:
                optimizer.param_groups[2]["lr"] = 0.3

        return run(make, BATCHES, between, **options)

    compiler = Compiler()
    found, _ = with_schedule(stepping, backend=compiler)
    assert_same(with_schedule(eager), found, "groups and schedule")
    assert len(compiler.given) == 2  # the first step, which makes the state, and all others


@pytest.mark.sweep
def test_other_settings_are_traced_again() -> None:
    def between(number: int, optimizer: torch.optim.Optimizer) -> None:
        if number == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.5
        if number == 4:
            optimizer.param_groups[0]["betas"] = (0.8, 0.99)

    found, _ = stepping(adamw, BATCHES, between)
    assert_same(eager(adamw, BATCHES, between), found, "changed settings")
    without, _ = stepping(adamw, BATCHES, nothing)
    assert not identical(found.tensors["model.net.0.weight"], without.tensors["model.net.0.weight"])


@pytest.mark.sweep
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_state_loaded_between_steps_is_used(make: Make) -> None:
    kept: dict[str, Any] = {}

    def between(number: int, optimizer: torch.optim.Optimizer) -> None:
        if number == 1:
            kept.update(copy.deepcopy(optimizer.state_dict()))
        if number == 3:
            optimizer.load_state_dict(kept)

    found, _ = stepping(make, BATCHES, between)
    assert_same(eager(make, BATCHES, between), found, "loaded state")


@pytest.mark.sweep
@pytest.mark.parametrize("make", [sgd, adamw])
def test_training_goes_on_from_a_checkpoint_file(make: Make) -> None:
    whole, _ = stepping(make, BATCHES, nothing)
    model = network()
    optimizer, file = make(model.parameters()), io.BytesIO()
    step = graphopt.optimize_step(model, optimizer, RECOMPUTE, loss=mean_square)
    torch.manual_seed(1)
    for batch in BATCHES[:3]:
        step(*batch)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, file)
    file.seek(0)
    loaded, other = torch.load(file), network()
    other.load_state_dict(loaded["model"])
    resumed = make(other.parameters())
    resumed.load_state_dict(loaded["optimizer"])
    step = graphopt.optimize_step(other, resumed, RECOMPUTE, loss=mean_square)
    torch.set_rng_state(loaded["rng"])
    found = Training()
    for number, batch in enumerate(BATCHES[3:], 3):
        found.add(f"{number}.loss", step(*batch))
    expected = Training({k: v for k, v in whole.tensors.items() if not k.startswith(("0.", "1.", "2."))}, whole.values)
    assert_same(expected, found.end(other, resumed), "resumed")


# --- gradients from outside, and to outside --------------------------------------------------------------------------


def test_gradients_from_outside_are_refused() -> None:
    model = network()
    optimizer = sgd(model.parameters())
    step = graphopt.optimize_step(model, optimizer, loss=mean_square)
    gradients(model, X)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(GraphoptError, match=r"net\.0\.weight\.grad is set from outside .* optimizer\.zero_grad\(\)"):
        step(X)
    assert same(list(model.state_dict().values()), list(before.values()))
    optimizer.zero_grad()
    assert step(X).isfinite()
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.sweep
def test_inputs_get_gradients_that_add_up() -> None:
    found = []
    for whole in (False, True):
        torch.manual_seed(0)
        model = Gate()
        optimizer = sgd(model.parameters())
        x, y, frozen = X.clone().requires_grad_(), X.sin().requires_grad_(), X.cos()
        step = graphopt.optimize_step(model, optimizer, [Recompute("a")], loss=mean_square)
        for batch in ((x, y), (x, frozen), (x, x), (x.detach(), y)):
            if whole:
                step(*batch)
                continue
            mean_square(model, *batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([x.grad, y.grad, frozen.grad, *model.parameters()])
    assert same(*found)


# --- calls -----------------------------------------------------------------------------------------------------------


def test_one_step_program_serves_a_range_of_sizes() -> None:
    batches, compiler = [(rows(count),) for count in (4, 7, 2, 33, 4)], Compiler()
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    found, step = stepping(sgd, batches, nothing, dynamic_shapes=shapes, backend=compiler)
    assert_same(eager(sgd, batches, nothing), found, "sizes")
    assert len(compiler.given) == 2  # the first step, and all others
    with pytest.raises(GraphoptError, match=r"dimension 0 of args\[0\] is 65, and dynamic_shapes allows 2 to 64"):
        step(rows(65))


@pytest.mark.sweep(but=("inside of the loss-dtype0",))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["around", "inside of the loss"])
def test_autocast_around_a_step_and_in_its_loss(dtype: torch.dtype, where: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x).float().square().mean()

    if where == "inside of the loss":
        assert_same_training(network(p=0.0), "momentum", loss, [(X,)], RECOMPUTE, steps=3)
        return
    model = Mixed()
    other = copy.deepcopy(model)
    expected = train(model, sgd, loss, [(X,)] * 3)
    optimizer, found = sgd(other.parameters()), Training()
    step = graphopt.optimize_step(other, optimizer, [Recompute("c")], loss=lambda m, x: m(x).float().square().mean())
    torch.manual_seed(1)
    for number in range(3):
        with torch.autocast("cpu", dtype=dtype):
            found.add(f"{number}.loss", step(X))
    assert_same(expected, found.end(other, optimizer), "around", skip=".gradient")


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_is_close_to_eager() -> None:
    def make(parameters: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, fused=True)  # without state one program serves every step

    expected = eager(make, BATCHES[:3], nothing)
    model = network()
    optimizer = make(model.parameters())
    step = graphopt.optimize_step(
        model, optimizer, RECOMPUTE, loss=mean_square, backend="inductor", example_inputs=(X,)
    )
    torch.manual_seed(1)
    losses = [step(*batch) for batch in BATCHES[:3]]
    found = Training().end(model, optimizer)
    for number, loss in enumerate(losses):
        torch.testing.assert_close(loss, expected.tensors[f"{number}.loss"], rtol=1e-5, atol=1e-6)
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, expected.tensors[name], rtol=1e-3, atol=1e-5)
    assert torch.equal(found.tensors["generator"], expected.tensors["generator"])


@pytest.mark.sweep
def test_a_callable_gets_everything_but_the_update() -> None:
    compiler = Compiler()
    found, _ = stepping(adamw, BATCHES[:2], nothing, backend=compiler)
    assert_same(eager(adamw, BATCHES[:2], nothing), found, "callable")
    for module, inputs in compiler.given:
        ops = {str(node.target) for node in module.graph.nodes}
        assert {"aten.addmm.default", "aten.tanh_backward.default"} <= ops
        assert not [op for op in ops if "adamw" in op]
        assert len(inputs) == len(module.graph.find_nodes(op="placeholder"))
