"""Asserts and errors that depend on values: kept as checks, which raise as forward does; other branches are refused."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as D
from torch import nn

import graphopt
from graphopt import CaptureError, Program
from graphopt.ir.ops.check import check_value
from graphopt.passes import FitMemory, Recompute
from tests.support.checked_models import CHECKS, CHOICES, LIMIT, Calls, Forward, an_error
from tests.support.properties import examples
from tests.support.training import identical

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def checks(program: Program) -> int:
    return sum(node.target is check_value for node in program.nodes)


@pytest.mark.sweep(but=("plain-an_error", "plain-an_error_otherwise", "fit-an_assert", "fit-an_error_otherwise"))
@pytest.mark.parametrize("forward", CHECKS)
@pytest.mark.parametrize("passes", [[], [Recompute("auto")], [FitMemory("100%")]], ids=["plain", "recompute", "fit"])
def test_checks_raise_as_forward_does(forward: Forward, passes: list[Any]) -> None:
    model = Calls(forward)
    optimized = graphopt.optimize(copy.deepcopy(model), passes)
    for current in (model, optimized):
        current(X).sum().backward()
    assert identical(model.linear.weight.grad, optimized.linear.weight.grad)
    assert checks(optimized.program) > 0  # type: ignore[arg-type]
    raised = []
    for current in (model, optimized):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            current(X + 2 * LIMIT)
        raised.append(caught.type)
    assert raised[0] is raised[1]
    assert identical(optimized(X), model(X))  # and training goes on


def test_the_error_is_the_users_own() -> None:
    optimized = graphopt.optimize(Calls(an_error), example_inputs=(X,))
    with pytest.raises(ValueError, match=r"^too large$") as caught:
        optimized(X * 1e6)
    assert caught.traceback[-1].path.name == "checked_models.py"


def test_a_whole_step_that_fails_changes_nothing() -> None:
    model = Calls(an_error)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).sum())
    step(X)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="too large"):
        step(X * 1e6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def normal(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = layer(x)
    return D.kl_divergence(D.Normal(h, h.exp()), D.Normal(0.0, 1.0)) + D.Normal(h, h.exp()).rsample()


def categorical(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = D.Categorical(logits=layer(x))
    return found.log_prob(found.sample()) + found.entropy()


def beta(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return D.Beta(layer(x).exp(), torch.ones(4)).log_prob(torch.full((4,), 0.3))


def gaussian(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(layer(x), x, x.square())


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distributions check their arguments, as they do until something in the process has compiled with Dynamo."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


@pytest.mark.sweep(but=("gaussian",))
@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("forward", [normal, categorical, beta, gaussian])
def test_distributions_check_their_arguments(forward: Forward) -> None:
    model = Calls(forward)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for current in (model, optimized):
        torch.manual_seed(1)
        current(X).sum().backward()
    assert identical(model.linear.weight.grad, optimized.linear.weight.grad)
    for current in (model, optimized):
        with pytest.raises(ValueError):  # noqa: PT011
            current(X * float("nan")) if forward is not gaussian else F.gaussian_nll_loss(X, X, -X.square())


def test_programs_with_checks_are_written_and_read() -> None:
    program = graphopt.capture(Calls(an_error), (X,))
    assert Program.from_json(program.to_json()).to_text() == program.to_text()
    assert "too large" in program.to_text()


# --- what stays refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", CHOICES)
def test_what_may_go_on_is_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=r"(?s)control flow depends on a tensor's values|data-dependent"):
        graphopt.capture(Calls(forward), (-X.abs(),))


@pytest.mark.usefixtures("checked")
def test_distributions_that_choose_between_values_are_refused_with_the_way_out() -> None:
    def multivariate(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return D.MultivariateNormal(layer(x), torch.eye(4)).log_prob(x)

    with pytest.raises(CaptureError, match="validate_args=False"):
        graphopt.capture(Calls(multivariate), (X,))


def test_results_whose_size_depends_on_values_are_refused_with_their_line() -> None:
    def positive(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return y[y > 0].sum()

    with pytest.raises(CaptureError, match=r"one program: aten\.nonzero") as caught:
        graphopt.capture(Calls(positive), (X,))
    where, advice = str(caught.value).splitlines()[1:]
    assert re.search(r"checked_models\.py:\d+ in forward", where)
    assert "an index by a mask" in advice


# --- any condition ---------------------------------------------------------------------------------------------------

_WAYS = ["assert {}", "if {}:\n        raise ValueError('x')"]
_numbers = itertools.count()
_atoms = st.sampled_from(
    ["(x > 1).any()", "x.max() > 2", "x.sum().item() < 0", "True", "flag", "not flag", "bool((x < -1).all())"]
)
_conditions = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        inner.map(lambda a: f"(not {a})"),
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
    ),
    max_leaves=5,
)


@pytest.mark.filterwarnings("ignore")  # of Dynamo, where the model is captured in parts
@examples(6)
@given(
    condition=_conditions,
    how=st.sampled_from(["assert {}", "if {}:\n        raise ValueError('x')"]),
    flag=st.booleans(),
)
def test_any_condition_raises_as_in_eager_mode_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, condition: str, how: str, flag: bool
) -> None:
    file = tmp_path_factory.mktemp("module") / f"made_{next(_numbers)}.py"
    file.write_text(f"flag = {flag}\n\ndef forward(layer, x):\n    {how.format(condition)}\n    return layer(x)\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[file.stem] = module  # where Dynamo looks for it
    model = Calls(module.forward)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for scale in (0.1, 1.0, 3.0, -3.0):
        found: list[Any] = []
        for current in (model, optimized):
            try:
                found.append(current(X * scale))
            except CaptureError as error:
                assert "ValueError" in str(error) or "what to do" in str(error)  # noqa: PT017
                return
            except Exception as error:
                found.append(type(error))
        if isinstance(found[0], torch.Tensor):
            assert identical(*found)
        else:
            assert found[0] is found[1]
