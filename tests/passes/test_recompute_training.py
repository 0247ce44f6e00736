"""Recompute: training with it equals eager training to the last bit, whatever the model does."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import graphopt
from graphopt import CaptureError, Phase, Pipeline
from graphopt.ir.node import info, value_of
from graphopt.passes import Recompute
from tests.support.covering import covering
from tests.support.training import OPTIMIZERS, Blocks, Net, assert_same_training, captured, mean_square, next_token, ops

TOKENS = torch.arange(12).reshape(2, 6) % 11
WIDE = torch.linspace(-1, 1, 512 * 16).reshape(512, 16)


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("momentum", "adamw"))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_eager(optimizer: str) -> None:
    model = Blocks(2 if optimizer == "adamw" else 1)  # what an update does is the same for one block and for several
    assert_same_training(model, optimizer, next_token, [(TOKENS,), ((TOKENS + 1) % 11,)], [Recompute("blocks.*")])


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape[-1]),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "randint": lambda x: x * torch.randint(1, 4, x.shape),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(),
    "feature dropout": lambda x: F.feature_alpha_dropout(x, 0.4),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "multinomial": lambda x: x[torch.multinomial(torch.ones(4), 4)],
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 2, 2, 8),) * 3, dropout_p=0.4).reshape(4, 8),
}


class Random(nn.Module):
    """Draws random numbers between its layers, twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = DRAWS[self.kind]
        x = draw(torch.tanh(self.a(x)))
        x = draw(torch.sin(self.b(x)))
        return self.c(torch.tanh(x))


@pytest.mark.sweep
@covering(kind=list(DRAWS), checkpoints=["a,b", "c", "b"])
def test_random_numbers_replay_and_the_generator_ends_where_eager_leaves_it(kind: str, checkpoints: str) -> None:
    passes = [Recompute(checkpoints.split(","))]
    assert_same_training(Random(kind), "momentum", mean_square, [(torch.randn(4, 8),)], passes, steps=3)


@pytest.mark.sweep
@pytest.mark.parametrize(("p", "replayed"), [(0.0, 0), (0.5, 1)])
def test_attention_without_dropout_is_an_ordinary_op(p: float, replayed: int) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x).tanh()
            return self.b(F.scaled_dot_product_attention(y, y, y, dropout_p=p).tanh())

    program = captured(Attention(), torch.randn(1, 2, 6, 8))
    (record,) = Pipeline([Recompute("b")]).run(program)
    assert bool(record.changed.counts["random ops replayed"]) == bool(replayed)
    attention = [op for op in ops(program, Phase.RECOMPUTE) if "attention" in op]
    assert bool(attention) == (not replayed)


