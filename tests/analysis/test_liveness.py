"""The memory model says to the byte what the allocator measures, and measuring counts what is allocated."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import graphopt
from graphopt import GraphoptError, Pass, Pipeline, measure_peak
from graphopt.analysis.liveness import storages_of
from graphopt.ir.node import info
from graphopt.passes import Recompute
from tests.support.covering import covering
from tests.support.running import gradients, network
from tests.support.training import Blocks, Net, captured, mean_square, next_token, peaks, rewritten

aten = torch.ops.aten
FLOAT = 4


class Layers(nn.Module):
    """``then(self, hidden)`` between two layers of 16 features."""

    def __init__(self, then: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.then = nn.Linear(16, 16), nn.Linear(16, 16), then
        self.norm, self.lstm = nn.LayerNorm(16), nn.LSTM(16, 16, batch_first=True)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.then(self, self.a(x)).tanh())


def attention(_: Layers, x: torch.Tensor) -> torch.Tensor:
    parts = x.view(1, -1, 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(parts, parts, parts).transpose(1, 2).reshape(x.shape)


def halves_swapped(_: Layers, x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([right.sin(), left], -1)


def picked(_: Layers, x: torch.Tensor) -> torch.Tensor:
    values, indices = x.topk(16, -1)
    return values * x.gather(-1, indices.flip(-1))


def statistics(_: Layers, x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1)


def written(_: Layers, x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[:, :4] = 0
    y.mul_(x)
    return y


def views(model: Layers, x: torch.Tensor) -> torch.Tensor:
    wide = x.T.contiguous().T.unsqueeze(0).expand(3, -1, -1)
    return wide.flatten(0, 1)[: x.shape[0]] * x[:, ::2].repeat_interleave(2, 1) + x.select(1, 3)[:, None]


THENS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "pointwise": lambda _, x: x.sin() * x.cos() + x.exp(),
    "dropout": lambda _, x: F.dropout(F.gelu(F.dropout(x, 0.5)), 0.2),
    "layer norm": lambda m, x: m.norm(x) * m.norm(x.sin()),
    "softmax": lambda _, x: x.softmax(-1) * x.log_softmax(0),
    "attention": attention,
    "lstm": lambda m, x: m.lstm(x.view(12, 4, 16))[0].flatten(0, 1),
    "chunks": halves_swapped,
    "topk and gather": picked,
    "two results": statistics,
    "writes": written,
    "views": views,
    "gradient sums": lambda m, x: x * m.scale + (x * m.scale).sin() + x / (1 + m.scale**2),
    "low precision": lambda _, x: (x.bfloat16() @ x.bfloat16().T).float() @ x,
    "double precision": lambda _, x: x.double().cumsum(0).float() + x,
}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.grouped, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        y = F.relu(y + self.norm2(self.grouped(y)))
        return self.head(F.adaptive_avg_pool2d(F.interpolate(y, scale_factor=2), 1).flatten(1))


ROWS = torch.linspace(-1, 1, 48 * 16).reshape(48, 16)
TOKENS = torch.arange(24).reshape(2, 12) % 11
CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor, Callable[..., torch.Tensor], str]] = {
    **{name: (lambda then=then: Layers(then), ROWS, mean_square, "b") for name, then in THENS.items()},
    "convolutions": (Images, torch.randn(4, 3, 16, 16), mean_square, "head"),
    "language model": (lambda: Blocks(2), TOKENS, next_token, "blocks.*"),
    "embedding": (lambda: Net(nn.Embedding(11, 16), nn.Flatten(), nn.Linear(192, 8)), TOKENS, mean_square, "net.1"),
}

RECOMPUTE = {"plain": False, "recompute": True}


# --- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(but=("softmax-recompute",))
@covering(case=list(CASES), recompute=RECOMPUTE)
def test_the_predicted_peak_is_the_measured_peak(case: str, recompute: bool) -> None:
    make, x, loss, checkpoints = CASES[case]
    model = make()
    passes: list[Pass] = [Recompute(checkpoints)] if recompute else []
    predicted, measured = peaks(rewritten(model, x, passes=passes, loss=loss), model, x)
    assert predicted == measured


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
}


@pytest.mark.sweep
@covering(kind=list(OPTIMIZERS), recompute=RECOMPUTE)
def test_whole_steps_are_predicted_too(kind: str, recompute: bool) -> None:
    model, passes = Blocks(1), "recompute{checkpoints=blocks.*}" if recompute else ""
    step = graphopt.optimize_step(model, OPTIMIZERS[kind](model.parameters()), passes, loss=next_token)
    assert all(record.changed for record in step.prepare(TOKENS).records)
    step(TOKENS), step(TOKENS)  # the first makes the optimizer's state, the second the learning rate's tensor
    measured = measure_peak(lambda: step(TOKENS))
    assert step.program.memory().allocated_peak_bytes == measured.allocated_peak_bytes
    assert measured.retained_bytes == FLOAT  # the loss


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [3, 40])
def test_sizes_that_vary_are_counted_as_in_the_example(rows: int) -> None:
    shapes = ({0: torch.export.Dim("rows", min=2, max=64)},)
    model, x = network(), torch.randn(rows, 8)
    fixed = graphopt.capture(model, (x,), loss=mean_square).memory()
    varying = graphopt.capture(model, (x,), loss=mean_square, dynamic_shapes=shapes).memory()
    assert varying.allocated_peak_bytes == fixed.allocated_peak_bytes


def drop_in_peaks(model: nn.Module, x: torch.Tensor, checkpoints: list[str]) -> list[int]:
    """Measured peaks of forward and backward: eager, captured, and recomputed between checkpoints."""
    found = []
    for candidate in (model, graphopt.optimize(model), graphopt.optimize(model, [Recompute(checkpoints)])):
        gradients(candidate, x)
        model.zero_grad()
        found.append(measure_peak(lambda c=candidate: mean_square(c, x).backward()).allocated_peak_bytes)
    return found


def test_drop_in_training_peaks_no_higher_than_eager() -> None:
    eager, plain, _ = drop_in_peaks(network(p=0.0), torch.randn(512, 8), ["net.1", "net.3"])
    assert plain <= eager


@pytest.mark.sweep
def test_drop_in_recomputation_lowers_the_measured_peak() -> None:
    blocks = (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4))
    eager, plain, recomputed = drop_in_peaks(nn.Sequential(*blocks), torch.randn(512, 8), ["0", "1", "2"])
    assert recomputed < plain <= eager


# --- the timeline ----------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """loss = sum(cos(sin(w))) of n numbers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(0, 1, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = graphopt.name(self.w.sin(), "y")
        return graphopt.name(y.cos(), "z").sum() * x


def test_a_timeline_by_hand() -> None:
    n = 1000
    size = n * FLOAT
    program = graphopt.capture(Chain(n), (torch.tensor(1.0),), loss=True)
    memory = program.memory()
    assert memory.resident_bytes == size + FLOAT  # w and x
    by_op = {f"{info(node).phase.value} {node.target}": index for index, node in enumerate(memory.nodes)}
    added = {op: memory.bytes[index] - memory.resident_bytes for op, index in by_op.items()}
    assert added["forward aten.sin.default"] == size
    assert added["forward aten.cos.default"] == 2 * size
    assert added["forward aten.sum.default"] == 2 * size + FLOAT
    assert added["forward aten.mul.Tensor"] == size + FLOAT  # z is dead, y is read by backward, the sum is overwritten
    assert memory.allocated_peak_bytes == max(added.values())
    at_cos = {item.name: (item.bytes, item.category) for item in memory.alive_at(by_op["forward aten.cos.default"])}
    assert at_cos["y"] == at_cos["z"] == (size, "activations")
    assert at_cos["w"] == (size, "parameters")
    (y,) = (item for item in memory.alive_at(by_op["forward aten.cos.default"]) if item.name == "y")
    assert "test_liveness.py" in y.source


@pytest.mark.sweep
@covering(stage=["forward", "joint", "step"], passes=["recompute{checkpoints=blocks.*}", ""])
def test_everything_adds_up(stage: Any, passes: str) -> None:
    model = Blocks(2)
    optimizer = torch.optim.AdamW(model.parameters())
    program = graphopt.capture(model, (TOKENS,), loss=next_token, optimizer=optimizer, stage="forward")
    Pipeline(passes).run(program)
    while program.stage != stage:
        assert program.lower is not None
        program = program.lower(program)
        Pipeline(passes).run(program)
    memory = program.memory()
    assert len(memory.bytes) == len(memory.nodes) == len(memory.temporaries)
    for position, total in enumerate(memory.bytes):
        alive, categories = memory.alive_at(position), memory.categories_at(position)
        assert sum(categories.values()) == sum(item.bytes for item in alive) == total
        assert [item.bytes for item in alive] == sorted((item.bytes for item in alive), reverse=True)
        assert {item.category for item in alive} == set(categories)
    parameters = sum(p.numel() * FLOAT for p in model.parameters())
    counts = len(list(model.parameters())) * FLOAT
    state = {"forward": 0, "joint": 0, "step": 2 * parameters + counts + 8}[stage]  # and the learning rate
    assert memory.resident_bytes == parameters + state + TOKENS.nbytes
    assert memory.categories["parameters"] == parameters
    seen = {category for position in range(len(memory.nodes)) for category in memory.categories_at(position)}
    assert ("recomputed" in seen) == (bool(passes) and stage != "forward")
    assert ("gradients" in seen) == (stage != "forward")
    last = memory.categories_at(len(memory.nodes) - 1)
    assert last.get("gradients", 0) == (0 if stage == "forward" else parameters)


def test_the_peak_is_where_most_is_alive() -> None:
    memory = captured(Blocks(2), TOKENS, loss=next_token).memory()
    position = memory.nodes.index(memory.peak_at)
    assert memory.bytes[position] == memory.peak_bytes == max(memory.bytes)
    assert max(memory.bytes[:position]) < memory.peak_bytes
    assert memory.alive == memory.alive_at(position)
    assert memory.categories == memory.categories_at(position)
    assert memory.allocated_peak_bytes == memory.peak_bytes - memory.resident_bytes


def test_what_ops_need_inside_counts_unless_nothing_may_run() -> None:
    x = torch.randn(64, 8)
    program = captured(Net(nn.Linear(8, 8), nn.Tanh()), x, loss=lambda m, x: (m(x) * (x > 0)).pow(2).mean())
    memory, without = program.memory(), program.memory(measure=False)
    inside = {node.name: count for node, count in zip(memory.nodes, memory.temporaries, strict=True)}
    assert inside["mul"] >= x.numel() * FLOAT  # the booleans as numbers
    assert not any(without.temporaries)
    assert [a - b for a, b in zip(memory.bytes, without.bytes, strict=True)] == memory.temporaries
    position = next(i for i, node in enumerate(memory.nodes) if node.name == "mul")
    (item,) = (item for item in memory.alive_at(position) if item.category == "temporaries")
    assert (item.name, item.bytes) == ("mul (inside the op)", inside["mul"])


def test_views_belong_to_their_base_and_results_are_apart() -> None:
    program = captured(Layers(halves_swapped), ROWS)
    memory = program.memory()
    owners = {storage.owner.name for storage in memory.storages}
    assert not [name for name in owners if name.startswith(("split", "getitem"))]
    normed = captured(Layers(THENS["layer norm"]), ROWS).memory()
    sizes = [s.bytes for s in normed.storages if s.owner.name == "native_layer_norm"]
    assert sizes == [ROWS.numel() * FLOAT, len(ROWS) * FLOAT, len(ROWS) * FLOAT]  # the result, means, deviations


def test_memory_bears_the_name_of_what_allocated_it() -> None:
    program = captured(Net(nn.Linear(8, 8), nn.Flatten(0), nn.Linear(32, 8)), torch.randn(4, 8))
    (names,) = (storage.names for storage in program.memory().storages if storage.owner.name == "addmm")
    assert names[0] == "net.0"  # not net.1, which is a view of it


def test_outputs_stay_with_the_caller_and_tangents_come_with_the_callers_loss() -> None:
    model, x = Net(nn.Linear(8, 32), nn.Tanh()), torch.randn(64, 8)
    program = graphopt.capture(model, (x,))
    ((tangent, _),), ((output, _),) = program.inputs_of("tangent"), program.outputs_of("output")
    assert isinstance(output, fx.Node)
    memory, (_, refers) = program.memory(), storages_of(program)
    backward = next(i for i, node in enumerate(memory.nodes) if info(node).phase is not graphopt.Phase.FORWARD)
    assert [storage.first for storage in refers[tangent]] == [backward]
    assert [storage.last for storage in refers[output]] == [len(memory.nodes)]
    assert memory.resident_bytes == x.nbytes + sum(p.nbytes for p in model.parameters())


# --- measuring -------------------------------------------------------------------------------------------------------


def test_known_allocations_are_counted() -> None:
    def run() -> torch.Tensor:
        first = torch.zeros(1000)  # 4000 alive
        second = torch.zeros(500, dtype=torch.float64)  # 8000
        del first  # 4000
        third = torch.zeros(700, dtype=torch.int8)  # 4700
        third.add_(1)
        return second[:10]  # its whole storage

    measured = measure_peak(run)
    assert (measured.allocated_peak_bytes, measured.retained_bytes) == (8000, 4000)
    assert measured.result.shape == (10,)
    assert measured.device == "cpu"


def test_what_was_there_before_is_not_seen_on_a_cpu() -> None:
    kept, held = torch.zeros(1000), [torch.zeros(1000)]
    nothing = measure_peak(lambda: kept.view(10, 100).neg_().shape)
    assert (nothing.allocated_peak_bytes, nothing.retained_bytes) == (0, 0)

    def swap() -> torch.Tensor:
        held.clear()
        return torch.zeros(500)

    swapped = measure_peak(swap)
    assert (swapped.allocated_peak_bytes, swapped.retained_bytes) == (2000, 2000)


def test_garbage_from_before_is_not_counted() -> None:
    gc.disable()
    try:
        cycle: list[Any] = [torch.zeros(1000)]
        cycle.append(cycle)
        del cycle
        measured = measure_peak(lambda: (gc.collect(), torch.zeros(250))[1])
    finally:
        gc.enable()
    assert (measured.allocated_peak_bytes, measured.retained_bytes) == (1000, 1000)


def test_errors_pass_through_and_measuring_goes_on() -> None:
    def fail() -> None:
        raise ZeroDivisionError("inside")

    with pytest.raises(ZeroDivisionError, match="inside"):
        measure_peak(fail)
    assert measure_peak(lambda: torch.zeros(5)).allocated_peak_bytes == 20
    with pytest.raises(GraphoptError, match="cannot measure the peak on meta: only cpu and cuda"):
        measure_peak(lambda: None, device="meta")
