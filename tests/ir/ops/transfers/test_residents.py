"""Tensors that reside on a disk or on the host."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphopt import GraphoptError
from graphopt.ir.ops.storage import swap
from graphopt.ir.ops.transfers import Engine, PagedFile, Residents, Tier
from tests.support.properties import examples

CPU = torch.device("cpu")
TIERS: tuple[Tier, ...] = ("host", "disk")


@pytest.fixture
def file(tmp_path: Path) -> PagedFile:
    """A file that goes with the process."""
    return PagedFile(tmp_path)


@pytest.fixture
def residents(file: PagedFile) -> Residents:
    return Residents(Engine(), file)


def written(residents: Residents, at: torch.Tensor, values: torch.Tensor) -> None:
    residents.put_back(at, values)
    residents.wait_put_back(at)


def fetched(residents: Residents, at: torch.Tensor) -> torch.Tensor:
    found = residents.fetch(at, CPU)
    residents.wait_fetched(found, at)
    return found


@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    tier=st.sampled_from(TIERS),
    turned=st.booleans(),
)
@examples(30)
def test_a_tensor_comes_back_as_it_was_written(shape: list[int], dtype: torch.dtype, tier: Tier, turned: bool) -> None:
    here = Residents(Engine(), PagedFile())
    tensor = (torch.arange(int(torch.tensor(shape).prod())).reshape(shape) % 7).to(dtype)
    tensor = tensor.mT.contiguous().mT if turned and tensor.dim() > 1 else tensor
    at = here.settle(tensor, tier)
    assert here.tier_of(at) == tier
    assert torch.equal(at, tensor)
    assert at.stride() == tensor.stride()
    first = fetched(here, at)
    assert torch.equal(first, tensor)
    assert first.stride() == tensor.stride()
    assert first.data_ptr() != at.data_ptr()
    written(here, at, torch.flip(first, list(range(first.dim()))).contiguous())
    assert torch.equal(at, torch.flip(tensor, list(range(tensor.dim()))))
    assert torch.equal(fetched(here, at), at)


def test_a_tensor_in_memory_is_copied_at_once(residents: Residents) -> None:
    at = torch.ones(3)
    assert residents.tier_of(at) == ""
    found = fetched(residents, at)
    written(residents, at, found * 5)
    assert at.tolist() == [5, 5, 5]


def test_what_is_written_counts_when_it_is_said(residents: Residents, tmp_path: Path) -> None:
    kept = PagedFile(tmp_path, "kept.bin")
    at = residents.settle(torch.ones(3), "disk", kept)
    same_memory = at.view(3)
    written(residents, at, torch.full((3,), 2.0))
    assert at.tolist() == [1, 1, 1]
    assert fetched(residents, at).tolist() == [2, 2, 2]
    residents.commit([at])
    assert at.tolist() == [2, 2, 2]
    assert same_memory.tolist() == [1, 1, 1]
    written(residents, at, torch.full((3,), 3.0))
    residents.roll_back([at])
    assert fetched(residents, at).tolist() == [2, 2, 2]
    assert at.tolist() == [2, 2, 2]


def test_a_new_tensor_is_known_where_another_one_was(residents: Residents, tmp_path: Path) -> None:
    kept = PagedFile(tmp_path, "kept.bin")
    seen: set[int] = set()
    again = 0
    for number in range(20):
        at = residents.settle(torch.full((1024,), float(number)), "disk", kept)
        again += at.data_ptr() in seen
        seen.add(at.data_ptr())
        assert residents.tier_of(at, kept) == "disk"
        written(residents, at, torch.zeros(1024))
        assert at[0] == number  # what was written does not count yet
        del at
    assert again  # the system gives the same addresses again
    assert residents.count <= 1


def test_what_is_kept_stays_when_nothing_refers_to_it(residents: Residents, tmp_path: Path) -> None:
    kept = PagedFile(tmp_path, "kept.bin")
    at = residents.settle(torch.full((1024,), 4.0), "disk", kept)
    space = residents.space_of(at)
    assert space is not None
    kept.keep({(space.offset, space.nbytes)})
    del at
    gc.collect()
    others = [residents.settle(torch.zeros(1024), "disk", kept) for _ in range(4)]
    assert space.offset not in [found.offset for other in others if (found := residents.space_of(other))]
    raw = torch.frombuffer(bytearray((tmp_path / "kept.bin").read_bytes()[space.offset :][:4096]), dtype=torch.float32)
    assert raw.tolist() == [4.0] * 1024
    kept.keep(set())
    used = kept.used_bytes
    del others
    gc.collect()
    assert kept.used_bytes < used


def test_space_is_used_again(residents: Residents, file: PagedFile) -> None:
    for _ in range(50):
        residents.settle(torch.zeros(100_000), "disk")
        gc.collect()
    assert file.used_bytes < 10 * 400_000


def test_a_view_keeps_the_memory_of_its_tensor(residents: Residents, file: PagedFile) -> None:
    view = residents.settle(torch.arange(8.0), "disk")[2:4]
    gc.collect()
    for _ in range(5):
        residents.settle(torch.zeros(8), "disk")
    assert view.tolist() == [2, 3]


def test_a_file_that_has_no_room(tmp_path: Path) -> None:
    here = Residents(Engine(), PagedFile(tmp_path, limit=8192))
    at = here.settle(torch.ones(1024), "disk")
    with pytest.raises(GraphoptError, match="disk_limit allows 8192"):
        here.settle(torch.ones(4096), "disk")
    assert at.sum() == 1024


def test_values_of_another_shape_are_refused(residents: Residents) -> None:
    at = residents.settle(torch.ones(3), "disk")
    with pytest.raises(GraphoptError, match="swap_out"):
        residents.put_back(at, torch.ones(4))
    assert at.tolist() == [1, 1, 1]


def test_the_ops_work_on_tensors_wherever_they_are() -> None:
    at = torch.arange(4.0)
    there = swap.swap_in_wait(swap.swap_in(at, "disk", CPU), at)
    assert there.data_ptr() != at.data_ptr()
    there.add_(1)
    swap.swap_out(at, there, "disk")
    swap.swap_out_wait(at, there)
    assert at.tolist() == [1, 2, 3, 4]
    moved = swap.move_out_wait(swap.move_out(at, "disk"), at)
    assert torch.equal(moved, at)
    with pytest.raises(GraphoptError, match=r"no tier 'disc'; .* did you mean 'disk'"):
        swap.move_out(at, "disc")
