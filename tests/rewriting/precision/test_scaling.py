"""The scale: its updates against torch's and Paddle's, step by step, and the settings under both vocabularies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from graphopt import GraphoptError, Pipeline, PipelineError
from graphopt.ir.ops.updates import scale as ops
from graphopt.passes import ScaleLoss
from graphopt.rewriting.precision.scaling import BAD, GOOD, SCALE, SKIPPED, LossScaling, counters
from tests.support.properties import examples

SMALLEST = 2.0**-126
LEGACY = {"init_loss_scaling": 2.0**15, "incr_every_n_steps": 1000, "decr_every_n_nan_or_inf": 2, "incr_ratio": 2.0,
          "decr_ratio": 0.8}  # fmt: skip
COMMON = {"init_loss_scaling": 2.0**16, "incr_every_n_steps": 2000, "decr_every_n_nan_or_inf": 1, "incr_ratio": 2.0,
          "decr_ratio": 0.5}  # fmt: skip
"""The defaults of Paddle's two loss scalers."""


def steps(script: str) -> list[bool]:
    """True for each bad step: ``"ggb"``, ``"20g b"``."""
    found = []
    for word in script.split():
        count = word.rstrip("gb")
        letters = word[len(count) :]
        found += [letter == "b" for letter in letters] * (int(count) if count else 1)
    return found


def random_steps(count: int, share: float, seed: int = 0) -> list[bool]:
    numbers = random.Random(seed)
    return [numbers.random() < share for _ in range(count)]


def state(scaling: LossScaling) -> dict[str, torch.Tensor]:
    return {target: held.create() for target, held in counters(scaling, torch.device("cpu")).items()}


def advance(scaling: LossScaling, tensors: dict[str, torch.Tensor], bad: bool) -> None:
    ops.update_scale_(*tensors.values(), torch.tensor(float(bad)), *scaling.update_arguments())


def trace(scaling: LossScaling, script: Iterable[bool]) -> list[tuple[float, int]]:
    """The scale and the count of good steps after each step."""
    tensors, found = state(scaling), []
    for bad in script:
        advance(scaling, tensors, bad)
        found.append((float(tensors[SCALE]), int(tensors[GOOD])))
    return found


class TorchScale:
    """``torch.amp.GradScaler`` fed with one gradient."""

    def __init__(self, **options: Any) -> None:
        self.parameter = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", **options)
        self.scaler.scale(torch.zeros(()))

    def advance(self, bad: bool) -> tuple[float, int]:
        self.parameter.grad = torch.tensor([math.inf if bad else 1.0])
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale(), self.scaler.state_dict()["_growth_tracker"]


def torch_trace(script: Iterable[bool], **options: Any) -> list[tuple[float, int]]:
    reference = TorchScale(**options)
    return [reference.advance(bad) for bad in script]


def paddle_trace(
    script: Iterable[bool], init_loss_scaling: float, incr_every_n_steps: int, decr_every_n_nan_or_inf: int,
    incr_ratio: float, decr_ratio: float,
) -> list[tuple[float, int]]:  # fmt: skip
    """Paddle's ``update_loss_scaling``, in float32 as its kernels compute."""
    number = lambda value: torch.tensor(value, dtype=torch.float32)  # noqa: E731
    scale, good, bad, found = number(init_loss_scaling), 0, 0, []
    for infinite in script:
        good, bad = (0, bad + 1) if infinite else (good + 1, 0)
        if bad == decr_every_n_nan_or_inf:
            scale, bad = torch.maximum(scale * number(decr_ratio), number(1.0)), 0
        if good == incr_every_n_steps:
            grown = scale * number(incr_ratio)
            scale, good = grown if grown.isfinite() else scale, 0
        found.append((scale.item(), good))
    return found


SCRIPTS = {
    "GradScaler's own test": (steps("ggb"), {"init_scale": 4.0, "growth_interval": 2, "backoff_factor": 0.25}),
    "an autocast run": (steps("gggb"), {"init_scale": 128.0, "growth_interval": 1}),
    "the defaults": (steps("2001g b 10g bb 2100g"), {}),
    "growth at the limit": (steps("4g"), {"init_scale": 1e38, "growth_factor": 4.0, "growth_interval": 1}),
    "growth and backoff at the limit": (steps("9g b 9g bb 9g"), {"init_scale": 1e38, "growth_interval": 2}),
    "odd factors": (
        steps("5g b 5g bbb 50g b"),
        {"init_scale": 1000.1, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3},
    ),
    "bad steps only, above the floor": (steps("140b"), {}),
}


@pytest.mark.sweep(cases=("the defaults",))
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_scale_moves_as_in_torch(name: str) -> None:
    script, options = SCRIPTS[name]
    assert trace(LossScaling(**options), script) == torch_trace(script, **options)


