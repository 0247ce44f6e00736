"""Compilers and gradient exchange: collectives become ops that compilers take, and ranks stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from graphopt.ir.ops.communication.collectives import ALL_REDUCE, BROADCAST, WAIT
from graphopt.runtime.compile.functional import write_nothing
from tests.support.ranks import run_ranks

SCRIPT = """
from torch import nn
from torch._dynamo import lookup_backend
import graphopt
from graphopt.passes import (
    CompressGradients, DataParallel, DeepGradientCompression, DiLoCo, LocalSGD, ShardOptimizer
)

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 130), nn.Linear(130, 4))

def loss(model, x):
    return model(x).square().mean()

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)

exchange = DataParallel(bucket_mb=0.05, first_bucket_mb=0.01)
sparse = DeepGradientCompression(sparsity=(0.995,), min_elements=1000)
WAYS = {
    "dense": (sgd, [exchange]), "sparse": (sgd, [exchange, sparse]), "local": (sgd, [exchange, LocalSGD(k_steps=2)]),
    "outer": (sgd, [exchange, DiLoCo(every=3, delay=1)]), "coded": (sgd, [exchange, DiLoCo(every=3, delay=1, bits=8)]),
    "bf16": (sgd, [exchange, CompressGradients("bf16")]), "sharded": (adam, [exchange, ShardOptimizer()]),
}

def trained(name, backend):
    optimizer, passes = WAYS[name]
    model = build()
    step = graphopt.optimize_step(model, optimizer(model), passes, loss=loss, backend=backend)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        step(torch.randn(8, 64, generator=generator))
    return torch.cat([value.detach().flatten() for value in model.state_dict().values()])

def same(tensor):
    found = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(found, tensor)
    return all(torch.equal(tensor, other) for other in found)

said = {}
for name in WAYS:
    expected, start = trained(name, "eager"), trained(name, lookup_backend("aot_eager"))
    said[name] = [torch.equal(start, expected), same(start)]
found, expected = trained("sparse", "inductor"), trained("sparse", "eager")
said["inductor"] = [torch.allclose(found, expected, rtol=1e-4, atol=1e-6), same(found)]
model, other = build(), build()
generator = torch.Generator().manual_seed(rank)
x = torch.randn(8, 64, generator=generator)
for built, backend in ((model, "eager"), (other, lookup_backend("aot_eager"))):
    graphopt.optimize(built, [exchange], backend=backend)(x).square().mean().backward()
grads = [torch.cat([p.grad.flatten() for p in built.parameters()]) for built in (model, other)]
said["drop-in"] = [torch.equal(*grads), same(grads[1])]
say(said)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return [found for (found,) in run_ranks(SCRIPT, 2, tmp_path_factory.mktemp("two") / "store")]


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["dense", "sparse", "local", "bf16", "sharded", "drop-in", "inductor"])
def test_compiled_steps_exchange_as_generated_ones_do(said: list[dict[str, Any]], way: str) -> None:
    """To the last bit with torch's own ``aot_eager``, within rounding with inductor; equal on all ranks."""
    for as_generated, on_all in (found[way] for found in said):
        assert as_generated
        assert on_all


# --- what compilers get ----------------------------------------------------------------------------------------------

aten = torch.ops.aten


def graph_with(target: Any, *, read: str = "", given: bool = False) -> fx.Node:
    """A call in place on a value, or on an input, that something else may read behind it, as it is or as a view."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    value = x if given else graph.call_function(aten.neg.default, (x,))
    view = graph.call_function(aten.view.default, (value, [-1]))
    rest = {ALL_REDUCE: ("sum", "0"), BROADCAST: (0, "0")}[target]
    node = graph.call_function(target, (view if read in ("base", "part") else value, *rest))
    seen = {"": [], "part": [], "value": [value], "view": [view], "base": [value]}[read]
    found = [graph.call_function(aten.neg.default, (behind,)) for behind in seen]
    graph.output((graph.call_function(WAIT, (node,)), *found))
    return node


@pytest.mark.parametrize("target", [ALL_REDUCE, BROADCAST])
def test_collectives_in_place_become_functional_where_nothing_else_sees_the_result(target: Any) -> None:
    assert compiled_target(graph_with(target)).name() == target.name().rstrip("_")
    for read in ("value", "view", "base"):
        assert compiled_target(graph_with(target, read=read)) is target
    assert compiled_target(graph_with(target, read="part")) is not target
    for part in ("", "part"):
        assert compiled_target(graph_with(target, read=part, given=True)) is target


def compiled_target(node: fx.Node) -> Any:
    """The op that a compiler gets in place of a call's."""
    write_nothing(node, copied := fx.Graph().node_copy(node, lambda n: n))
    return copied.target
