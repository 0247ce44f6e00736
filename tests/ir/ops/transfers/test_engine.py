"""The transfer ops: what comes back is what was moved, and what is held is given up with its handle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphopt
from graphopt import GraphoptError
from graphopt.ir.ops import transfers
from graphopt.ir.ops.storage import transfer
from tests.support.properties import examples
from tests.support.transferring import (
    TIERS,
    back,
    elements,
    engine_in,
    gated,
    held,
    round_trip,
    same_bytes,
    started,
    stored_bytes,
)  # fmt: skip

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_engine(tmp_path: Path) -> Iterator[None]:
    with engine_in(tmp_path):
        yield


# --- round trips -----------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any dtype that see a part of their storage in any way: steps, repeated elements, offsets, no rows."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.lists(st.integers(0, 5), max_size=4))
    stride = [draw(st.integers(0, 7)) for _ in size]
    offset, behind = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = offset + reach + behind
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        data &= 1
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), offset, size, stride)


@examples(50)
@given(x=tensors(), tier=st.sampled_from(TIERS))
def test_what_comes_back_is_what_was_moved(x: torch.Tensor, tier: str) -> None:
    assert same_bytes(round_trip(x, tier), x)


@examples(25)
@given(given_tensors=st.lists(st.tuples(tensors(), st.sampled_from(TIERS)), max_size=12), order=st.randoms())
def test_many_held_at_once_come_back_in_any_order(given_tensors: list[tuple[torch.Tensor, str]], order: Any) -> None:
    handles = [(transfer.offload(x, tier), x) for x, tier in given_tensors]
    order.shuffle(handles)
    for handle, x in handles:
        transfer.offload_wait(handle, x)
    order.shuffle(handles)
    fetched = [(started(handle, x), handle, x) for handle, x in handles]
    order.shuffle(fetched)
    for y, handle, x in fetched:
        assert same_bytes(transfer.prefetch_wait(y, handle), x)


@pytest.mark.parametrize("tier", TIERS)
def test_a_large_tensor_comes_back(tier: str) -> None:
    x = torch.randn(5_000_001)  # more than one piece of a file
    assert torch.equal(round_trip(x, tier), x)


def test_what_comes_back_is_no_view_and_shares_nothing() -> None:
    x = torch.randn(4, 5).t()
    handle = held(x)
    one, other = back(handle, x), back(handle, x)
    assert one._base is None
    one.zero_()
    assert torch.equal(other, x)
    assert not torch.equal(one, x)


def test_the_beginning_of_a_larger_storage_can_be_fetched() -> None:
    x = torch.randn(100)
    handle = held(x)
    y = transfer.prefetch_wait(started(handle, x, size=[3], storage_size=10, storage_offset=7), handle)
    assert torch.equal(y, x[7:10])
    assert elements(y) == 10


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("stride", [(3, 1, 3, 3), (3, 1, 1, 1)])
def test_a_tensor_comes_back_with_the_strides_that_it_went_with(stride: tuple[int, ...], tier: str) -> None:
    """Kernels take other ways for other strides, also of dimensions of one element, and then round otherwise."""
    x = torch.randn(2, 3, 1, 1).as_strided((2, 3, 1, 1), (3, 1, 1, 1))
    handle = transfer.offload_wait(transfer.offload(x, tier), x)
    y = transfer.prefetch_wait(started(handle, x, stride=list(stride)), handle)
    assert y.stride() == x.stride()
    assert torch.equal(y, x)


def test_values_are_right_where_a_kernel_has_laid_out_a_tensor_otherwise_than_foreseen() -> None:
    x = torch.randn(4, 5).t()
    handle = transfer.offload_wait(transfer.offload(x, "host"), x)
    y = transfer.prefetch_wait(started(handle, x, stride=[4, 1]), handle)
    assert torch.equal(y, x)


def test_bytes_can_be_fetched_as_another_dtype() -> None:
    x = torch.randn(6)
    handle = held(x)
    y = transfer.prefetch_wait(started(handle, x, dtype=torch.int32), handle)
    assert torch.equal(y, x.view(torch.int32))


# --- what the allocator sees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_only_prefetch_allocates_and_exactly_its_storage(tier: str) -> None:
    x = torch.randn(301, 50).t()[3:]
    kept = []

    def away() -> torch.Tensor:
        return held(x, tier)

    measured = graphopt.measure_peak(away)
    assert (measured.allocated_peak_bytes, measured.retained_bytes) == (0, 0)
    measured = graphopt.measure_peak(lambda: kept.append(started(measured.result, x)))
    nbytes = x.untyped_storage().nbytes()
    assert (measured.allocated_peak_bytes, measured.retained_bytes) == (nbytes, nbytes)


def test_a_handle_is_an_integer_outside_of_the_allocator() -> None:
    x = torch.ones(3)
    handles = [held(x) for _ in range(3)]
    assert all((h.dtype, h.shape, h.device.type) == (torch.int64, (1,), "cpu") for h in handles)
    assert len({int(h) for h in handles}) == 3
    assert int(handles[0]) > 0


def test_a_wait_returns_its_argument() -> None:
    x = torch.ones(3)
    handle = transfer.offload(x, "host")
    assert transfer.offload_wait(handle, x) is handle
    y = started(handle, x)
    assert transfer.prefetch_wait(y, handle) is y


# --- order and overlap -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_copies_run_beside_the_program_in_the_order_in_which_they_start(tier: str) -> None:
    a, b = torch.randn(1000), torch.randn(2000)
    with gated() as gate:
        first, second = transfer.offload(a, tier), transfer.offload(b, tier)
        c, d = started(second, b), started(first, a)  # before anything was waited for
        assert transfers.statistics().offloads == transfers.statistics().prefetches == 2
        gate.open()
        assert torch.equal(transfer.prefetch_wait(d, first), a)
        assert torch.equal(transfer.prefetch_wait(c, second), b)
    assert gate.log == [("write", 4000), ("write", 8000), ("read", 8000), ("read", 4000)]


@pytest.mark.parametrize("tier", TIERS)
def test_a_wait_blocks_until_the_copy_is_done(tier: str) -> None:
    x, done = torch.randn(1000), []
    with gated() as gate:
        handle = transfer.offload(x, tier)

        def wait() -> None:
            transfer.offload_wait(handle, x)
            done.append(True)

        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.05)
        assert not done
        gate.open()
        waiter.join()
    assert done == [True]


@pytest.mark.parametrize("tier", TIERS)
def test_memory_that_is_being_copied_lives_until_the_copy_is_done(tier: str) -> None:
    """After an exception between a copy's start and its wait, nobody else holds the tensors."""
    x = torch.arange(100_000.0)
    expected = x.clone()
    with gated() as gate:
        handle = transfer.offload(x, tier)
        del x
        other = torch.full((100_000,), -1.0)  # where x was, if x were gone
        abandoned = started(handle, expected)
        del abandoned
        more = torch.full((100_000,), -2.0)
        gate.open()
        assert torch.equal(back(handle, expected), expected)
    assert torch.equal(other, torch.full((100_000,), -1.0))
    assert torch.equal(more, torch.full((100_000,), -2.0))


