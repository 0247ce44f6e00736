"""Selecting the entries of largest magnitude is exact for any numbers, sizes and ties."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import graphopt
from graphopt import GraphoptError
from graphopt.ir.ops.communication import selection
from graphopt.ir.ops.communication.selection import select
from tests.support.properties import examples

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def expected_selection(v: torch.Tensor, k: int) -> torch.Tensor:
    """The indices by their definition: sorted by magnitude, equal ones by index."""
    order = sorted(range(v.numel()), key=lambda i: (-abs(v[i].item()), i))
    return torch.tensor(sorted(order[:k]), dtype=torch.int32)


def assert_selected(v: torch.Tensor, k: int, how: Callable[..., Any] = select) -> None:
    before = v.clone()
    indices, values = how(v, k)
    assert torch.equal(indices, expected_selection(v, k).to(v.device))
    assert indices.dtype is torch.int32
    assert same_bits(values, v[indices.long()])
    assert same_bits(v, before)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028234663852886e38, -(1 + 2**-16), 1 + 2**-23]
NUMBERS = st.one_of(st.floats(width=32, allow_nan=False, allow_subnormal=True), st.sampled_from(SPECIAL))
WAYS = ["as by default", "small pieces"]


def in_small_pieces(patch: pytest.MonkeyPatch) -> None:
    """Let small tensors go the ways of large ones: several pieces, samples, blocks of blocks, counting."""
    patch.setattr(selection, "_PIECE", 16)
    patch.setattr(selection, "_BLOCKS_FROM", 1)
    patch.setattr(selection, "_COUNTING_FROM", 6)
    patch.setattr(selection, "_SMALLEST_BLOCK", 4)
    patch.setattr(selection, "_LARGEST_BLOCK", 8)
    patch.setattr(selection, "_SAMPLED", 1)
    patch.setattr(selection, "_LARGEST_STRIDE", 3)
    patch.setattr(selection, "_DEVIATIONS", 1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """A tensor of any numbers, often with many ties, and how many of its entries are wanted."""
    few = draw(st.lists(NUMBERS, min_size=1, max_size=6))
    size = draw(st.integers(1, 100))
    numbers = st.sampled_from(few) if draw(st.booleans()) else NUMBERS
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    v = torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size)), dtype=dtype)
    return v, draw(st.one_of(st.integers(0, size), st.sampled_from([1, size])))


@examples(40)
@given(cases())
@example((torch.zeros(50), 3))
@example((torch.full((50,), -2.0), 49))
@example((torch.tensor([1e-45, 2.8e-45, -1e-45, 0.0]), 2))
@example((torch.tensor([0.0] * 20 + [-1e-300, 1e-300] * 20, dtype=torch.float64), 21))
def test_selecting_is_exact_for_any_numbers(case: tuple[torch.Tensor, int]) -> None:
    assert_selected(*case)
    assert_selected(*case, how=selection._select_unread)  # what CUDA runs
    with pytest.MonkeyPatch.context() as patch:
        in_small_pieces(patch)
        assert_selected(*case)


def expected_large_selection(v: torch.Tensor, k: int) -> torch.Tensor:
    return torch.sort(v.abs(), descending=True, stable=True).indices[:k].sort().values.int()


LARGE: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": torch.randn,
    "of few values": lambda size: torch.randint(-3, 4, (size,)).float(),
    "constant": lambda size: torch.full((size,), 0.1),
    "mostly zeros": lambda size: torch.randn(size) * (torch.rand(size) < 1e-4),
    "ascending": lambda size: torch.arange(float(size)),
    "descending": lambda size: -torch.arange(float(size)).flip(0),
    "of equal upper bits": lambda size: 1 + torch.rand(size) * 2**-8,
    "denormal": lambda size: torch.rand(size) * 1e-39,
    "periodic": lambda size: torch.sin(torch.arange(size) * (2 * math.pi / 64)),
    "double": lambda size: torch.randn(size, dtype=torch.float64),
    "half": lambda size: torch.randn(size).half(),
    "with gaps": lambda size: torch.randn(size, 2)[:, 0],
}


@pytest.mark.sweep(
    cases=(
        "normal-cpu",
        "of few values-cpu",
        "of equal upper bits-cpu",
        "denormal-cpu",
        "double-cpu",
        "half-cpu",
        "with gaps-cpu",
    )
)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(LARGE))
def test_selecting_from_large_tensors(name: str, device: str) -> None:
    v = LARGE[name](300_007).to(device)
    for k in (1, 300, 5_000, 75_000, v.numel()):
        indices, values = select(v, k)
        assert torch.equal(indices, expected_large_selection(v, k)), k
        assert same_bits(values, v[indices.long()])
        assert values.dtype is v.dtype


@pytest.mark.sweep(cases=("small pieces",))
@pytest.mark.parametrize("way", WAYS)
def test_selecting_at_the_borders_of_pieces_and_blocks(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "small pieces":
        in_small_pieces(monkeypatch)
    for size in range(1, 70):
        v = torch.randn(size)
        for k in {1, min(2, size), size // 2, size - 1, size}:
            assert_selected(v, k)


@pytest.mark.sweep(cases=("normal-0", "normal-4", "normal-40"))
@pytest.mark.parametrize("deviations", [-4, 0, 4, 40])
@pytest.mark.parametrize("name", ["normal", "mostly zeros", "ascending", "periodic"])
def test_a_sample_that_tells_a_wrong_bound_changes_nothing(
    name: str, deviations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds that too few or too many maxima reach."""
    monkeypatch.setattr(selection, "_DEVIATIONS", deviations)
    v = LARGE[name](200_003)
    for k in (90, 400, 1_000, 3_000):
        assert torch.equal(select(v, k)[0], expected_large_selection(v, k)), k


