"""``Chunk``: the large values inside of modules in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Phase
from graphopt.errors import ArgumentError, PassError
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.values import tensors_of
from graphopt.passes import Chunk, ClipGradients, FitMemory, FuseUpdate, MixedPrecision, Recompute
from tests.support.properties import examples

WIDTH, HIDDEN, HEADS = 8, 40, 2
ROWS, TOKENS = 2, 24


class Hidden(nn.Module):
    """An MLP: ``gelu``, ``swiglu`` of two products, ``glu`` of the halves of one, ``relu`` squared with dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(WIDTH, (2 if kind in ("glu", "halves") else 1) * HIDDEN, bias=kind != "swiglu")
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]
        up = self.up(x)
        if self.kind == "glu":
            return self.down(F.glu(up, -1))  # type: ignore[no-any-return]
        if self.kind == "halves":
            one, other = up.chunk(2, -1)
            return self.down(F.leaky_relu(one) * other)  # type: ignore[no-any-return]
        hidden = F.gelu(up) if self.kind == "gelu" else F.dropout(F.relu(up).square(), 0.3, self.training)
        return self.down(hidden)  # type: ignore[no-any-return]


class Scores(nn.Module):
    """Attention with whole scores; ``kind`` says what is done to them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.linspace(-1, 1, HEADS).view(HEADS, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5
        if self.kind == "causal":
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
        elif self.kind == "padding":
            scores = scores + torch.where(torch.arange(tokens) < tokens - 1, 0.0, -1e9).expand(rows, 1, 1, tokens)
        elif self.kind == "bias":
            scores = scores + self.bias
        elif self.kind == "cap":
            scores = 3 * torch.tanh(scores / 3)
        weights = scores.float().softmax(-1).to(x.dtype)
        if self.kind == "dropout":
            weights = F.dropout(weights, 0.2, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, tokens, width))  # type: ignore[no-any-return]


class Blocks(nn.Module):
    """Two blocks with residuals around a module of one kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x


MLPS = ("gelu", "swiglu", "glu", "halves", "dropout")
SCORES = ("plain", "causal", "padding", "bias", "cap", "dropout")
CASES = [
    *((Hidden, kind, 0) for kind in MLPS),
    *((Hidden, kind, 1) for kind in ("gelu", "swiglu", "dropout")),
    *((Scores, kind, 1) for kind in SCORES),
    *((Scores, kind, 0) for kind in SCORES if kind != "bias"),
]


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def made(module: type[nn.Module], kind: str) -> Blocks:
    torch.manual_seed(0)
    return Blocks(lambda: module(kind))


def batch(rows: int = ROWS, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(rows, tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(
    passes: Sequence[Any], model: nn.Module, x: torch.Tensor, steps: int = 2
) -> tuple[graphopt.TrainStep, torch.Tensor]:
    torch.manual_seed(2)
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.5), passes, loss=squares)
    return step, torch.stack([step(x).detach() for _ in range(steps)])


def assert_close(model: nn.Module, other: nn.Module, within: float) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (one - two).abs().max() <= within * two.abs().max(), name


def largest(step: graphopt.TrainStep) -> int:
    """Elements of the largest floating-point tensor that forward or backward makes."""
    nodes = step.program.phase_nodes(Phase.FORWARD, Phase.BACKWARD)
    return max(t.numel() for n in nodes for t in tensors_of(value_of(n)) if t.is_floating_point())


def whole(module: type[nn.Module]) -> int:
    """Elements of the values that are not to be whole."""
    return ROWS * TOKENS * HIDDEN if module is Hidden else ROWS * HEADS * TOKENS * TOKENS


@pytest.mark.sweep(but=("Hidden-gelu-0",))
@pytest.mark.parametrize(("module", "kind", "axis"), CASES)
def test_training_is_the_same_within_rounding_and_values_are_never_whole(
    module: type[nn.Module], kind: str, axis: int
) -> None:
    model, other = made(module, kind), made(module, kind)
    step, losses = trained([Chunk("blocks.*", axis=axis, chunks=4)], model, batch())
    plain, expected = trained([], other, batch())
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)
    assert_close(model, other, 1e-5)
    assert largest(step) < whole(module) <= largest(plain)
    assert step.program.memory().peak_bytes < 0.9 * plain.program.memory().peak_bytes
    assert step.records[0].changed.counts == {"modules": 2, "chunks": 4}


@given(case=st.sampled_from(CASES), chunks=st.integers(2, 30), rows=st.integers(1, 3), tokens=st.integers(17, 30))
@examples(2)
def test_any_number_of_chunks_gives_the_same(
    case: tuple[type[nn.Module], str, int], chunks: int, rows: int, tokens: int
) -> None:
    module, kind, axis = case
    model, other = made(module, kind), made(module, kind)
    _, losses = trained([Chunk("blocks.*", axis, chunks)], model, batch(rows, tokens))
    _, expected = trained([], other, batch(rows, tokens))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-7)
    assert_close(model, other, 1e-5)