# --- handles ---------------------------------------------------------------------------------------------------------


class Square(torch.autograd.Function):
    """x², whose backward fetches x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tier: str) -> torch.Tensor:
        ctx.save_for_backward(held(x, tier))
        ctx.shape = x.shape
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (handle,) = ctx.saved_tensors
        x = torch.empty(ctx.shape)
        return 2 * back(handle, x) * grad, None


def squared(x: torch.Tensor, tier: str) -> torch.Tensor:
    """The sum of the fourth powers of ``x``."""
    return Square.apply(Square.apply(x, tier), tier).sum()


@pytest.mark.parametrize("tier", TIERS)
def test_what_autograd_saves_is_held_as_long_as_its_graph(tier: str) -> None:
    x = torch.randn(10, requires_grad=True)
    loss = squared(x, tier)
    assert stored_bytes() == 80
    loss.backward(retain_graph=True)
    first = x.grad
    assert stored_bytes() == 80
    x.grad = None
    loss.backward()
    assert torch.equal(first, x.grad)
    assert torch.allclose(x.grad, 4 * x.detach() ** 3)
    assert transfers.statistics(tier).prefetches == 4
    assert stored_bytes() == 0


def test_two_forwards_before_the_first_backward() -> None:
    x, y = torch.randn(10, requires_grad=True), torch.randn(10, requires_grad=True)
    one, other = squared(x, "host"), squared(y, "host")
    one.backward()
    other.backward()
    assert torch.allclose(x.grad, 4 * x.detach() ** 3)
    assert torch.allclose(y.grad, 4 * y.detach() ** 3)


def test_a_graph_that_is_dropped_gives_up_what_it_held() -> None:
    x = torch.randn(10, requires_grad=True)
    loss = squared(x, "host")
    assert stored_bytes() == 80
    del loss
    assert stored_bytes() == 0


def test_an_exception_between_forward_and_backward_leaves_nothing() -> None:
    x = torch.randn(10, requires_grad=True)

    def step(fail: bool) -> None:
        loss = squared(x, "host")
        if fail:
            raise KeyError("the user's own")
        loss.backward()

    with pytest.raises(KeyError):
        step(True)
    assert stored_bytes() == 0
    step(False)
    assert torch.allclose(x.grad, 4 * x.detach() ** 3)


def test_a_view_of_a_handle_keeps_the_bytes() -> None:
    x = torch.randn(10)
    handle = held(x)
    view = handle.view(1)
    del handle
    assert stored_bytes() == 40
    assert torch.equal(back(view, x), x)


def test_bytes_are_given_up_after_the_copies_that_use_them() -> None:
    x = torch.randn(10)
    with gated() as gate:
        handle = transfer.offload(x, "host")
        del handle
        assert stored_bytes() == 40
        gate.open()
        round_trip(torch.ones(1))  # copies are done in order
    assert stored_bytes() == 0


def test_many_threads_at_once() -> None:
    wrong = []

    def work(number: int) -> None:
        for size in range(1, 40):
            x = torch.full((size * 50 + number,), float(number))
            y = round_trip(x, TIERS[(size + number) % 2])
            if not torch.equal(x, y):
                wrong.append((number, size))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    figures = transfers.statistics()
    assert figures.offloads == figures.prefetches == 8 * 39
    assert figures.offloaded_bytes == figures.prefetched_bytes
    assert figures.stored_bytes == 0


# --- errors ----------------------------------------------------------------------------------------------------------


def test_an_unknown_tier() -> None:
    with pytest.raises(GraphoptError, match=r"no tier 'hots'; the tiers are host, disk. did you mean 'host'"):
        transfer.offload(torch.ones(3), "hots")
    with pytest.raises(GraphoptError, match=r"no tier 'dics'.*did you mean 'disk'"):
        transfers.statistics("dics")


def test_a_tensor_that_is_no_handle() -> None:
    x = torch.ones(3)
    for wrong in (torch.ones(1), torch.ones(2, dtype=torch.int64), torch.tensor(3)):
        with pytest.raises(GraphoptError, match=r"is no handle.*int64 of shape \[1\] on the CPU"):
            transfer.offload_wait(wrong, x)


def test_a_handle_that_holds_nothing() -> None:
    x = torch.ones(3)
    copy = held(x).clone()  # the handle itself is gone
    for use in (lambda: transfer.offload_wait(copy, x), lambda: back(copy, x), lambda: transfer.prefetch_wait(x, copy)):
        with pytest.raises(GraphoptError, match=r"the handle \d+ holds nothing: .*copied from a handle that is gone"):
            use()


def test_a_wait_for_a_tensor_that_nothing_is_copied_to() -> None:
    x = torch.ones(3)
    handle = held(x)
    y = back(handle, x)
    for wrong in (x, y):
        with pytest.raises(GraphoptError, match=r"no copy to this tensor of shape \[3\] is under way"):
            transfer.prefetch_wait(wrong, handle)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"storage_size": 4}, "4 elements of torch.float32 are 16 bytes, and 12 are stored"),
        ({"dtype": torch.float64}, "3 elements of torch.float64 are 24 bytes, and 12 are stored"),
        ({"size": [4]}, r"size \[4\], stride \[1\] and offset 0 reach over 4 elements, and the storage is to have 3"),
        ({"storage_offset": 1}, "reach over 4 elements"),
        ({"stride": [1, 1]}, "1 sizes and 2 strides"),
    ],
)
def test_a_prefetch_that_does_not_fit(wrong: dict[str, Any], message: str) -> None:
    x = torch.ones(3)
    handle = held(x)
    with pytest.raises(GraphoptError, match=message):
        started(handle, x, **wrong)
    assert torch.equal(back(handle, x), x)


def test_devices_without_transfers() -> None:
    x = torch.ones(3)
    handle = held(x)
    with pytest.raises(GraphoptError, match="nothing can be moved to or from meta"):
        started(handle, x, device=torch.device("meta"))


@pytest.mark.parametrize("view", [lambda x: x.conj(), lambda x: x.conj().imag], ids=["conjugate", "negative"])
def test_views_whose_values_are_computed_when_read(view: Any) -> None:
    x = view(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(GraphoptError, match=r"conjugate or negative view.*offload the tensor that it is a view of"):
        transfer.offload(x, "host")


def test_closing_ends_the_thread() -> None:
    """One that a copy started; the next copy starts another one."""
    before = set(threading.enumerate())
    for _ in range(2):
        assert same_bytes(round_trip(torch.arange(5.0), "disk"), torch.arange(5.0))
        started = [thread for thread in threading.enumerate() if thread not in before]
        assert [thread.name for thread in started] == ["graphopt transfers"]
        transfers.engine().close()
        assert not started[0].is_alive()
