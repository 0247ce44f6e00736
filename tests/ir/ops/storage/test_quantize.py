"""``quantize`` and ``dequantize``: values as a few bits an element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphopt.errors import GraphoptError
from graphopt.ir.ops.storage.quantize import dequantize, is_dense, quantize, quantized_bytes, rounding_seed
from tests.support.properties import examples

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def there_and_back(
    x: torch.Tensor, bits: int = 8, group: int = 64, *, seed: int = 0, key: int = 0, zeros: bool = False
) -> torch.Tensor:
    packed = quantize(x, torch.tensor(seed), key, bits, group, zeros)
    assert packed.numel() == quantized_bytes(x.numel(), bits, group)
    made: torch.Tensor = dequantize(packed, bits, group, zeros, list(x.shape), list(x.stride()), x.dtype)
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)
    return made


def steps_of(x: torch.Tensor, levels: int, group: int) -> torch.Tensor:
    """The step of each element's group, in the order of memory."""
    flat = x.as_strided((x.numel(),), (1,)).double()
    ranges = [part.max() - part.min() for part in flat.split(group)]
    return torch.cat([(r / levels).expand(len(p)) for r, p in zip(ranges, flat.split(group), strict=True)])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scale, offset = draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e4])), draw(st.sampled_from([0.0, 1.0, -50.0]))
    x = torch.randn(shape, generator=generator) * scale + offset
    return x.to(draw(st.sampled_from(DTYPES))).permute(order)


@given(x=tensors(), bits=st.sampled_from([4, 8]), group=st.sampled_from([8, 24, 256]), seed=st.integers(0, 2**31))
@examples(40)
def test_an_element_is_less_than_a_step_away(x: torch.Tensor, bits: int, group: int, seed: int) -> None:
    made = there_and_back(x, bits, group, seed=seed)
    error = (made.as_strided((x.numel(),), (1,)).double() - x.as_strided((x.numel(),), (1,)).double()).abs()
    last_bit = torch.finfo(x.dtype).eps * x.abs().max().double() if x.numel() else 0
    assert bool((error <= steps_of(x, 2**bits - 1, group) * (1 + 1e-5) + 2 * last_bit).all())


@given(x=tensors(), bits=st.sampled_from([4, 8]), seed=st.integers(0, 2**31))
@examples(20)
def test_zeros_of_what_is_not_negative_stay_and_others_stay_positive(x: torch.Tensor, bits: int, seed: int) -> None:
    x = torch.relu(x)
    made = there_and_back(x, bits, seed=seed, zeros=True)
    assert torch.equal(made == 0, x == 0)
    assert bool((made >= 0).all())


@pytest.mark.sweep(but=("8-True",))
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_has_no_bias(bits: int, zeros: bool) -> None:
    x = torch.rand(64, generator=torch.Generator().manual_seed(0))
    made = torch.stack([there_and_back(x, bits, seed=seed, zeros=zeros) for seed in range(4000)])
    step = float(x.max() - x.min()) / (2**bits - 1 - zeros)
    error = (made.double().mean(0) - x).abs() / step
    assert float(error.max()) < 1 / 512 + 4 * 0.5 / 4000**0.5
    assert float(error.mean()) < 1 / 100


def test_one_seed_and_key_round_the_same_and_others_do_not() -> None:
    x = torch.randn(1000)
    first = there_and_back(x, seed=5, key=1)
    assert torch.equal(first, there_and_back(x, seed=5, key=1))
    assert not torch.equal(first, there_and_back(x, seed=6, key=1))
    assert not torch.equal(first, there_and_back(x, seed=5, key=2))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_made_finite(bad: float, zeros: bool) -> None:
    x = torch.rand(64) + 1
    x[3], x[40] = bad, 0.0
    made = there_and_back(x, group=32, zeros=zeros)
    assert not bool(torch.isfinite(made[:32]).any())
    assert bool(torch.isfinite(made[32:]).all())


def test_constant_groups_and_empty_tensors_are_exact() -> None:
    for x in (
        torch.full((100,), 3.7),
        torch.zeros(5, 5),
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.full((3,), 1e-45),
    ):
        for zeros in (False, True):
            assert torch.equal(there_and_back(x, zeros=zeros), x)


def test_more_elements_than_one_piece_and_a_group_that_is_not_full() -> None:
    x = torch.randn((1 << 17) * 2 + 77)
    error = (there_and_back(x, group=256) - x).abs()
    assert bool((error <= steps_of(x, 255, 256) * (1 + 1e-5) + 1e-6).all())


def test_the_seed_is_drawn_from_the_default_generator() -> None:
    torch.manual_seed(3)
    one, other = rounding_seed(), rounding_seed()
    torch.manual_seed(3)
    assert torch.equal(one, torch.randint(1 << 31, (), dtype=torch.int64))
    assert not torch.equal(one, other)


def test_dense_is_without_gaps_and_overlaps() -> None:
    x = torch.randn(4, 6, 5)
    assert all(is_dense(y) for y in (x, x.permute(2, 0, 1), x[:, :1, :1].contiguous(), torch.empty(0, 3)))
    assert not any(is_dense(y) for y in (x[:, ::2], x[:, :3], x[:1].expand(4, 6, 5)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, s: quantize(x, s, 0, 5, 64, False), "bits is 4 or 8, got 5"),
        (lambda x, s: quantize(x, s, 0, 8, 12, False), "group is a multiple of 8, got 12"),
        (lambda x, s: quantize(x.double(), s, 0, 8, 64, False), "of 16 or 32 bits, got torch.float64"),
        (lambda x, s: quantize(x[:, ::2], s, 0, 8, 64, False), "x is dense"),
        (lambda x, s: dequantize(s, 8, 64, False, [4, 4], [4, 1], x.dtype), "packed has 72 bytes"),
    ],
)
def test_arguments_are_checked(call: Any, message: str) -> None:
    with pytest.raises(GraphoptError, match="graphopt::") as caught:
        call(torch.randn(4, 4), torch.tensor(0))
    assert message in str(caught.value)
