"""Sizes that change become symbols of one capture, to the bits of eager mode; what cannot vary is said by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import graphopt
from graphopt.passes import ClipGradients, MixedPrecision, Offload, Recompute
from graphopt.runtime.drop_in.module import Optimized
from tests.support.changing_lengths import (
    LONGEST,
    Lengths,
    Way,
    assert_trains_alike,
    next_word,
    sentences,
    trained,
)
from tests.support.training import Net

WAYS = pytest.mark.parametrize("way", ["drop-in", "step"])


def mean_square(model: nn.Module, *batch: torch.Tensor) -> torch.Tensor:
    return model(*batch).float().square().mean()


def noise(*shape: int) -> tuple[torch.Tensor]:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))),)


# --- one capture for all sizes ---------------------------------------------------------------------------------------


@pytest.mark.sweep
@WAYS
def test_lengths_in_random_order_take_two_captures(way: Way) -> None:
    lengths = random.Random(0).sample(range(2, LONGEST + 1), 12)
    found = assert_trains_alike(way, Lengths(), next_word, sentences(lengths), passes=[Recompute("blocks.*")])
    assert found.captures == 2


@pytest.mark.sweep
@settings(max_examples=3, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, LONGEST)), min_size=3, max_size=7),
    way=st.sampled_from(["drop-in", "step"]),
)
def test_any_lengths_and_batch_sizes(shapes: list[tuple[int, int]], way: Way) -> None:
    batches = [sentences([length], rows)[0] for rows, length in shapes]
    assert_trains_alike(way, Lengths(), next_word, batches)


@pytest.mark.sweep(cases=("step",))
@WAYS
def test_the_last_batch_of_an_epoch_is_smaller(way: Way) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
    batches = [noise(rows, 4) for rows in (8, 8, 8, 3, 8, 8, 8, 3, 5)]
    assert assert_trains_alike(way, model, mean_square, batches).captures == 2


@pytest.mark.sweep
@WAYS
def test_images_of_changing_height_and_width(way: Way) -> None:
    class Net2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)
            self.second, self.pool = nn.Conv2d(4, 2, 3), nn.MaxPool2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.second(self.pool(self.norm(self.first(x)).relu())), 0.2).mean((2, 3))

    batches = [noise(2, 3, size, size + 3) for size in (16, 20, 33, 24)]
    assert assert_trains_alike(way, Net2d(), mean_square, batches).captures == 2
    last = [(x.to(memory_format=torch.channels_last),) for (x,) in batches]
    assert assert_trains_alike(way, Net2d(), mean_square, last).captures == 2


@pytest.mark.sweep
@WAYS
def test_padding_masks_in_containers(way: Way) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(batch["x"], src_key_padding_mask=batch["mask"])

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(batch) * ~batch["mask"][..., None]).square().mean()

    batches = [
        ({"x": noise(2, length, 8)[0], "mask": torch.arange(length) >= torch.tensor([[length], [length // 2]])},)
        for length in (6, 9, 4, 17)
    ]
    assert assert_trains_alike(way, Encoder(), loss, batches).captures == 2


@pytest.mark.sweep
def test_batches_that_are_accumulated() -> None:
    batches = sentences([9, 5, 30, 17, 12, 64, 3, 9])
    assert assert_trains_alike("step", Lengths(), next_word, batches, every=2).captures == 2


@pytest.mark.sweep
def test_axes_that_change_one_after_the_other() -> None:
    batches = [sentences([length], rows)[0] for rows, length in ((3, 9), (3, 12), (4, 12), (5, 31), (2, 7), (7, 2))]
    assert assert_trains_alike("drop-in", Lengths(), next_word, batches).captures == 3


@pytest.mark.sweep
def test_arguments_that_are_parts_of_larger_tensors() -> None:
    whole = torch.randint(13, (3, 40), generator=torch.Generator().manual_seed(0))
    wider = torch.randint(13, (3, 50), generator=torch.Generator().manual_seed(0))
    batches = [(w[:, :n], w[:, 1 : n + 1]) for w, n in ((whole, 9), (whole, 20), (whole, 13), (wider, 30))]
    assert assert_trains_alike("step", Lengths(), next_word, batches).captures == 2


@pytest.mark.sweep
def test_each_size_is_captured_by_itself_where_that_is_wanted() -> None:
    batches = [noise(rows, 4) for rows in (3, 5, 7)]
    assert assert_trains_alike("step", Net(nn.Linear(4, 4)), mean_square, batches, dynamic_shapes=None).captures == 3


@pytest.mark.sweep
def test_sizes_of_one_are_a_capture_of_their_own() -> None:
    found = assert_trains_alike("step", Net(nn.Linear(4, 4)), mean_square, [noise(n, 4) for n in (5, 1, 7, 6, 1)])
    assert found.captures == 3


@pytest.mark.sweep
def test_a_range_that_the_model_gives() -> None:
    model = graphopt.optimize(Lengths())
    for tokens, _ in sentences([9, 20, LONGEST]):
        model(tokens)
    with pytest.raises(RuntimeError):  # as in eager mode: there are no more positions
        model(sentences([LONGEST + 1])[0][0])
    assert isinstance(model, Optimized)
    assert len(model._graphopt.runner.captures.all()) == 2


# --- what cannot vary ------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(x) if x.shape[1] > 10 else self.short(x)


@pytest.mark.sweep
@WAYS
def test_each_path_of_a_model_has_a_capture(way: Way) -> None:
    batches = [noise(2, length, 4) for length in (8, 6, 30, 3, 11, 10, 50)]
    assert assert_trains_alike(way, Branching(), mean_square, batches).captures == 3


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(x.shape[1]) ** 0.5


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, d = x.shape
        return self.layer(x.view(rows, length // 2, 2, d).sum(2) if length % 2 == 0 else x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


@pytest.mark.sweep
@WAYS
@pytest.mark.parametrize(
    ("make", "captures", "reason"),
    [(Scaled, 4, "fixed numbers"), (Recurrent, 4, "captured by itself"), (Pairs, 3, "")],
    ids=["a number in Python", "a kernel of fixed sizes", "even and odd"],
)
def test_what_cannot_vary_is_captured_for_each_size_and_said_once(
    way: Way, make: Callable[[], nn.Module], captures: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [noise(2, length, 4) for length in (12, 7, 9, 14, 12)]
    assert assert_trains_alike(way, make(), mean_square, batches).captures == captures
    said = [record.getMessage() for record in caplog.records if "captured by itself" in record.getMessage()]
    assert len(said) == bool(reason)
    assert all("axis 1 of" in text and "(12, 7)" in text and reason in text for text in said)


def test_numbers_of_a_result_that_depend_on_a_size(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return self.layer(x), x.shape[0]

    model = graphopt.optimize(Counting())
    batches = [noise(rows, 4)[0] for rows in (6, 4, 5, 6)]
    assert [model(x)[1] for x in batches] == [6, 4, 5, 6]
    assert model.program.stage == "joint"  # and not in parts
    assert "since the result holds a number that depends on a size" in caplog.text
    assert not any(vars(x) for x in batches)  # a try with sizes open leaves no marks of torch's on them


def test_another_program_than_for_fixed_sizes_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import graphopt.runtime.calls.varying_sizes as varying_sizes

    monkeypatch.setattr(varying_sizes, "first_difference", lambda *_: "mul in place of add")
    batches = [noise(2, length, 4) for length in (12, 7, 9)]
    assert assert_trains_alike("step", Net(nn.Linear(4, 4)), mean_square, batches).captures == 3
    assert "with sizes that vary, torch traces mul in place of add" in caplog.text


@pytest.mark.sweep
def test_a_pass_that_moves_tensors_of_fixed_sizes(caplog: pytest.LogCaptureFixture) -> None:
    batches = [noise(length, 4) for length in (12, 7, 9)]
    found = assert_trains_alike("step", Net(nn.Linear(4, 4)), mean_square, batches, passes=[Offload(min_bytes=16)])
    assert found.captures == 3
    assert caplog.text.count("offload acts on tensors of fixed sizes only") == 1


@pytest.mark.sweep
def test_passes_that_round_do_so_as_for_fixed_sizes() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 2))
    batches = [noise(rows, 4) for rows in (6, 9, 4)]
    passes = [MixedPrecision(), ClipGradients(0.1), Recompute("**")]
    varying, fixed = (
        trained("step", model, mean_square, batches, passes, dynamic_shapes=shapes) for shapes in ("auto", None)
    )
    assert [varying.captures, fixed.captures] == [2, 3]
    assert all(map(torch.equal, varying.tensors, fixed.tensors))


@pytest.mark.sweep
def test_many_paths_are_told(caplog: pytest.LogCaptureFixture) -> None:
    class Staircase(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for bound in (10, 20, 30, 40, 50):
                if x.shape[1] < bound:
                    return self.short(x) * bound
            return self.long(x)

    batches = [noise(2, length, 4) for length in (5, 12, 22, 32, 42, 52)]
    assert_trains_alike("drop-in", Staircase(), mean_square, batches)
    assert "captures for sizes that change" in caplog.text
    assert "was traced for" in caplog.text


@pytest.mark.parametrize("value", ["automatic", True])
def test_other_words_are_refused(value: Any) -> None:
    with pytest.raises(graphopt.GraphoptError, match="dynamic_shapes"):
        graphopt.optimize(Net(nn.Linear(4, 4)), dynamic_shapes=value)
