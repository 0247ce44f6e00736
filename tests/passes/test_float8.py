"""Float8: eager references' bits for each recipe, what is left as it is and why, and what goes with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphopt
from graphopt import GraphoptError
from graphopt.capture import CaptureSession
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.storage.scaled_float8 import float8_mm, float8_scale, mx_mm, to_float8, to_mx
from graphopt.ir.ops.values import storage_bytes
from graphopt.passes import CompressActivations, FitMemory, Float8, FuseUpdate, MixedPrecision, Recompute
from graphopt.rewriting.pass_ import Pass
from graphopt.runtime.comparison.trial import Trial
from tests.support.float8_reference import float8_linear, rounded
from tests.support.properties import examples
from tests.support.ranks import run_ranks

RECIPES = ("tensorwise", "rowwise", "mx")


class Block(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def build(dtype: torch.dtype = torch.float32, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(width), Block(width, bias=False), nn.Linear(width, 32)).to(dtype)


def batch(number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(number)).to(dtype)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """What a model gives for a batch, and the gradients of its parameters."""
    model.zero_grad()
    y = model(x)
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def in_8_bits(model: nn.Module, x: torch.Tensor, recipe: str) -> list[torch.Tensor]:
    """The same by the reference."""
    with mock.patch.object(nn.Linear, "forward", lambda layer, x: float8_linear(layer, x, recipe)):
        return gradients(model, x)


# --- the arithmetic --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_the_references(recipe: Any, dtype: torch.dtype) -> None:
    optimized = graphopt.optimize(build(dtype), [Float8(recipe)])
    for number in range(2):
        x = batch(number, dtype)
        assert same(gradients(optimized, x), in_8_bits(build(dtype), x, recipe))
    assert not same(gradients(optimized, x), gradients(build(dtype), x))


@pytest.mark.sweep(but=("mx",))
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_size_of_a_batch_rounds_alike(recipe: Any) -> None:
    optimized = graphopt.optimize(build(), [Float8(recipe)])
    for rows in (4, 8, 12):
        x = torch.randn(rows, 8, 32)
        assert same(gradients(optimized, x), in_8_bits(build(), x, recipe))


@pytest.mark.sweep(but=("rowwise",))
@pytest.mark.parametrize("recipe", RECIPES)
def test_behind_torch_compile(recipe: Any) -> None:
    compiled = torch.compile(build(), backend="graphopt", options={"passes": [Float8(recipe)]})
    assert same(gradients(compiled, batch()), in_8_bits(build(), batch(), recipe))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_gradients_are_torchaos(recipe: Any, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        theirs = convert_to_float8_training(build(dtype), config=config)
        expected = gradients(theirs, batch(dtype=dtype))
    assert same(gradients(graphopt.optimize(build(dtype), [Float8(recipe)]), batch(dtype=dtype)), expected)


magnitudes = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(magnitudes, min_size=64, max_size=64), st.integers(0, 1), st.sampled_from(RECIPES))
@examples(50)
def test_casts_are_the_references_for_any_numbers(numbers: list[float], summed: int, recipe: str) -> None:
    x = torch.tensor(numbers).view(2, 32) if summed else torch.tensor(numbers).view(32, 2)
    if recipe == "mx":
        data, scale = to_mx(x, summed)
        eye = torch.eye(32)
        other, one = to_mx(eye, 0 if summed else 1)
        found = (
            mx_mm(data, other, scale, one, torch.float32) if summed else mx_mm(other, data, one, scale, torch.float32)
        )
    else:
        scale = float8_scale(x, [summed] if recipe == "rowwise" else [], torch.float8_e4m3fn, recipe == "rowwise")
        found = to_float8(x, scale, torch.float8_e4m3fn).float() / scale
    expected = rounded(x, recipe, summed, torch.float8_e4m3fn)
    assert torch.equal(found, expected)
    if recipe != "mx":
        largest = x.abs().max() if recipe == "tensorwise" else x.abs().amax(summed, keepdim=True)
        assert bool(((found - x).abs() <= 2.0**-4 * x.abs() + 2.0**-9 * largest).all())


def test_infinities_and_what_is_no_number_stay_seen() -> None:
    """Loss scaling looks for them behind the products."""
    for wrong in (torch.inf, torch.nan):
        x = torch.ones(16, 16)
        x[3, 4] = wrong
        scale = float8_scale(x, [], torch.float8_e5m2, False)
        cast = to_float8(x, scale, torch.float8_e5m2)
        one = float8_scale(torch.eye(16), [], torch.float8_e4m3fn, False)
        eye = to_float8(torch.eye(16), one, torch.float8_e4m3fn)
        assert not float8_mm(cast, eye, scale, one, torch.float32, False).isfinite().all()


# --- layers ----------------------------------------------------------------------------------------------------------


def record(passes: list[Pass], model: nn.Module | None = None) -> Any:
    optimized = graphopt.optimize(model or build(), passes)
    gradients(optimized, batch())
    return optimized.records["float8"].changed


def test_layers_are_named_and_skipped() -> None:
    assert record([Float8()]).tensors == ("0.up", "0.down", "1.up", "1.down", "2")
    assert record([Float8(layers="*.up")]).tensors == ("0.up", "1.up")
    assert record([Float8(skip=("2", "1.**"))]).tensors == ("0.up", "0.down")
    with pytest.raises(GraphoptError, match=r"'0\.upp' names no linear layer; did you mean '0\.up'"):
        record([Float8(layers="0.upp")])


def test_what_cannot_be_8_bits_says_why() -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 48))
    changed = record([Float8()], model)
    assert changed.tensors == ("4",)
    assert "left as they are: 0, 2: 24 features are no multiple of 16, which 8-bit units take" in changed.lines
    changed = record([Float8("mx")], nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)))
    assert "left as they are: 1: output: 48 numbers are added up, which are no blocks of 32" in changed.lines
    changed = record([Float8(min_features=64)])
    assert "no layer can be computed in 8 bits" in changed.reason
    assert "32 features are fewer than min_features=64" in changed.reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "rowise"}, "recipe='rowise' is unknown; did you mean 'rowwise'"),
        ({"min_features": -1}, "at least 0"),
    ],
)
def test_wrong_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphoptError, match=f"float8: .*{message}"):
        Float8(**options)


def test_evaluation_is_the_models_own() -> None:
    optimized = graphopt.optimize(build(), [Float8()])
    gradients(optimized, batch())
    with torch.no_grad():
        assert torch.equal(optimized.eval()(batch()), build().eval()(batch()))


# --- memory, and other passes ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Blocks whose activations are recomputed because the model asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.sweep(but=("tensorwise-90%",))
@pytest.mark.parametrize("budget", ["", "100%", "90%"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recomputed_products_are_the_same(recipe: Any, budget: str) -> None:
    optimized = graphopt.optimize(Checkpointed(), [Float8(recipe), *([FitMemory(budget)] if budget else [])])
    assert same(gradients(optimized, wide_batch()), in_8_bits(Checkpointed(), wide_batch(), recipe))


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(64) for _ in range(3)))


def wide_batch() -> torch.Tensor:
    return torch.randn(64, 16, 64, generator=torch.Generator().manual_seed(3))


def peak(model: Any, x: torch.Tensor) -> tuple[int, int]:
    gradients(model, x)
    model.zero_grad()

    def call() -> None:
        y = model(x)
        y.square().mean().backward()

    call()
    model.zero_grad()
    measured = graphopt.measure_peak(call).allocated_peak_bytes
    return model.program.memory().allocated_peak_bytes, measured


def test_inputs_wait_for_backward_in_8_bits() -> None:
    rows, found = 64 * 16, []
    for passes in ([], [Float8()]):
        optimized = graphopt.optimize(wide(), passes)
        gradients(optimized, wide_batch())
        found.append(waiting(optimized.program))
    # of each block the input of up, 64 numbers a row, and that of down, 128; what the model is given waits anyway
    scales = 5 * 4
    assert found[0] - found[1] == rows * (2 * 64 + 3 * 128) * 3 - scales


def waiting(program: graphopt.Program) -> int:
    """Bytes that forward makes and backward reads."""
    forward, read = set(program.phase_nodes(graphopt.Phase.FORWARD)), set[Any]()
    for node in program.phase_nodes(graphopt.Phase.BACKWARD):
        read |= {schema.storage_root(source) for source in node.all_input_nodes} & forward
    return sum(storage_bytes(value_of(node)) for node in read)


@pytest.mark.parametrize("passes", [(), (FitMemory("80%"),), (Recompute("*"),), (FuseUpdate(),)], ids=str)
def test_bits_and_peaks_hold_beside_other_passes(passes: tuple[Pass, ...]) -> None:
    optimized = graphopt.optimize(wide(), [Float8(), *passes])
    assert same(gradients(optimized, wide_batch()), in_8_bits(wide(), wide_batch(), "tensorwise"))
    predicted, measured = peak(optimized, wide_batch())
    assert abs(predicted - measured) <= 0.01 * predicted


@pytest.mark.sweep(but=("rowwise",))
@pytest.mark.parametrize("recipe", RECIPES)
def test_mixed_precision_casts_weights_to_8_bits_at_once(recipe: Any) -> None:
    """Not to 16 bits first: rounded once, as torchao does under autocast."""
    optimized = graphopt.optimize(build(), [MixedPrecision(), Float8(recipe)])
    found = gradients(optimized, batch())

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return float8_linear_with(layer, x.bfloat16(), recipe)

    with mock.patch.object(nn.Linear, "forward", forward), torch.autocast("cpu", torch.bfloat16):
        expected = gradients(build(), batch())
    assert same(found, expected)


def float8_linear_with(layer: nn.Linear, x: torch.Tensor, recipe: str) -> torch.Tensor:
    """The reference without its bias in more bits than the product."""
    without = mock.patch.object(layer, "bias", None)
    if layer.bias is None:
        return float8_linear(layer, x, recipe)
    bias = layer.bias
    with without:
        return float8_linear(layer, x, recipe) + bias.bfloat16()


def test_what_is_stored_in_8_bits_is_not_compressed_again() -> None:
    optimized = graphopt.optimize(wide(), [Float8(), CompressActivations(min_bytes=1000)])
    gradients(optimized, wide_batch())
    assert "float8" not in " ".join(optimized.records["compress-activations"].changed.tensors)


def test_a_difference_is_found_by_layer() -> None:
    x = batch()
    x[..., 0] = 0
    for outlier in (0.0, 1e6):
        model = build()
        with torch.no_grad():
            model[0].up.weight[0, 0] = outlier  # which meets zeros, and beside which the other weights vanish
        trial = Trial(CaptureSession(model, (x,)), "joint")
        compared = trial.compare(trial.rewrite(graphopt.Pipeline([Float8()])).program, kinds=("value",))
        beyond = {found.name for found in compared.exceeding(0.5)}
        assert ("0.up" in beyond) if outlier else not beyond


def test_a_whole_step_trains_as_the_reference() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def trained(step: Callable[[nn.Module, torch.optim.Optimizer], Callable[[torch.Tensor], object]]) -> nn.Module:
        model = build()
        run = step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(3):
            run(batch(number))
        return model

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], object]:
        def run(x: torch.Tensor) -> None:
            with mock.patch.object(nn.Linear, "forward", float8_linear):
                loss(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run

    ours = trained(lambda model, optimizer: graphopt.optimize_step(model, optimizer, [Float8()], loss=loss))
    assert same([*ours.state_dict().values()], [*trained(plain).state_dict().values()])


@pytest.mark.gpu
@pytest.mark.parametrize("by_rows", [False, True])
def test_units_for_8_bits_give_what_is_computed_in_float32(by_rows: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(64, 128), torch.randn(128, 48)
    dims = ([1], [0]) if by_rows else ([], [])
    scales = [float8_scale(x, dim, torch.float8_e4m3fn, by_rows) for x, dim in zip((a, b), dims, strict=True)]
    cast = [to_float8(x, scale, torch.float8_e4m3fn) for x, scale in zip((a, b), scales, strict=True)]
    expected = float8_mm(*cast, *scales, torch.bfloat16, False).float()
    found = float8_mm(*(x.cuda() for x in (*cast, *scales)), torch.bfloat16, False).cpu().float()
    assert (found - expected).abs().max() <= 2.0**-7 * expected.abs().max()


SHARDED = """
from unittest import mock
from torch import nn
from torch.distributed.fsdp import fully_shard
import graphopt
from graphopt.passes import DataParallel, Float8, ShardParameters
from tests.passes.test_float8 import batch, build, same
from tests.support.float8_reference import float8_linear

