"""``Microbatch``: one step as slices of its batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt import PassError, Phase, PipelineError
from graphopt.errors import ArgumentError
from graphopt.ir.lowering import reused_operands
from graphopt.ir.node import info, value_of
from graphopt.ir.ops.layers.loss_gradient import loss_gradient
from graphopt.passes import ClipGradients, FitMemory, FuseUpdate, Microbatch, MixedPrecision, Recompute
from tests.support.covering import some_of
from tests.support.properties import examples

SAMPLES = 7

Loss = Callable[..., torch.Tensor]


class Attention(nn.Module):
    """Attention of torch's own, behind a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.drop(torch.relu(self.linear(x))))
        return self.attention(y, y, y, need_weights=False)[0]  # type: ignore[no-any-return]


class Flash(nn.Module):
    """Attention without whole scores."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.linear(x).view(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(x.shape)


class Image(nn.Module):
    """Convolutions, norms, pooling, upsampling, and classes of the middle."""

    def __init__(self, norm: Callable[[int], nn.Module], mode: str = "nearest") -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm(8)
        self.up, self.second = nn.Upsample(scale_factor=2, mode=mode), nn.Conv2d(8, 4, 3, bias=False)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.up(F.max_pool2d(F.gelu(self.norm(self.first(x))), 2)))
        return self.head(F.adaptive_avg_pool2d(F.avg_pool2d(h, 2), 1).flatten(1))  # type: ignore[no-any-return]


class Words(nn.Module):
    """Embeddings of tokens and places, and a classifier that reads the last token of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(30, 8), nn.Embedding(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.words(x) + self.places(torch.arange(x.shape[1])))
        last = (x != 0).sum(1) - 1
        return self.head(h)[torch.arange(len(x)), last.clamp(min=0)]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """What a recurrent layer gives for each token."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(8, 8, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][..., :8]  # type: ignore[no-any-return]


def classes(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over the tokens that a mask keeps."""
    kept = (y[..., 0] > 0).float()
    return ((model(x) - y).square().mean(-1) * kept).sum() / kept.sum()


def penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y, reduction="sum") + 0.1 * sum(p.square().mean() for p in model.parameters())


def elements(name: str, **options: Any) -> Loss:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return getattr(F, name)(model(x).sigmoid(), y.sigmoid(), **options)  # type: ignore[no-any-return]

    return loss


def images(samples: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(samples, 3, 8, 8), torch.randint(0, 4, (samples,))


def vectors(samples: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(samples, 5, 8), torch.randn(samples, 5, 8)


def tokens(samples: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 30, (samples, 6)), torch.randint(0, 4, (samples,))


def few_targets(samples: int) -> tuple[torch.Tensor, ...]:
    x, y = torch.randn(samples, 8), torch.randint(0, 4, (samples,))
    y[: samples // 2 + 1] = -100
    return x, y


def steps_first(samples: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(5, samples, 8), torch.randn(5, samples, 8)


Case = tuple[Callable[[], nn.Module], Loss, Callable[[int], tuple[torch.Tensor, ...]], dict[str, Any]]
CASES: dict[str, Case] = {
    "attention": (Attention, squares, vectors, {}),
    "flash": (Flash, squares, vectors, {}),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16), squares, steps_first, {"axis": 1}),
    "group norm": (lambda: Image(lambda width: nn.GroupNorm(2, width)), classes, images, {}),
    "bilinear": (lambda: Image(lambda width: nn.Identity(), "bilinear"), classes, images, {}),
    "batch norm, evaluating": (lambda: Image(nn.BatchNorm2d).eval(), classes, images, {}),
    "words": (Words, classes, tokens, {}),
    "uneven targets": (lambda: nn.Linear(8, 4), classes, few_targets, {}),
    "weights": (
        lambda: nn.Linear(8, 4),
        lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.arange(1.0, 5.0), label_smoothing=0.1),
        few_targets,
        {},
    ),
    "lstm": (
        lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2, bidirectional=True),
        squares,
        steps_first,
        {"axis": 1},
    ),
    "lstm, batch first": (lambda: Recurrent(nn.LSTM, batch_first=True), squares, vectors, {}),
    "gru": (lambda: Recurrent(nn.GRU, batch_first=True), squares, vectors, {}),
    "masked": (lambda: nn.Linear(8, 8), masked, vectors, {}),
    "penalised": (lambda: nn.Linear(8, 8), penalised, vectors, {}),
    "huber": (lambda: nn.Linear(8, 8), elements("huber_loss"), vectors, {}),
    "smooth l1": (lambda: nn.Linear(8, 8), elements("smooth_l1_loss", reduction="sum"), vectors, {}),
    "l1": (lambda: nn.Linear(8, 8), elements("l1_loss"), vectors, {}),
    "bce": (lambda: nn.Linear(8, 8), elements("binary_cross_entropy"), vectors, {}),
    "logits": (lambda: nn.Linear(8, 8), elements("binary_cross_entropy_with_logits"), vectors, {}),
}


