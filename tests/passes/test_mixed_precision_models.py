"""Mixed precision on whole models: training equals eager PyTorch under autocast to the last bit."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch

import graphopt
from examples.models import GPT, GPTConfig, next_token_loss
from graphopt import Pipeline
from graphopt.ir.node import value_of
from graphopt.passes import DataParallel, FuseUpdate, MixedPrecision, Offload, Recompute
from tests.support.casting import (
    LOW,
    assert_same_as_under_autocast,
    casts,
    eager_loss_and_gradients,
    loss_and_gradients,
    model_of,
    rewrite_all,
    under,
)
from tests.support.covering import covering, some_of
from tests.support.training import OPTIMIZERS, Blocks, assert_same, identical, next_token, train, train_whole_step

MODELS = ("GPT", "BERT", "ResNet", "ViT")
SETTINGS = [*((name, "bfloat16") for name in MODELS), ("GPT", "float16")]


@pytest.mark.sweep(but=("BERT-bfloat16",))
@covering(name=[*MODELS, "T5"], dtype=["float16", "bfloat16"])
def test_the_loss_and_every_gradient_equal_eager_under_autocast(name: str, dtype: str) -> None:
    model, batches, loss = model_of(name)
    assert_same_as_under_autocast(model, batches[0], dtype, [MixedPrecision(dtype, scale_loss=False)], loss)


@pytest.mark.sweep
@pytest.mark.parametrize("setting", some_of(SETTINGS, ("GPT", "float16"), ("ResNet", "bfloat16"), ("ViT", "bfloat16")))
def test_training_in_whole_steps_equals_the_eager_loop_under_autocast(setting: tuple[str, str]) -> None:
    """Losses, parameters, buffers (BatchNorm's statistics), optimizer state and generator, over three steps."""
    name, dtype = setting
    model, batches, loss = model_of(name)
    run = [batches[number % 2] for number in range(3)]
    eager = train(copy.deepcopy(model), OPTIMIZERS["adamw"], under(dtype, loss), run)
    stepped = train_whole_step(
        copy.deepcopy(model), OPTIMIZERS["adamw"], loss, run, [MixedPrecision(dtype, scale_loss=False)]
    )
    assert_same(eager, stepped, "whole step", skip=".gradient")
    assert all(value.dtype != LOW[dtype] for value in stepped.tensors.values())


@pytest.mark.sweep
def test_one_activation_for_queries_keys_and_values_is_cast_once_and_gradients_sum_as_before() -> None:
    model, (batch, _), loss = model_of("BERT")
    rewritten = rewrite_all(model, batch, [MixedPrecision()], loss)
    before = next(program for label, program in rewritten.snapshots if label == "captured joint")
    sources = [node.args[0] for node in casts(before)]
    repeated = [source for source, times in Counter(sources).items() if times > 1]
    assert [Counter(sources)[source] for source in repeated] == [3, 3]
    assert [len(value_of(source).shape) for source in repeated] == [3, 3]
    after = [(node.args[0], node.kwargs["dtype"]) for node in casts(rewritten.program)]
    assert len(after) == len(set(after)) == len(sources) - 4
    assert rewritten.records[1].changed.counts["merged"] == 4
    assert rewritten.records[1].peak_after < rewritten.records[1].peak_before


@pytest.mark.sweep
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_recomputed_casts_give_the_same_bits_dropout_included(level: str) -> None:
    torch.manual_seed(0)
    model, batch, passes = Blocks(layers=2), (torch.randint(11, (2, 6)),), [MixedPrecision(level=level)]
    value, gradients = loss_and_gradients(model, batch, passes, next_token)
    again, others = loss_and_gradients(model, batch, [*passes, Recompute("blocks.*")], next_token)
    assert identical(value, again)
    assert gradients.keys() == others.keys()
    assert all(identical(gradients[name], others[name]) for name in gradients)


@pytest.mark.sweep
def test_training_with_recomputation_transfers_and_early_updates_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    model, run = Blocks(layers=1), [(torch.randint(11, (2, 6)),) for _ in range(2)]
    passes, more = [MixedPrecision()], [Recompute("blocks.*"), Offload(min_bytes=1), FuseUpdate()]
    plain = train_whole_step(copy.deepcopy(model), OPTIMIZERS["sgd"], next_token, run, passes)
    again = train_whole_step(copy.deepcopy(model), OPTIMIZERS["sgd"], next_token, run, [*passes, *more])
    assert_same(plain, again, ", ".join(map(str, more)))


@pytest.mark.sweep
def test_recomputation_makes_casts_of_activations_again() -> None:
    model, (batch, _), loss = model_of("GPT")
    program = rewrite_all(model, batch, [MixedPrecision(), Recompute("blocks.*")], loss).program
    assert casts(program, graphopt.Phase.RECOMPUTE)


@pytest.mark.sweep
def test_the_order_in_the_list_means_nothing() -> None:
    """Casts are merged before anything is recomputed, whichever pass is given first."""
    mixed, recompute = MixedPrecision("float16"), Recompute("blocks.*")
    batch = (torch.randint(11, (2, 6)),)
    one, other = (
        rewrite_all(Blocks(layers=2), batch, given, next_token) for given in ([mixed, recompute], [recompute, mixed])
    )
    assert one.program.to_text() == other.program.to_text()
    assert [p.name for p in Pipeline([DataParallel(), recompute, mixed]).of("joint")] == [
        "data-parallel", "mixed-precision", "recompute",
    ]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize("name", some_of(["GPT", "ResNet"], "GPT"))
@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", 0.01), ("float16", 0.002)])
def test_o2_is_about_as_near_to_float32_as_autocast(name: str, dtype: str, near: float) -> None:
    model, (batch, _), loss = model_of(name)
    exact, theirs = eager_loss_and_gradients(model, batch, loss)
    _, autocast = eager_loss_and_gradients(model, batch, under(dtype, loss))
    value, mine = loss_and_gradients(model, batch, [MixedPrecision(dtype, level="O2", scale_loss=False)], loss)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=near)
    assert mine.keys() == theirs.keys()
    assert distance(mine, theirs) < 2 * distance(autocast, theirs)


def distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of two sets of gradients."""
    return float(sum((some[name] - others[name]).square().sum() for name in others) ** 0.5)


@pytest.mark.sweep
def test_activations_take_less_than_two_thirds_of_the_bytes() -> None:
    """At this size the loss, in float32, weighs more than in a large model."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=32, context=64, d=64, layers=2, heads=2)).train()
    batch = tuple(torch.randint(32, (8, 64)) for _ in range(2))
    plain = graphopt.capture(model, batch, loss=next_token_loss).memory(measure=False)
    for level in ("O1", "O2"):
        program = rewrite_all(model, batch, [MixedPrecision(level=level)], next_token_loss).program
        rewritten = program.memory(measure=False)
        assert rewritten.peak_bytes < plain.peak_bytes
        assert rewritten.categories["activations"] < 0.66 * plain.categories["activations"]


@pytest.mark.sweep
def test_a_drop_in_model_trains_as_under_autocast_and_returns_float32() -> None:
    model, (batch, _), _ = model_of("GPT")
    eager, mine = copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model), [MixedPrecision()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = eager(batch[0])
    result = mine(batch[0])
    assert expected.dtype == torch.bfloat16
    assert identical(result, expected.float())
    result.square().mean().backward()
    expected.float().square().mean().backward()
    pairs = zip(mine.parameters(), eager.parameters(), strict=True)
    assert all(identical(one.grad, other.grad) for one, other in pairs)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dropout_gives_the_bits_of_eager_under_autocast_and_leaves_the_generator_there(dtype: str) -> None:
    torch.manual_seed(0)
    model, tokens = Blocks(layers=2), torch.randint(11, (4, 8))
    results = []
    for loss, passes in ((next_token, [MixedPrecision(dtype, scale_loss=False)]), (under(dtype, next_token), None)):
        trained = copy.deepcopy(model) if passes is None else graphopt.optimize(copy.deepcopy(model), passes)
        torch.manual_seed(7)
        value = loss(trained, tokens)
        value.backward()
        results.append([value.detach().float(), *(p.grad for p in trained.parameters()), torch.get_rng_state()])
    assert all(map(identical, *results))