@pytest.mark.sweep
def test_batch_norm_updates_its_statistics_once() -> None:
    model = Net(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    batches = [(torch.randn(3, 2, 8, 8),), (torch.randn(3, 2, 8, 8) + 1,)]
    assert_same_training(model, "sgd", mean_square, batches, [Recompute(["net.3"])])
    optimized = graphopt.optimize(copy.deepcopy(model), [Recompute("net.3")])
    optimized(batches[0][0]).sum().backward()
    assert optimized.net[1].num_batches_tracked == 1
    assert "_native_batch_norm_legit" in ops(optimized.program, Phase.RECOMPUTE)


class Transposed(nn.Module):
    """Batch norm of a tensor whose columns are contiguous: its result has rows that are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.t().contiguous().sin().t())
        return x.square().mean() + self.a(x)


@pytest.mark.sweep
def test_batch_norm_of_a_transposed_tensor() -> None:
    assert_same_training(Transposed(), "sgd", mean_square, [(torch.randn(24, 8),)], [Recompute("norm")], steps=2)


class Averages(nn.Module):
    """Buffers that forward writes to and reads before and after, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("assigned", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.a(x) + self.average).sin()
        self.average.mul_(0.9).add_(x.detach().mean(0))
        x = (x + self.average).cos() + self.assigned
        self.average.add_(1)
        self.assigned = self.assigned * 0.5
        return self.b(x).sin()


@pytest.mark.sweep(but=("b",))
@pytest.mark.parametrize("checkpoints", ["a", "b", "a,b"])
def test_values_from_before_a_buffer_was_written_are_not_read_again(checkpoints: str) -> None:
    passes = [Recompute(checkpoints.split(","))]
    assert_same_training(Averages(), "sgd", mean_square, [(torch.randn(4, 8),)], passes, steps=3)


class InPlace(nn.Module):
    """Changes its input and its own tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (self.a(x + 1) + x).sin()
        x.mul_(3)
        h.mul_(2)
        h[:, 0] = 0
        out = self.b(h * x)
        out += h
        return out.cos()


@pytest.mark.sweep
@pytest.mark.parametrize("checkpoints", ["a", "b"])
def test_operations_in_place_keep_their_meaning(checkpoints: str) -> None:
    batch = (torch.randn(4, 8),)
    assert_same_training(InPlace(), "sgd", mean_square, [batch], [Recompute(checkpoints)], steps=2)
    one, other = batch[0].clone(), batch[0].clone()
    graphopt.optimize(InPlace(), [Recompute(checkpoints)])(one)
    InPlace()(other)
    assert torch.equal(one, other)


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(x).float()


@pytest.mark.sweep
def test_autocast_regions_stay_casts_and_their_modules_have_names() -> None:
    assert_same_training(Cast(), "adamw", mean_square, [(torch.randn(4, 8),)], [Recompute(["net.2"])])
    program = captured(Cast(), torch.randn(4, 8))
    assert value_of(program.find("net.2")["net.2"]).dtype == torch.bfloat16


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.again, self.head.weight = self.a, self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.a(self.embed(tokens))))))


@pytest.mark.sweep
def test_tied_weights_and_shared_modules() -> None:
    assert_same_training(Tied(), "adamw", next_token, [(TOKENS,)], [Recompute(["embed", "a@1"])])
    assert_same_training(Tied(), "adamw", next_token, [(TOKENS,)], [Recompute(["a"])])


def test_frozen_parameters_and_inputs_that_need_gradients() -> None:
    model = Net(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model.net[2].requires_grad_(False)
    batch = (torch.randn(4, 8).requires_grad_(),)
    assert_same_training(model, "momentum", mean_square, [batch], [Recompute(["net.1", "net.3"])])


@pytest.mark.sweep
def test_two_forwards_before_one_backward() -> None:
    model = Blocks(2, p=0.5)
    losses, gradients = [], []
    for candidate in (copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model), [Recompute("blocks.*")])):
        torch.manual_seed(3)
        loss = next_token(candidate, TOKENS) * next_token(candidate, TOKENS.flip(0))
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in candidate.named_parameters()})
    assert torch.equal(*losses)
    assert all(torch.equal(value, gradients[1][name]) for name, value in gradients[0].items())


def test_a_second_backward_with_retain_graph() -> None:
    model = Blocks(2, p=0.5)
    found = []
    for candidate in (copy.deepcopy(model), graphopt.optimize(copy.deepcopy(model), [Recompute("blocks.*")])):
        torch.manual_seed(3)
        loss = next_token(candidate, TOKENS)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad for parameter in candidate.parameters()] + [torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# --- torch.utils.checkpoint in the model ------------------------------------------------------------------------------

RUNS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "keyword": lambda function, x: checkpoint(function, x, use_reentrant=False, preserve_rng_state=True),
}
if inspect.signature(checkpoint).parameters["function"].default is None:  # since torch 2.14, it makes decorators too
    RUNS["decorator"] = lambda function, x: checkpoint(use_reentrant=False)(function)(x)


class Checkpointed(nn.Module):
    def __init__(self, run: str | None, p: float = 0.3) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(p), nn.Linear(32, 16), nn.Tanh()) for _ in range(3)
        )
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = RUNS[self.run](part, x) if self.run else part(x)
        return x


@pytest.mark.sweep
@pytest.mark.parametrize("run", list(RUNS))
def test_checkpoint_calls_in_the_model_become_segments(run: str) -> None:
    model, batch = Checkpointed(run), (WIDE.clone().requires_grad_(),)
    assert_same_training(model, "sgd", mean_square, [batch], steps=3)
    plain = captured(Checkpointed(None), *batch)
    program = captured(model, *batch)
    assert "gelu" in ops(program, Phase.RECOMPUTE)
    assert {info(node).origin for node in program.phase_nodes(Phase.RECOMPUTE)} == {"torch.utils.checkpoint"}
    assert program.memory().peak_bytes < 0.75 * plain.memory().peak_bytes


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_of_what_has_no_gradient_give_none() -> None:
    """As in eager mode: reentrant autograd sees its arguments only, and parameters inside stay without a gradient."""

    class Ends(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[2](super().forward(x))

    torch.manual_seed(0)
    model = Ends("reentrant", p=0.0)
    optimized = graphopt.optimize(copy.deepcopy(model))
    for one in (model, optimized):
        one(WIDE).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {name: parameter.grad for name, parameter in optimized.named_parameters()}
    without = {name for name, gradient in expected.items() if gradient is None}
    assert without == {name for name, gradient in found.items() if gradient is None}
    assert {"parts.0.0.weight", "parts.1.0.weight"} <= without
    assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items() if gradient is not None)


def test_selective_checkpointing_is_refused_by_name() -> None:
    class Selective(Checkpointed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = [torch.ops.aten.addmm.default]
            context = functools.partial(create_selective_checkpoint_contexts, kept)
            return checkpoint(self.parts[0], x, use_reentrant=False, context_fn=context)

    with pytest.raises(CaptureError, match=r"selective checkpointing .*create_selective_checkpoint_contexts"):
        captured(Selective("non-reentrant"), WIDE)


def test_checkpoint_calls_and_recompute_work_together() -> None:
    batch = (WIDE.clone().requires_grad_(),)
    passes = [Recompute(["parts.0", "parts.1"])]
    assert_same_training(Checkpointed("non-reentrant"), "sgd", mean_square, [batch], passes, steps=3)