@pytest.mark.sweep
@pytest.mark.parametrize(("share", "interval"), [(0.01, 20), (0.3, 3)])
def test_scale_moves_as_in_torch_over_random_steps(share: float, interval: int) -> None:
    script = random_steps(5_000, share)
    found = trace(LossScaling(growth_interval=interval), script)
    expected = torch_trace(script, growth_interval=interval)
    alive = next((i for i, (scale, _) in enumerate(expected) if scale < SMALLEST), len(script))
    assert found[:alive] == expected[:alive]
    assert min(scale for scale, _ in found) >= SMALLEST


@pytest.mark.sweep(but=("common",))
@pytest.mark.parametrize("options", [LEGACY, COMMON], ids=["legacy", "common"])
def test_scale_moves_as_in_paddle(options: dict[str, Any]) -> None:
    script = steps("gbbgbgbb 1000g b 1001g bb 2000g b 40b g bb") + random_steps(10_000, 0.002) + random_steps(500, 0.5)
    assert trace(ScaleLoss(**options).scaling, script) == paddle_trace(script, **options)


@examples(12)
@given(
    script=st.lists(st.booleans(), max_size=40),
    growth=st.floats(1.01, 1e6),
    backoff=st.floats(0.01, 0.99),
    interval=st.integers(1, 5),
    init=st.floats(2.0**-60, 2.0**100, width=32),
)
def test_any_settings_move_as_in_torch(
    script: list[bool], growth: float, backoff: float, interval: int, init: float
) -> None:
    options = {
        "init_scale": init, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval,
    }  # fmt: skip
    expected = torch_trace(script, **options)
    alive = next((i for i, (scale, _) in enumerate(expected) if scale < SMALLEST), len(script))
    assert trace(LossScaling(**options), script)[:alive] == expected[:alive]


def test_scale_never_reaches_zero() -> None:
    assert torch_trace(steps("170b"))[-1][0] == 0.0
    assert trace(LossScaling(), steps("170b"))[-1][0] == SMALLEST
    assert trace(LossScaling(floor=8.0), steps("170b"))[-1][0] == 8.0
    assert math.isfinite(1.0 / trace(LossScaling(), steps("170b"))[-1][0])


def test_scale_grows_again_after_the_interval_is_lowered() -> None:
    before, after = LossScaling(growth_interval=8), LossScaling(growth_interval=3)
    tensors, reference = state(before), TorchScale(growth_interval=8)
    for _ in range(5):
        advance(before, tensors, False)
        reference.advance(False)
    reference.scaler.set_growth_interval(3)
    for _ in range(20):
        reference.advance(False)
    assert reference.scaler.get_scale() == 65536.0  # torch's scale never grows again
    advance(after, tensors, False)
    assert (float(tensors[SCALE]), int(tensors[GOOD])) == (131072.0, 0)


def test_hysteresis_ceiling_and_a_static_scale() -> None:
    patient = LossScaling(hysteresis=3)
    assert [scale for scale, _ in trace(patient, steps("bbgbbb b"))] == [65536.0] * 5 + [32768.0] * 2
    low = LossScaling(growth_interval=1, ceiling=100_000.0)
    assert [scale for scale, _ in trace(low, steps("ggb"))] == [100_000.0, 100_000.0, 50_000.0]
    static, tensors = LossScaling(dynamic=False, init_scale=7.3), state(LossScaling(dynamic=False, init_scale=7.3))
    start = tensors[SCALE].clone()
    for bad in steps("gbbgbb"):
        advance(static, tensors, bad)
        assert torch.equal(tensors[SCALE], start)
    assert int(tensors[SKIPPED]) == 2


def test_a_static_scale_takes_no_factor_and_no_limit() -> None:
    static = LossScaling(dynamic=False, init_scale=7.3)
    assert static.update_arguments() == (1.0, 1.0, 1, 1, 0.0, math.inf)


def test_state_continues_in_the_middle() -> None:
    scaling, script = LossScaling(growth_interval=3, hysteresis=2), random_steps(60, 0.4)
    whole, tensors = trace(scaling, script), state(scaling)
    for number, bad in enumerate(script):
        tensors = {target: tensor.clone() for target, tensor in tensors.items()}
        advance(scaling, tensors, bad)
        assert (float(tensors[SCALE]), int(tensors[GOOD])) == whole[number]
    assert [tensor.dtype for tensor in tensors.values()] == [torch.float32, torch.int32, torch.int32, torch.int32]