@pytest.mark.sweep
def test_the_predicted_peak_is_the_measured_one() -> None:
    for passes in ([Chunk("blocks.*", 0, 3)], [Chunk("blocks.1", 1, 5), FuseUpdate(), FitMemory("95%")]):
        x = batch()
        step, _ = trained(passes, made(Scores, "causal"), x)
        measured = graphopt.measure_peak(lambda step=step, x=x: step(x))
        assert measured.allocated_peak_bytes == step.program.memory().allocated_peak_bytes


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("passes", "within"),
    [
        ([MixedPrecision("bf16")], 2e-2),
        ([MixedPrecision("fp16")], 2e-2),
        ([MixedPrecision("bf16", level="O2")], 2e-2),
        ([ClipGradients(0.1)], 1e-5),
        ([Recompute("blocks.*")], 1e-5),
    ],
    ids=["bf16", "fp16", "bf16-O2", "clip", "recompute"],
)
@pytest.mark.parametrize("module", [Hidden, Scores])
def test_it_goes_with_other_passes(passes: list[Any], within: float, module: type[nn.Module]) -> None:
    kind = "swiglu" if module is Hidden else "causal"
    model, other = made(module, kind), made(module, kind)
    step, losses = trained([*passes, Chunk("blocks.*", chunks=4)], model, batch())
    _, expected = trained(passes, other, batch())
    torch.testing.assert_close(losses, expected, rtol=within, atol=within)
    assert_close(model, other, within)
    assert largest(step) < whole(module)


def test_a_drop_in_model_is_chunked_too() -> None:
    model, other = made(Hidden, "gelu"), made(Hidden, "gelu")
    dropped = graphopt.optimize(model, [Chunk("blocks.*", chunks=4)])
    for one in (dropped, other):
        squares(one, batch()).backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-7, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(dropped(batch()), other(batch()))


@pytest.mark.sweep
def test_the_random_stream_is_as_before() -> None:
    after = []
    for passes in ([], [Chunk("blocks.*", chunks=5)]):
        trained(passes, made(Scores, "dropout"), batch())
        after.append(torch.rand(3))
    assert torch.equal(*after)


# --- how many, and which ---------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_auto_takes_as_many_as_lower_the_peak() -> None:
    program = graphopt.capture(made(Scores, "causal"), (batch(2, 128),), loss=squares)
    before = program.memory(measure=False).peak_bytes
    (record,) = graphopt.Pipeline([Chunk("blocks.*", axis=1)]).run(program)
    assert record.changed.counts["chunks"] >= 4
    assert program.memory(measure=False).peak_bytes < 0.4 * before
    assert record.changed.lines[0].startswith("2 x 262.1 kB of 128 rows")
    (again,) = graphopt.Pipeline([Chunk("blocks.*", axis=1)]).run(program)
    assert again.changed.reason == "the modules are in chunks already"


@pytest.mark.sweep
def test_auto_leaves_what_would_not_lower_the_peak() -> None:
    small = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    model = nn.Sequential(small, nn.Linear(4, 4000), nn.ReLU(), nn.Linear(4000, 4))
    program = graphopt.capture(model, (torch.randn(8, 4),), loss=squares)
    (record,) = graphopt.Pipeline([Chunk("0")]).run(program)
    assert record.changed.reason == "chunks would not lower the peak"


@pytest.mark.sweep
def test_several_patterns_name_modules_together() -> None:
    step, _ = trained([Chunk(("blocks.1", "blocks.0"), (0, 1), chunks=2)], made(Hidden, "gelu"), batch())
    changed = step.records[0].changed
    assert changed.tensors == ("blocks.0", "blocks.1")
    assert [line.split(" of ")[1] for line in changed.lines] == ["40 rows, 20 at a time", "48 rows, 24 at a time"]
    origins = {
        info(node).module for node in step.program.phase_nodes(*Phase) if info(node).origin.startswith("chunk: ")
    }
    assert {"blocks.0.up", "blocks.1.down"} <= origins


# --- what is refused -------------------------------------------------------------------------------------------------


class Whole(Scores):
    """Gives its scores to its caller."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x @ x.transpose(-2, -1), -1)
        return self.out(scores @ x) + scores.cumsum(-2)[..., :1] / 100  # type: ignore[no-any-return]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("build", "given", "message"),
    [
        (
            lambda: made(Scores, "plain"),
            Chunk("blocks.*", 2, 4),
            "is read as a whole by _softmax (aten._softmax.default)",
        ),
        (lambda: made(Scores, "plain"), Chunk("blocks.*", 3, 4), "of shape [4, 24, 24], which has no axis 3"),
        (
            lambda: made(Scores, "bias"),
            Chunk("blocks.*", 0, 4),
            "rows along another axis, or a module around it, may do",
        ),
        (lambda: Blocks(lambda: Whole("plain")), Chunk("blocks.*", 1, 4), "is read as a whole by cumsum"),
        (lambda: made(Hidden, "gelu"), Chunk("blocks.*.up", 0, 4), "or a module around it, may do"),
        (lambda: made(Hidden, "gelu"), Chunk("norm", 0, 4), "chunk cannot compute norm in chunks: there is no matrix"),
        (lambda: made(Hidden, "gelu"), Chunk("blocks.*.mlp", 0, 4), "'blocks.*.mlp' names no module; did you mean"),
    ],
    ids=["softmax over rows", "axis", "bias of each head", "read as a whole", "read elsewhere", "no product", "name"],
)
def test_what_cannot_be_is_refused_by_name(build: Callable[[], nn.Module], given: Chunk, message: str) -> None:
    with pytest.raises(PassError) as caught:
        trained([given], build(), batch(), 1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": ()}, "name the modules"),
        ({"pattern": "x", "chunks": 1}, "1 chunks leave values as they are"),
        ({"pattern": "x", "chunks": True}, "chunks"),
        ({"pattern": "x", "chunks": "four"}, "chunks"),
        ({"pattern": "x", "axis": -1}, "axis"),
        ({"pattern": "x", "axis": (0, 1)}, "2 axes for 1 patterns"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, TypeError)) as caught:
        Chunk(**arguments)
    assert message in str(caught.value)
