"""``materialize_shards``: values for a model without data, of which each rank keeps its shard."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import GraphoptError
from tests.support.ranks import run_ranks


class Tied(nn.Module):
    """An embedding whose weight is a head's too, an attention whose parts are set from outside, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        found: torch.Tensor = self.head(self.inner(self.norm(x.transpose(1, 2)).transpose(1, 2)))
        return found


TOKENS = torch.arange(48).reshape(6, 8) * 7 % 40


def made(kind: str) -> nn.Module:
    """A model with data, or one without that got values: its own or a state's."""
    torch.manual_seed(0)
    plain = Tied()
    with torch.no_grad():
        plain.norm.running_mean.add_(0.5)  # type: ignore[union-attr,operator]
    if kind == "plain":
        return plain
    with torch.device("meta"):
        model = Tied()
    if kind == "state":
        return graphopt.materialize_shards(model, plain.state_dict(), min_bytes=64)
    values = dict(plain.state_dict())

    def fill(module: nn.Module) -> None:
        prefix = next(name for name, found in model.named_modules() if found is module)
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            tensor.copy_(values[f"{prefix}.{name}" if prefix else name])

    return graphopt.materialize_shards(model, fill, min_bytes=64)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def stepping(model: nn.Module) -> graphopt.TrainStep:
    from graphopt.passes import DataParallel, ShardParameters

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    shard = ShardParameters(min_bytes=64, cost="roofline")
    return graphopt.optimize_step(model, optimizer, [DataParallel(), shard], loss=loss)


PROLOGUE = """
import graphopt
from graphopt import GraphoptError
from tests.runtime.state.test_materialize_shards import TOKENS, Tied, loss, made, stepping

def bytes_here(model):
    return sum(p.untyped_storage().nbytes() for p in model.parameters() if type(p) is torch.nn.Parameter)
"""


def run(script: str, world: int, folder: Path) -> list[Any]:
    said = run_ranks(PROLOGUE + script, world, folder / "store")
    assert all(other == said[0] for other in said)
    return said[0]


def test_training_is_that_of_a_model_that_was_made_with_data(tmp_path: Path) -> None:
    script = """
found = []
for kind in ("plain", "state", "function"):
    model = made(kind)
    say(kind == "plain" or bytes_here(model) < 64 * 20)
    say(model.head.weight is model.embedding.weight)
    step = stepping(model)
    before = None if kind == "plain" else step.evaluate(TOKENS)
    losses = [step(TOKENS[rank::world]) for _ in range(3)]
    with step.whole_parameters():
        found.append([*losses, *(tensor.clone() for tensor in model.state_dict().values())])
    say(before is None or before.isfinite().item())
say([all(map(torch.equal, found[0], other)) for other in found[1:]])
"""
    assert run(script, 2, tmp_path) == [*[True] * 9, [True, True]]


@pytest.mark.sweep
def test_modules_set_their_own_parameters_and_ranks_take_those_of_the_first(tmp_path: Path) -> None:
    script = """
with torch.device("meta"):
    model = Tied()
torch.manual_seed(rank)  # the first rank's values count
graphopt.materialize_shards(model, min_bytes=64)
step = stepping(model)
with step.whole_parameters():
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
say([tensor.double().sum().item() for tensor in state.values()])
say([state["attention.out_proj.bias"].count_nonzero().item(), state["norm.running_var"].sum().item()])
say(step(TOKENS[:4]).isfinite().item())
"""
    sums, (biases, variances), finite = run(script, 2, tmp_path)
    assert all(map(abs, sums[:1]))
    assert (biases, variances, finite) == (0, 16, True)


@pytest.mark.sweep
def test_what_the_program_does_not_shard_becomes_whole_and_is_told(tmp_path: Path) -> None:
    script = """
import logging
told = []
handler = logging.Handler()
handler.emit = lambda record: told.append(record.getMessage())
logging.getLogger("graphopt.runtime.state.sharded_model").addHandler(handler)
from graphopt.passes import DataParallel, ShardParameters, ShardOptimizer
found = []
for passes in ([DataParallel(), ShardParameters(min_bytes=2000, cost="roofline")], [DataParallel(), ShardOptimizer()]):
    for kind in ("plain", "state"):
        model = made(kind)
        step = graphopt.optimize_step(model, torch.optim.AdamW(model.parameters(), fused=True), passes, loss=loss)
        found.append([step(TOKENS[rank::world]) for _ in range(2)])
        say(bytes_here(model) > 64 * 20)
say([all(map(torch.equal, found[0], other)) for other in found[1:]])
say(["becomes whole on every rank" in message and "min_bytes" in message for message in told])
"""
    assert run(script, 2, tmp_path) == [*[True] * 4, [True] * 3, [True] * 2]


def test_a_state_saved_before_the_first_step_is_that_of_the_values(tmp_path: Path) -> None:
    script = f"""
step = stepping(made("state"))
graphopt.checkpoint.save({str(tmp_path / "run")!r}, step)
with torch.device("meta"):
    model = Tied()
torch.manual_seed(7)
other = stepping(graphopt.materialize_shards(model, min_bytes=64))
graphopt.checkpoint.load({str(tmp_path / "run")!r}, other)
whole = other.full_state_dict()
expected = made("plain").state_dict()
say([list(whole) if rank == 0 else [], rank == 0 or whole == {{}}][1])
say(rank > 0 or all(torch.equal(whole["model"][name], tensor) for name, tensor in expected.items()))
"""
    assert run(script, 2, tmp_path) == [True, True]


def test_one_process_keeps_everything_whole() -> None:
    with graphopt.without_data():
        model = nn.Sequential(OrderedDict(large=nn.Linear(400, 300), small=nn.Linear(3, 2)))
    small = model.small
    torch.manual_seed(3)
    graphopt.materialize_shards(model)
    torch.manual_seed(3)
    assert torch.equal(model.large.weight, nn.Linear(400, 300).weight)
    assert model.small is small
    assert not any(parameter.is_meta for parameter in model.parameters())


class Scaled(nn.Module):
    """A module that has no method to set its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "nothing gave 'scale' values"),
        (lambda module: module.scale.zero_(), "nothing gave 'seen' values"),
        ({"scale": torch.ones(5), "seem": torch.zeros(3)}, "no 'seen'.*'seem'"),
        ({"scale": torch.ones(4), "seen": torch.zeros(3)}, r"'scale' the shape \[4\].*\[5\]"),
        ({"scale": 1.0, "seen": torch.zeros(3)}, "'scale'.*a tensor"),
        ("weights.pt", "torch.load"),
    ],
    ids=["nothing", "a buffer", "a name", "a shape", "a type", "a path"],
)
def test_values_that_are_missing_or_do_not_fit_are_named(values: Callable[..., Any], message: str) -> None:
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(GraphoptError, match=message):
        graphopt.materialize_shards(model, values)


def test_a_parameter_of_another_module_is_not_read_when_it_is_in_shards(tmp_path: Path) -> None:
    script = """
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

def fill(module):
    module.weight.fill_(0.5)
    module.bias.copy_(model[0].weight.sum(0) if module is model[1] else torch.ones(8))

try:
    graphopt.materialize_shards(model, lambda module: fill(module) if hasattr(module, "weight") else None, min_bytes=64)
except GraphoptError as error:
    say("'0.weight'" in str(error))
"""
    assert run(script, 2, tmp_path) == [True]
