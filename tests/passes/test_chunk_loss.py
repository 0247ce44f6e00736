"""``ChunkLoss``: the last projection and the loss in chunks of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import Phase, PipelineError
from graphopt.errors import ArgumentError, PassError
from graphopt.ir.lowering import reused_operands
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.layers.loss_gradient import loss_gradient
from graphopt.ir.ops.values import tensors_of
from graphopt.passes import ChunkLoss, ClipGradients, FitMemory, FuseUpdate, MixedPrecision, Recompute
from tests.support.properties import examples

WORDS, WIDTH, ROWS, TOKENS = 300, 16, 3, 10

Loss = Callable[..., torch.Tensor]


class Language(nn.Module):
    """Embedding, a block, and a head over many words; ``cap`` bounds the logits."""

    def __init__(self, *, bias: bool = False, tied: bool = False, cap: float = 0.0, padded: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + padded, WIDTH)
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS + padded, bias=bias)
        self.cap = cap
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.block(self.words(x)))
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


class FewWords(nn.Module):
    """A residual block and a norm in front of a head over so few words that gradients of its input are as large."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        return self.head(self.norm(h + torch.tanh(self.inner(h))))


WEIGHTS = torch.linspace(0.1, 1.1, WORDS)


def flat(logits: torch.Tensor) -> torch.Tensor:
    return logits.reshape(-1, logits.shape[-1])


def plain(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(model(x)), y.view(-1))


def shifted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(model(x)[:, :-1]), y[:, 1:].reshape(-1))


def cast_and_shifted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = model(x).float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), y[..., 1:].contiguous().view(-1))


def smoothed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(model(x)), y.view(-1), label_smoothing=0.1)


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(model(x)), y.view(-1), weight=WEIGHTS, ignore_index=5)


def weighted_and_smoothed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(model(x)), y.view(-1), weight=WEIGHTS, ignore_index=5, label_smoothing=0.1)