class _Watch(TorchDispatchMode):
    """Notes every op; reading a value on the host is ``_local_scalar_dense``."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_ops_ask_the_host_for_nothing() -> None:
    gradients, flags = [torch.ones(3), torch.ones(2).half()], torch.zeros(2)
    found, scaling = torch.tensor(1.0), LossScaling()
    calls: list[Callable[[], Any]] = [
        lambda: ops._check_and_unscale(gradients, flags, torch.tensor(0.5)),
        lambda: ops._put_back(gradients, [g + 1 for g in gradients], found),
        lambda: ops._update_scale(*state(scaling).values(), found, *scaling.update_arguments()),
    ]
    for call in calls:
        with _Watch() as watch:
            call()
        assert watch.ops
        assert not any("scalar_dense" in op or "item" in op for op in watch.ops)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_each_bad_gradient_is_noted(dtype: torch.dtype, value: float) -> None:
    for place in range(3):
        gradients = [torch.full((4, 3), 8.0, dtype=dtype) for _ in range(3)]
        gradients[place][2, 1] = value
        flags = torch.zeros(3)
        ops.check_and_unscale_(gradients, flags, torch.tensor(0.25))
        assert flags.tolist() == [float(place == other) for other in range(3)]
        assert all(gradient[0, 0] == 2.0 for gradient in gradients)
        ops.check_and_unscale_([torch.ones(2, dtype=dtype)] * 3, flags, torch.tensor(1.0))
        assert flags.tolist() == [float(place == other) for other in range(3)]  # stays until it is cleared


def test_put_back() -> None:
    for found in (0.0, 1.0):
        tensors, kept = [torch.ones(3), torch.full((2, 2), math.nan)], [torch.zeros(3), torch.zeros(2, 2)]
        ops.put_back_(tensors, kept, torch.tensor(found))
        assert torch.equal(tensors[0], torch.full((3,), 1.0 - found))
        assert bool(tensors[1].isnan().all()) == (found == 0.0)


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_have_two_names() -> None:
    torch_names = ScaleLoss(init_scale=8.0, growth_interval=5, growth_factor=3.0, backoff_factor=0.25, hysteresis=2)
    paddle_names = ScaleLoss(
        init_loss_scaling=8.0, incr_every_n_steps=5, incr_ratio=3.0, decr_ratio=0.25, decr_every_n_nan_or_inf=2,
        floor=SMALLEST,
    )  # fmt: skip
    assert torch_names.scaling == paddle_names.scaling
    assert ScaleLoss().scaling == LossScaling()
    assert ScaleLoss(incr_every_n_steps=7).scaling == LossScaling(growth_interval=7, floor=1.0)
    assert ScaleLoss(use_dynamic_loss_scaling=False).scaling == LossScaling(dynamic=False, floor=1.0)
    assert ScaleLoss(max_skipped=None).scaling.max_skipped is None
    assert ScaleLoss(decr_ratio=0.8).scaling.backoff_factor == torch.tensor(0.8).item()


def test_settings_as_text() -> None:
    text = "scale-loss{init-scale=1024.0 growth-interval=10 max-skipped=none}"
    (made,) = Pipeline(text).passes
    assert made == ScaleLoss(init_scale=1024.0, growth_interval=10, max_skipped=None)
    assert str(made) == text


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "two names": ({"init_scale": 2.0, "init_loss_scaling": 2.0}, "init_scale and init_loss_scaling are two names"),
    "no growth": ({"growth_factor": 1.0}, r"growth_factor must be above 1 and finite, not 1\.0"),
    "no backoff": ({"decr_ratio": 1.0}, r"backoff_factor must lie between 0 and 1, not be 1\.0"),
    "interval": ({"growth_interval": 0}, "growth_interval must be at least 1, not 0"),
    "hysteresis": ({"decr_every_n_nan_or_inf": 0}, "hysteresis must be at least 1, not 0"),
    "floor": ({"floor": 0.0}, r"floor must be at least 1\.175e-38, not 0\.0: below it 1 / scale is infinite"),
    "start below": ({"init_scale": 2.0, "floor": 4.0}, r"init_scale must lie between floor 4 .*, not be 2\.0"),
    "start above": ({"init_scale": 8.0, "ceiling": 4.0}, r"ceiling 4, not be 8\.0"),
    "start infinite": ({"init_scale": math.inf}, "not be inf"),
    "limit": ({"max_skipped": 0}, "max_skipped must be at least 1, or None for no limit, not 0"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_settings_say_why(name: str) -> None:
    options, message = WRONG[name]
    with pytest.raises(GraphoptError, match=message):
        ScaleLoss(**options)


def test_all_wrong_settings_are_named_at_once() -> None:
    with pytest.raises(GraphoptError, match=r"growth_factor.*hysteresis"):
        ScaleLoss(growth_factor=0.5, hysteresis=0)
    with pytest.raises(PipelineError, match="growth-factro"):
        Pipeline("scale-loss{growth-factro=2}")


def test_bad_steps_in_a_row_are_counted() -> None:
    scaling = LossScaling(hysteresis=2)
    tensors, found = state(scaling), []
    for bad in steps("bbbgbg"):
        advance(scaling, tensors, bad)
        found.append((int(tensors[SKIPPED]), int(tensors[BAD])))
    assert found == [(1, 1), (2, 0), (3, 1), (0, 0), (1, 1), (0, 0)]