def sharded(**options):
    model = build()
    for block in list(model)[:2]:
        fully_shard(block, **options)
    return fully_shard(model, **options)

def whole(model):
    for parameter in model.parameters():
        parameter.grad = None
    y = model(batch(rank))
    y.square().mean().backward()
    return [y.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())]

said = []
for recipe in ("tensorwise", "rowwise"):
    for options in ({}, {"reshard_after_forward": False}):
        with mock.patch.object(nn.Linear, "forward", lambda layer, x: float8_linear(layer, x, recipe)):
            expected = whole(sharded(**options))
        said.append(same(whole(graphopt.optimize(sharded(**options), [Float8(recipe)])), expected))

def trained(*passes):
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    step = graphopt.optimize_step(
        model, sgd, [DataParallel(), Float8(), *passes], loss=lambda model, x: model(x).square().mean()
    )
    for number in range(3):
        step(batch(2 * number + rank))
    with step.whole_parameters():
        return step, [parameter.detach().clone() for parameter in model.parameters()]

(_, expected), (step, found) = trained(), trained(ShardParameters(min_bytes=300))
said.append(same(found, expected))
sent = {node.meta["val"].dtype for node in step.program.nodes if "all_gather" in str(node.target)}
given = batch(rank)
peaks = [graphopt.measure_peak(lambda: step(given)).allocated_peak_bytes for _ in range(4)]
said.append(torch.float8_e4m3fn in sent and min(peaks) == step.program.memory().allocated_peak_bytes)
say(said)
"""


@pytest.mark.sweep
def test_weights_may_be_gathered_from_shards(tmp_path: Path) -> None:
    """After ``fully_shard``, in both ways, and by ``ShardParameters``, which gathers them in 8 bits."""
    assert run_ranks(SHARDED, 2, tmp_path / "store") == [[[True] * 6]] * 2
