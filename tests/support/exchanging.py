"""What the tests of the exchange model share: workloads of any shape, and small programs."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Pass, Pipeline, Program
from graphopt.rewriting.distributed.prediction.link import Link
from graphopt.rewriting.distributed.prediction.volume import Gradient
from graphopt.rewriting.distributed.prediction.workload import Rates, Workload
from tests.support.training import mean_square

CPU = torch.device("cpu")


def gradient(place: int, shape: tuple[int, ...], ready: float, dtype: torch.dtype = torch.float32) -> Gradient:
    """One gradient of a parameter of its own kind."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return Gradient(f"p{place}", shape, dtype, CPU, place, ready, size, -place)


def workload(
    *shapes: tuple[int, ...], forward: float = 1.0, backward: float = 2.0, update: float = 0.5,
    buffers: tuple[int, ...] = (), rates: Rates | None = None,
) -> Workload:  # fmt: skip
    """A step whose gradients become ready at equal distances in backward; work around exchanges is free."""
    gap = backward / len(shapes)
    made = tuple(gradient(place, shape, forward + gap * (place + 1)) for place, shape in enumerate(shapes))
    return Workload(
        "made up", "step", forward, forward + backward, update, made, buffers, rates or Rates(0.0, 0.0), "none", "known"
    )


_SHAPES = st.one_of(
    st.tuples(st.integers(1, 4096)), st.tuples(st.integers(1, 700), st.integers(1, 700)),
    st.tuples(st.integers(1, 64), st.integers(1, 64), st.just(3), st.just(3)),
)  # fmt: skip


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Steps of any shape: gradients from one element to half a million, in float32 and bfloat16."""
    shapes = draw(st.lists(_SHAPES, min_size=1, max_size=12))
    dtypes = draw(st.lists(st.sampled_from([torch.float32, torch.bfloat16]), min_size=len(shapes)))
    forward, backward = draw(st.floats(0, 1)), draw(st.floats(1e-4, 2))
    moments = sorted(draw(st.lists(st.floats(0, 1), min_size=len(shapes), max_size=len(shapes))))
    made = tuple(
        gradient(place, shape, forward + moment * backward, dtype)
        for place, (shape, moment, dtype) in enumerate(zip(shapes, moments, dtypes, strict=False))
    )
    rates = Rates(draw(st.floats(0, 1e-8)), draw(st.floats(0, 1e-7)))
    buffers = tuple(draw(st.lists(st.integers(1, 10**5), max_size=2)))
    update, adds = draw(st.floats(0, 1)), draw(st.booleans())
    return Workload("", "step", forward, forward + backward, update, made, buffers, rates, adds=adds)


links = st.builds(
    Link, st.floats(1e3, 1e12), st.floats(0, 1e-2), st.sampled_from(["ring", "tree"])
)  # fmt: skip


def wide() -> nn.Module:
    """Two matrices that are large enough for sparse exchange, small ones, and buffers that forward updates."""
    return nn.Sequential(
        nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 130), nn.GELU(), nn.Linear(130, 4)
    )


def plain_step(model: nn.Module) -> Program:
    """A whole step with plain SGD, without passes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    return graphopt.capture(model, (torch.randn(8, 64),), loss=mean_square, optimizer=optimizer)


def step_with(*passes: Pass) -> Program:
    """The same of ``wide``, rewritten."""
    program = plain_step(wide())
    Pipeline(passes).run(program)
    return program
