"""Results of pointwise ops have, without data, the strides that kernels give them where sizes are 1."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import graphopt
from graphopt._torch.kernels.eager_layouts import eager_layouts

aten = torch.ops.aten
OPS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b, c: a + b,
    "add a number": lambda a, b, c: a + 1,
    "addcmul": torch.addcmul,
    "and": lambda a, b, c: (a > 0) & (b > 0),
    "clamp": lambda a, b, c: a.clamp(0, 1),
    "dropout": lambda a, b, c: aten.native_dropout(a, 0.5, True)[0],
    "gelu backward": lambda a, b, c: aten.gelu_backward(a, b),
    "half": lambda a, b, c: a.half() + b,
    "masked_fill": lambda a, b, c: a.masked_fill(b > 0, 1.0),
    "prelu": lambda a, b, c: F.prelu(a, torch.ones(1)) * b,
    "silu": lambda a, b, c: F.silu(a),
    "square": lambda a, b, c: a**2,
    "subtract from a number": lambda a, b, c: 1 - a,
    "threshold backward": lambda a, b, c: aten.threshold_backward(a, b, 0),
    "where": lambda a, b, c: torch.where(a > 0, b, c),
}
PLAIN, LAST = ((2, 6, 1, 1), (6, 1, 1, 1)), ((2, 6, 1, 1), (6, 1, 6, 6))
WIDE = ((2, 6, 1, 4), (24, 1, 24, 6))
GIVEN = [*itertools.product((PLAIN, LAST), repeat=3), (WIDE,) * 3]


@pytest.mark.parametrize("name", OPS)
def test_strides_are_those_of_the_kernel(name: str) -> None:
    for given in GIVEN:
        real = OPS[name](*(torch.empty_strided(*each).fill_(0.5) for each in given))
        with eager_layouts(), FakeTensorMode():
            traced = OPS[name](*(torch.empty_strided(*each) for each in given))
        assert traced.stride() == real.stride(), given


class Block(nn.Module):
    """A convolution of each channel by itself on one pixel, after a block in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mix(x).permute(0, 2, 3, 1)
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def test_the_peak_of_convolutions_on_one_pixel_is_foretold() -> None:
    model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(2, 64, 1, 1)
    step = graphopt.optimize_step(
        model, torch.optim.AdamW(model.parameters(), fused=True), loss=lambda model, x: model(x).square().mean()
    )
    for _ in range(2):
        step(x)
    measured = graphopt.measure_peak(lambda: step(x)).allocated_peak_bytes
    assert step.program.memory().allocated_peak_bytes == measured