def summed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(model(x)), y.view(-1), reduction="sum") / 100


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(flat(model(x)), y.view(-1), reduction="none").view(y.shape)
    kept = (y > WORDS // 2).float()
    return (losses * kept).sum() / kept.sum()


def with_z_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    return F.cross_entropy(flat(logits), y.view(-1)) + 1e-2 * torch.logsumexp(logits, -1).square().mean()


def gathered(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(model(x), -1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


def with_more(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 2 * plain(model, x, y) + model.head.weight.square().mean()  # type: ignore[union-attr, operator]


def without_padding(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(model(x)[..., :WORDS]), y.view(-1))


CASES: dict[str, tuple[Loss, dict[str, Any]]] = {
    "plain": (plain, {}),
    "bias": (plain, {"bias": True}),
    "shifted": (shifted, {}),
    "cast, shifted": (cast_and_shifted, {"bias": True}),
    "tied, shifted": (shifted, {"tied": True, "bias": True}),
    "smoothed": (smoothed, {"tied": True}),
    "weighted": (weighted, {}),
    "weighted, smoothed": (weighted_and_smoothed, {}),
    "summed": (summed, {}),
    "masked": (masked, {}),
    "z-loss": (with_z_loss, {}),
    "capped": (cast_and_shifted, {"cap": 5.0, "bias": True}),
    "capped, z-loss": (with_z_loss, {"cap": 30.0}),
    "gathered": (gathered, {}),
    "more": (with_more, {}),
    "padded words": (without_padding, {"padded": 20}),
}


def batches(count: int, rows: int = ROWS, tokens: int = TOKENS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(WORDS, (2, rows, tokens), generator=made)) for _ in range(count)]  # type: ignore[misc]


def trained(
    passes: Sequence[Any], loss: Loss, model: nn.Module, batch: Sequence[tuple[torch.Tensor, ...]]
) -> tuple[graphopt.TrainStep, list[torch.Tensor]]:
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.5), passes, loss=loss)
    return step, [step(*item).detach() for item in batch]


def assert_close(model: nn.Module, other: nn.Module, within: float) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (one - two).abs().max() <= within * two.abs().max(), name


def largest(step: graphopt.TrainStep) -> int:
    """Elements of the largest tensor that the step makes."""
    return max(t.numel() for node in step.program.phase_nodes(*Phase) for t in tensors_of(value_of(node)))


@pytest.mark.sweep(but=("cast, shifted",))
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_within_rounding_and_logits_are_never_whole(case: str) -> None:
    loss, options = CASES[case]
    torch.manual_seed(0)
    model = Language(**options)
    other = copy.deepcopy(model)
    step, losses = trained([ChunkLoss(4)], loss, model, batches(3))
    plain_step, expected = trained([], loss, other, batches(3))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert_close(model, other, 1e-5)
    assert step.records[0].changed.counts["chunks"] == 4
    assert step.program.memory().peak_bytes < plain_step.program.memory().peak_bytes
    if "smoothed" not in case:  # weights times smoothing are a matrix of their own
        assert largest(step) < ROWS * (TOKENS - 1) * WORDS


@pytest.mark.parametrize("case", ["plain", "weighted", "shifted", "summed"])
def test_the_gradient_of_a_cross_entropy_takes_the_place_of_log_probabilities(case: str) -> None:
    loss, options = CASES[case]
    program = graphopt.capture(Language(**options), batches(1)[0], loss=loss)
    graphopt.Pipeline([ChunkLoss(3)]).run(program)
    made = [node for node in program.nodes if node.target is loss_gradient]
    assert len(made) == 3
    assert reused_operands(program).keys() >= set(made)
    assert torch.ops.aten.nll_loss_backward.default not in {node.target for node in program.nodes}


def test_the_predicted_peak_is_the_measured_one() -> None:
    for passes in ([ChunkLoss(7)], [ChunkLoss(4), FuseUpdate(), FitMemory("95%")]):
        step, _ = trained(passes, shifted, Language(bias=True), batches(2))
        x, y = batches(1)[0]
        measured = graphopt.measure_peak(lambda step=step, x=x, y=y: step(x, y))
        assert measured.allocated_peak_bytes == step.program.memory().allocated_peak_bytes


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("passes", "within"),
    [
        ([MixedPrecision("bf16")], 2e-2),
        ([MixedPrecision("fp16")], 2e-2),
        ([MixedPrecision("bf16", level="O2")], 2e-2),
        ([ClipGradients(0.1)], 1e-5),
        ([Recompute("block")], 1e-5),
    ],
    ids=["bf16", "fp16", "bf16-O2", "clip", "recompute"],
)
def test_it_goes_with_other_passes(passes: list[Any], within: float) -> None:
    torch.manual_seed(0)
    model = Language(bias=True)
    other = copy.deepcopy(model)
    step, losses = trained([*passes, ChunkLoss(4)], cast_and_shifted, model, batches(3))
    _, expected = trained(passes, cast_and_shifted, other, batches(3))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=within, atol=within)
    assert_close(model, other, within)
    assert largest(step) < ROWS * (TOKENS - 1) * WORDS


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_losses_of_many_tokens_in_sixteen_bits_are_added_up_in_float32(dtype: torch.dtype) -> None:
    """Their sum is almost more than float16 can hold, and sums of bfloat16 lose what is added last."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1000)).to(dtype)
    other = copy.deepcopy(model)
    x = torch.zeros(4, 2300, dtype=torch.int64)

    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(flat(module(x)), x.view(-1))

    _, (found,) = trained([ChunkLoss(5)], loss, model, [(x,)])
    _, (wanted,) = trained([], loss, other, [(x,)])
    assert 0.8 * torch.finfo(torch.float16).max < wanted.float() * x.numel() < torch.finfo(torch.float16).max
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)
    assert_close(model, other, 2e-2)


@pytest.mark.sweep
def test_accumulation_and_evaluation_go_on() -> None:
    torch.manual_seed(0)
    model = Language()
    other = copy.deepcopy(model)
    steps = []
    for trained_model, passes in ((model, [ChunkLoss(4)]), (other, [])):
        step = graphopt.optimize_step(
            trained_model, torch.optim.AdamW(trained_model.parameters(), lr=1e-3), passes, loss=plain
        ).accumulate(2)
        for item in batches(4):
            step(*item)
        steps.append(step)
    assert_close(model, other, 1e-5)
    one, two = (step.evaluate(*batches(1)[0]) for step in steps)
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@example(case="capped", chunks=2, rows=1, tokens=2)  # one row behind the shift
@given(
    case=st.sampled_from(sorted(CASES)), chunks=st.integers(2, 40), rows=st.integers(1, 4), tokens=st.integers(2, 12)
)
@examples(2)
def test_any_number_of_chunks_gives_the_same(case: str, chunks: int, rows: int, tokens: int) -> None:
    loss, options = CASES[case]
    torch.manual_seed(0)
    model = Language(**options)
    other = copy.deepcopy(model)
    _, losses = trained([ChunkLoss(chunks)], loss, model, batches(2, rows, tokens))
    _, expected = trained([], loss, other, batches(2, rows, tokens))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=2e-5, atol=1e-5, equal_nan=True)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, equal_nan=True)


# --- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_auto_takes_as_many_as_lower_the_peak() -> None:
    big = nn.Sequential(nn.Embedding(8000, 32), nn.Linear(32, 8000, bias=False))
    x = torch.zeros(4, 64, dtype=torch.int64)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(flat(model(x)), x.view(-1))

    program = graphopt.capture(big, (x,), loss=loss)
    before = program.memory(measure=False).peak_bytes
    (record,) = graphopt.Pipeline([ChunkLoss()]).run(program)
    assert 2 <= record.changed.counts["chunks"] <= 256 / 32  # a chunk has as many tokens as there are features
    assert program.memory(measure=False).peak_bytes < 0.5 * before
    assert "logits of 8.2 MB for 256 tokens" in record.changed.lines[0]
    (again,) = graphopt.Pipeline([ChunkLoss()]).run(program)
    assert again.changed.reason == "the loss is in chunks already"


@pytest.mark.sweep
def test_auto_leaves_small_logits_as_they_are() -> None:
    step, _ = trained([ChunkLoss()], plain, Language(), batches(1))
    assert "are less than 1.0 MB" in step.records[0].changed.reason


def test_a_budget_that_logits_exceed_names_the_pass() -> None:
    big = nn.Sequential(nn.Embedding(8000, 32), nn.Linear(32, 8000, bias=False))
    x = torch.zeros(4, 64, dtype=torch.int64)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(flat(model(x)), x.view(-1))

    with pytest.raises(PassError) as refused:
        graphopt.Pipeline([FitMemory("60%", cost="roofline")]).run(graphopt.capture(big, (x,), loss=loss))
    assert any("ChunkLoss() (logits and loss in chunks of tokens" in note for note in refused.value.__notes__)
    assert any("up to 8.2 MB less" in note for note in refused.value.__notes__)


@pytest.mark.sweep
def test_provenance_says_what_made_a_call() -> None:
    step, _ = trained([ChunkLoss(2)], plain, Language(), batches(1))
    origins = {info(node).origin for node in step.program.phase_nodes(Phase.BACKWARD)}
    assert "chunk-loss: head" in origins
    assert "head.weight~" in step.program.names()


# --- what cannot be --------------------------------------------------------------------------------------------------


def squared(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(model, x, y) ** 2


def across(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), y)


def over_tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(flat(torch.softmax(model(x), 1)), y.view(-1))


@pytest.mark.sweep(but=("<lambda>-no loss is computed from the rows of a matrix product",))
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (squared, "which depends on the loss itself"),
        (across, "head is read as a whole by transpose"),
        (over_tokens, "is read as a whole by _softmax"),
        (lambda model, x, y: model(x).square().mean(), "no loss is computed from the rows of a matrix product"),
    ],
)
def test_a_loss_that_needs_all_tokens_is_refused_with_the_call_or_left_alone(loss: Loss, said: str) -> None:
    with pytest.raises(PassError, match=said):
        trained([ChunkLoss(4)], loss, Language(), batches(1))
    torch.manual_seed(0)
    model = Language()
    other = copy.deepcopy(model)
    step, losses = trained([ChunkLoss()], loss, model, batches(1))
    _, expected = trained([], loss, other, batches(1))
    assert step.records[0].changed.reason
    assert torch.equal(losses[0], expected[0])


@pytest.mark.sweep
def test_logits_that_are_returned_stay_whole() -> None:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return plain(model, x, y) + 0 * model(x).argmax(-1).float().mean()

    step, _ = trained([ChunkLoss(4)], loss, Language(), batches(1))
    assert step.records[0].changed.counts["chunks"] == 4


def test_a_drop_in_model_has_no_loss_to_compute_in_chunks() -> None:
    with pytest.raises(PassError, match=r"use graphopt\.optimize_step with loss="):
        graphopt.optimize(Language(), [ChunkLoss(4)])(batches(1)[0][0])
    model = graphopt.optimize(Language(), [ChunkLoss()])
    assert model(batches(1)[0][0]).shape == (ROWS, TOKENS, WORDS)


@pytest.mark.sweep(cases=("True",))
@pytest.mark.parametrize("chunks", [1, 0, -3, 2.5, "many", True])
def test_a_number_of_chunks_that_is_none_is_refused(chunks: Any) -> None:
    with pytest.raises((ArgumentError, PipelineError), match="chunk"):
        ChunkLoss(chunks)


def test_a_norm_whose_gradients_are_as_large_as_the_logits_is_one_of_the_calls_in_chunks() -> None:
    model = FewWords()
    reference = copy.deepcopy(model)
    x = torch.randint(40, (4, 8))
    step = graphopt.optimize_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True), [ChunkLoss(chunks=2)], loss=plain
    )
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        loss = plain(reference, x, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(x, x), loss.detach(), rtol=1e-5, atol=0)
    assert step.records["chunk-loss"]
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