def test_a_bound_is_used_where_up_to_twice_as_many_and_64_reach_it() -> None:
    """Where more do, their copies would take more memory than selecting without a bound."""
    bits, blocks, k = torch.arange(256, dtype=torch.int32), torch.arange(32), 40
    for reached, used in ((k, True), (2 * k + 64, True), (2 * k + 65, False)):
        found = selection._indices_from(bits, k, 8, blocks, 256 - reached)
        assert (found is not None) == used, reached
        assert found is None or sorted(found.tolist()) == list(range(256 - k, 256))


@pytest.mark.parametrize("size", [40_000, 590_000])
@pytest.mark.parametrize("name", ["normal", "mostly zeros", "ascending", "periodic"])
def test_no_numbers_take_more_memory_than_zeros(name: str, size: int) -> None:
    """On which the memory of a program is predicted."""
    numbers, zeros = LARGE[name](size), torch.zeros(size)
    for k in (size // 1000, size // 250, size // 64):
        taken, predicted = (graphopt.measure_peak(lambda v=v, k=k: select(v, k)) for v in (numbers, zeros))
        assert taken.allocated_peak_bytes <= predicted.allocated_peak_bytes


def test_values_are_those_at_the_indices_and_ties_go_to_the_lowest_index() -> None:
    indices, values = select(torch.tensor([0.5, -3.0, 0.0, 3.0, -3.0, 3.0, 1.0]), 3)
    assert indices.tolist() == [1, 3, 4]
    assert values.tolist() == [-3.0, 3.0, -3.0]


def test_too_few_that_are_not_zero_are_filled_up_with_zeros() -> None:
    v = torch.zeros(1000)
    v[700] = -1.0
    indices, values = select(v, 4)
    assert indices.tolist() == [0, 1, 2, 700]
    assert values.tolist() == [0.0, 0.0, 0.0, -1.0]


def test_the_number_of_threads_does_not_matter() -> None:
    v = torch.randint(-50, 50, (1_200_000,)).float()
    for k in (600, 60_000):
        single = select(v, k)
        torch.set_num_threads(3)
        several = select(v, k)
        torch.set_num_threads(1)
        assert torch.equal(single[0], several[0])


def test_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    for k in (100, 100_000):
        select(torch.arange(200_000.0), k)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("v", "k", "message"),
    [
        (torch.zeros(3), 4, "k must lie between 0 and 3, the elements, not be 4"),
        (torch.zeros(3), -1, "not be -1"),
        (torch.zeros(3, 3), 1, r"needs a flat .* tensor, not torch\.float32 of shape \[3, 3\]"),
        (torch.zeros(3, dtype=torch.int64), 1, r"floating-point tensor, not torch\.int64"),
        (torch.empty(2**31, device="meta"), 1, r"2147483648 elements are too many for int32 indices"),
    ],
    ids=["too many", "negative", "not flat", "integers", "too large"],
)
def test_wrong_selections_say_why(v: torch.Tensor, k: int, message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        select(v, k)