def trained(
    model: nn.Module, passes: Sequence[Any], loss: Loss, batch: tuple[torch.Tensor, ...]
) -> tuple[graphopt.TrainStep, list[torch.Tensor]]:
    """A step that has run twice, and its losses."""
    step = graphopt.optimize_step(model, torch.optim.SGD(model.parameters(), lr=0.1), passes, loss=loss)
    torch.manual_seed(1)
    return step, [step(*batch).detach(), step(*batch).detach()]


def assert_alike(one: nn.Module, two: nn.Module, rtol: float = 1e-5) -> None:
    """Parameters differ by no more than rounding of the largest element of each."""
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        bound = rtol * max(1.0, float(second.detach().abs().max()))
        assert float((first - second).detach().abs().max()) <= bound


@pytest.mark.sweep(but=("penalised",))
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_slices_is_that_of_the_whole_batch(case: str) -> None:
    make, loss, draw, options = CASES[case]
    torch.manual_seed(0)
    model, batch = make(), draw(SAMPLES)
    other = copy.deepcopy(model)
    step, losses = trained(model, [Microbatch(3, **options)], loss, batch)
    stream = torch.get_rng_state()
    _, expected = trained(other, [], loss, batch)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-5, atol=1e-6)
    assert_alike(model, other)
    assert torch.equal(stream, torch.get_rng_state())
    assert step.records[0].changed.counts["slices"] == 3
    for node in step.program.phase_nodes(Phase.BACKWARD):
        if info(node).origin.startswith("microbatch") and node.target is torch.ops.aten.addmm.default:
            assert SAMPLES * 5 not in value_of(node).shape


@given(case=st.sampled_from(sorted(CASES)), slices=st.integers(2, 12), samples=st.integers(2, 12))
@examples(4)
def test_any_number_of_slices_gives_the_same(case: str, slices: int, samples: int) -> None:
    make, loss, draw, options = CASES[case]
    torch.manual_seed(0)
    model, batch = make().double(), [t.double() if t.is_floating_point() else t for t in draw(samples)]
    other = copy.deepcopy(model)
    if case == "weights":
        model, other, batch = model.float(), other.float(), [t.float() if t.is_floating_point() else t for t in batch]
    rtol = 1e-4 if case == "weights" else 1e-9
    if slices > samples:
        with pytest.raises(PassError, match=f"{slices} slices of {samples} samples"):
            trained(model, [Microbatch(slices, **options)], loss, tuple(batch))
        return
    _, losses = trained(model, [Microbatch(slices, **options)], loss, tuple(batch))
    _, expected = trained(other, [], loss, tuple(batch))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=rtol, atol=rtol, equal_nan=True)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=rtol, equal_nan=True)


class Wide(nn.Sequential):
    """Layers whose activations are more than their parameters."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)))


def wide(samples: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(samples, 1024 // samples, 32), torch.randn(samples, 1024 // samples, 32)


@pytest.mark.sweep
def test_the_peak_falls_with_the_slices_and_is_predicted() -> None:
    peaks = []
    for slices in (1, 4, 16):
        torch.manual_seed(0)
        step, _ = trained(Wide(), [Microbatch(slices)] if slices > 1 else [], squares, wide())
        batch = wide()
        predicted = step.program.memory().allocated_peak_bytes
        assert graphopt.measure_peak(lambda step=step, batch=batch: step(*batch)).allocated_peak_bytes == predicted
        peaks.append(predicted)
    assert peaks[1] < 0.4 * peaks[0]
    assert peaks[2] < 0.15 * peaks[0]


def test_the_gradient_of_a_cross_entropy_takes_the_place_of_log_probabilities() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 50))

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    program = graphopt.capture(model, (torch.randn(12, 16), torch.arange(12)), loss=loss)
    graphopt.Pipeline([Microbatch(3)]).run(program)
    made = [node for node in program.nodes if node.target is loss_gradient]
    assert len(made) == 3
    assert reused_operands(program).keys() >= set(made)


@pytest.mark.parametrize("case", some_of(list(CASES), "lstm, batch first"))
def test_what_each_slice_allocates_is_predicted(case: str) -> None:
    make, loss, draw, options = CASES[case]
    torch.manual_seed(0)
    batch = draw(SAMPLES)
    step, _ = trained(make(), [Microbatch(3, **options)], loss, batch)
    measured = graphopt.measure_peak(lambda: step(*batch)).allocated_peak_bytes
    assert step.program.memory().allocated_peak_bytes == measured


@pytest.mark.sweep
def test_auto_takes_as_many_as_lower_the_peak() -> None:
    torch.manual_seed(0)
    program = graphopt.capture(Wide(), wide(16), loss=squares)
    before = program.memory(measure=False).peak_bytes
    (record,) = graphopt.Pipeline([Microbatch()]).run(program)
    assert record.changed.counts["slices"] >= 8
    assert program.memory(measure=False).peak_bytes < 0.3 * before
    (again,) = graphopt.Pipeline([Microbatch()]).run(program)
    assert again.changed.reason == "the batch is in slices already"


def test_auto_leaves_a_batch_whose_bytes_are_not_the_peak() -> None:
    step, _ = trained(nn.Linear(64, 64), [Microbatch()], squares, (torch.randn(2, 64), torch.randn(2, 64)))
    assert "would not lower the peak" in step.records[0].changed.reason


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("passes", "rtol"),
    [
        ([MixedPrecision("bfloat16")], 2e-2),
        ([MixedPrecision("float16")], 2e-2),
        ([ClipGradients(0.1)], 1e-5),
        ([FuseUpdate()], 1e-5),
        ([Recompute("*")], 1e-5),
    ],
    ids=["bf16", "fp16", "clip", "fuse-update", "recompute"],
)
def test_it_goes_with_other_passes(passes: list[Any], rtol: float) -> None:
    torch.manual_seed(0)
    model, batch = Wide(), wide()
    other = copy.deepcopy(model)
    _, losses = trained(model, [*passes, Microbatch(4)], squares, batch)
    _, expected = trained(other, passes, squares, batch)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=rtol, atol=1e-6)
    assert_alike(model, other, rtol)


@pytest.mark.sweep
def test_what_is_computed_again_is_so_for_each_slice() -> None:
    torch.manual_seed(0)
    batch = wide()
    peaks = [trained(Wide(), passes, squares, batch)[0].program.memory().allocated_peak_bytes for passes in _RECOMPUTED]
    assert peaks[2] < min(peaks[:2])


_RECOMPUTED: list[list[Any]] = [[Recompute("*")], [Microbatch(4)], [Recompute("*"), Microbatch(4)]]


@pytest.mark.sweep
def test_accumulated_steps_and_evaluation_equal_those_without() -> None:
    torch.manual_seed(0)
    model, batch = Wide(), wide()
    other = copy.deepcopy(model)
    for trained_model, passes in ((model, [Microbatch(4)]), (other, [])):
        optimizer = torch.optim.AdamW(trained_model.parameters(), lr=1e-3)
        step = graphopt.optimize_step(trained_model, optimizer, passes, loss=squares).accumulate(2)
        for _ in range(4):
            step(*batch)
    assert_alike(model, other)


def test_inputs_that_are_given_whole() -> None:
    """A table as long as the batch belongs to no sample, where it is named."""
    torch.manual_seed(0)
    model, table = nn.Linear(6, 6), torch.randn(6, 6)
    other = copy.deepcopy(model)

    def loss(model: nn.Module, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (model(x) @ table).square().mean()

    batch = torch.randn(6, 6), table
    _, losses = trained(model, [Microbatch(3, whole=("args[1]",))], loss, batch)
    _, expected = trained(other, [], loss, batch)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    assert_alike(model, other)
    with pytest.raises(PassError, match="mm may mix samples"):
        trained(nn.Linear(6, 6), [Microbatch(3)], loss, batch)


# --- what cannot be --------------------------------------------------------------------------------------------------


def contrastive(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = model(x).flatten(1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)))


def largest(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return model(x).max()  # type: ignore[no-any-return]


def centred(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = model(x)
    return (z - z.mean(0)).square().mean()


@pytest.mark.sweep(but=("centred", "cumsum"))
@pytest.mark.parametrize(
    ("make", "loss", "draw", "said"),
    [
        (lambda: Image(nn.BatchNorm2d), classes, images, r"batch norm takes its statistics.*in norm"),
        (lambda: nn.Linear(8, 8), contrastive, vectors, "mm may mix samples"),
        (lambda: nn.Linear(8, 8), largest, vectors, "max may mix samples"),
        (lambda: nn.Linear(8, 8), centred, vectors, "sub may mix samples"),
        (lambda: nn.Linear(8, 8), lambda m, x, y: m(x).flip(0).square().mean(), vectors, "flip may mix samples"),
        (lambda: nn.Linear(8, 8), lambda m, x, y: m(x).cumsum(0).square().mean(), vectors, "cumsum may mix samples"),
        (lambda: nn.Linear(8, 8), lambda m, x, y: m(x)[1:].square().mean(), vectors, "slice may mix samples"),
    ],
    ids=["batch norm", "contrastive", "maximum", "centred", "flip", "cumsum", "slice"],
)
def test_what_mixes_samples_is_refused_by_name(
    make: Callable[[], nn.Module], loss: Loss, draw: Callable[[int], tuple[torch.Tensor, ...]], said: str
) -> None:
    with pytest.raises(PassError, match=said):
        trained(make(), [Microbatch(2)], loss, draw(6))


def test_a_drop_in_model_has_no_loss_to_cut() -> None:
    model = graphopt.optimize(nn.Linear(8, 8), [Microbatch(2)])
    with pytest.raises(PassError, match=r"use graphopt\.optimize_step with loss="):
        model(torch.randn(4, 8))


@pytest.mark.parametrize("slices", [1, 0, True, "4", 2.5])
def test_numbers_of_slices_that_cannot_be(slices: Any) -> None:
    with pytest.raises(ArgumentError, match="slices"):
        Microbatch(slices)


def test_passes_that_it_does_not_go_with() -> None:
    with pytest.raises(PipelineError, match="cannot be used together"):
        graphopt.Pipeline("microbatch{slices=2},chunk-loss")


def test_text_and_arguments_go_back_and_forth() -> None:
    (found,) = graphopt.Pipeline("microbatch{slices=4 axis=1 whole=args[2]}").passes
    assert found == Microbatch(4, axis=1, whole=("args[2]",))


@pytest.mark.sweep
def test_a_budget_that_cannot_be_met_names_the_pass() -> None:
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = graphopt.optimize_step(model, optimizer, [FitMemory("3%", cost="roofline")], loss=squares)
    with pytest.raises(PassError) as refused:
        step.prepare(*wide())
    assert any("Microbatch() (some of the 64 samples at a time: " in note for note in refused.value.__notes__)
