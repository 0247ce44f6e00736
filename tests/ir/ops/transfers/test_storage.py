"""Where held bytes are: ranges, host memory that is limited, a file on a disk that fills up."""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphopt import GraphoptError
from graphopt.ir.ops import transfers
from graphopt.ir.ops.storage import transfer
from graphopt.ir.ops.transfers.freelist import ALIGNMENT, FreeList, aligned, slab_bytes
from graphopt.ir.ops.transfers.hostmemory import available_host_bytes
from graphopt.ir.ops.transfers.slab import HostSlab
from tests.support.properties import examples
from tests.support.transferring import back, engine_in, engine_of, held, round_trip, stored_bytes

MIB = 1024**2


@pytest.fixture(autouse=True)
def _own_engine(tmp_path: Path) -> Iterator[None]:
    with engine_in(tmp_path):
        yield


# --- ranges ----------------------------------------------------------------------------------------------------------


@examples(80)
@given(
    capacity=st.integers(1, 40).map(lambda n: n * ALIGNMENT),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(1, 600)), max_size=60),
)
def test_ranges_are_aligned_and_never_overlap_and_merge(capacity: int, steps: list[tuple[bool, int, int]]) -> None:
    area, used = FreeList(capacity), list[tuple[int, int]]()
    for release, which, nbytes in steps:
        if release and used:
            area.free(*used.pop(which % len(used)))
            continue
        offset = area.allocate(nbytes)
        taken = sorted((start, start + aligned(size)) for start, size in used)
        gaps = zip([0, *(end for _, end in taken)], [*(start for start, _ in taken), capacity], strict=True)
        fitting = [start for start, end in gaps if end - start >= aligned(nbytes)]
        assert offset == (fitting[0] if fitting else None)  # the first that fits, and every gap is one range
        if offset is not None:
            used.append((offset, nbytes))
        assert area.used_bytes == sum(aligned(size) for _, size in used)
        assert area.extent == max((start + aligned(size) for start, size in used), default=0)
    for block in used:
        area.free(*block)
    assert area.used_bytes == area.extent == 0
    assert area.allocate(capacity) == 0


def test_ranges_that_are_not_in_use_cannot_be_freed() -> None:
    area = FreeList(256)
    area.allocate(64)
    area.allocate(64)
    area.free(0, 64)
    for wrong in ((0, 64), (64, 128), (192, 64), (192, 128), (64, 0)):
        with pytest.raises(ValueError, match="not in use"):
            area.free(*wrong)
    with pytest.raises(ValueError, match="0 bytes cannot be allocated"):
        area.allocate(0)


@examples(50)
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 20)), max_size=25))
def test_a_slab_of_the_bytes_that_are_asked_for_is_enough(raw: list[tuple[int, int, int]]) -> None:
    blocks = [(nbytes, min(a, b), max(a, b)) for nbytes, a, b in raw]
    size = slab_bytes(blocks)
    alive = [sum(aligned(n) for n, start, end in blocks if start <= at <= end) for at in range(21)]
    assert size >= max(alive)
    assert size <= sum(aligned(n) for n, _, _ in blocks)
    area, places = FreeList(size), dict[int, int]()
    for at in range(21):
        for index, (nbytes, start, _) in enumerate(blocks):
            if start == at and nbytes:
                offset = area.allocate(nbytes)
                assert offset is not None
                places[index] = offset
        for index, (nbytes, _, end) in enumerate(blocks):
            if end == at and nbytes:
                area.free(places[index], nbytes)


def test_a_stack_of_blocks_needs_no_more_than_their_sum() -> None:
    assert slab_bytes((100, step, 20 - step) for step in range(10)) == 10 * 128
    assert slab_bytes([]) == 0


# --- host memory -----------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, text: object) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of a machine on which 1000 kB are available, and of a process in no group."""
    root = tmp_path / "root"
    write(root, "proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:  1000 kB")
    write(root, "proc/self/cgroup", "0::/")
    return root


def group(root: Path, path: str, limit: object, usage: int, cache: int = 0) -> None:
    write(root, f"sys/fs/cgroup{path}/memory.max", limit)
    write(root, f"sys/fs/cgroup{path}/memory.current", usage)
    write(root, f"sys/fs/cgroup{path}/memory.stat", f"anon 5\ninactive_file {cache}\nactive_file 3")


def test_what_is_available_is_what_the_machine_has(machine: Path) -> None:
    assert available_host_bytes(machine) == 1_024_000
    group(machine, "", "max", 500)
    assert available_host_bytes(machine) == 1_024_000


def test_a_group_and_those_around_it_limit_what_is_available(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/jobs/one")
    group(machine, "/jobs/one", "max", 10)
    group(machine, "/jobs", 5000, 4000, cache=300)
    assert available_host_bytes(machine) == 1300
    group(machine, "/jobs/one", 900, 1000)
    assert available_host_bytes(machine) == 0


def test_in_a_container_only_the_mount_is_there(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/host/side/path")
    group(machine, "", 7000, 1000)
    assert available_host_bytes(machine) == 6000


def test_groups_of_the_first_version(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "9:cpuset:/\n4:memory,hugetlb:/jobs\n0::/")
    folder = "sys/fs/cgroup/memory/jobs"
    write(machine, f"{folder}/memory.limit_in_bytes", 9000)
    write(machine, f"{folder}/memory.usage_in_bytes", 2000)
    write(machine, f"{folder}/memory.stat", "inactive_file 1\ntotal_inactive_file 500")
    write(machine, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    write(machine, "sys/fs/cgroup/memory/memory.usage_in_bytes", 2000)
    assert available_host_bytes(machine) == 7500


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) is None
    assert available_host_bytes() is None or available_host_bytes() > 0


def test_reserving_takes_exactly_what_is_asked_for_and_steps_take_no_more() -> None:
    sizes = [1000, 64, 7, 4096]
    transfers.reserve(slab_bytes((size * 4, 0, 1) for size in sizes))
    total = sum(aligned(size * 4) for size in sizes)
    assert transfers.statistics("host").capacity_bytes == total
    tensors = [torch.randn(size) for size in sizes]
    for _ in range(3):
        handles = [held(x) for x in tensors]
        assert all(torch.equal(back(handle, x), x) for handle, x in zip(handles, tensors, strict=True))
        del handles
    assert transfers.statistics("host").capacity_bytes == total
    transfers.reserve(total - 1)  # is there already
    assert transfers.statistics("host").capacity_bytes == total
    transfers.reserve(total + 1)  # takes the place of what is there
    assert transfers.statistics("host").capacity_bytes == total + ALIGNMENT
    transfers.trim()
    assert transfers.statistics("host").capacity_bytes == 0


def test_what_is_held_stays_where_it_is_when_more_is_reserved() -> None:
    x = torch.randn(1000)
    handle = held(x)
    before = transfers.statistics().capacity_bytes
    transfers.reserve(before + 640)
    transfers.trim()  # cannot take what is in use
    assert torch.equal(back(handle, x), x)
    assert transfers.statistics().capacity_bytes == before


def test_reserving_more_than_there_is_fails_at_once() -> None:
    with pytest.raises(
        GraphoptError, match="needs 1024 bytes × 4 ranks = 4096 bytes, and 4095 are available: offload less"
    ):
        transfers.reserve(1000, ranks=4, available=4095)
    transfers.reserve(1000, ranks=4, available=4096)
    engine = engine_of(available=lambda: 999)
    with pytest.raises(GraphoptError, match="needs 1024 bytes × 1 rank = 1024 bytes, and 999 are available"):
        engine.reserve(1000)
    with pytest.raises(GraphoptError, match="the system refuses them"):
        engine_of(available=lambda: None).reserve(2**60)


def test_reserving_nonsense() -> None:
    for wrong in ({"nbytes": -1}, {"nbytes": 1, "ranks": 0}):
        with pytest.raises(GraphoptError, match="bytes must be at least 0, and ranks at least 1"):
            transfers.reserve(**wrong)
    with pytest.raises(GraphoptError, match="there is no such device"):
        transfers.reserve(1, device="meta")


def test_host_memory_that_runs_out_is_an_error_of_the_wait_and_the_next_step_runs() -> None:
    there = [1000]
    engine_of(available=lambda: there[0])
    small, large = torch.randn(100), torch.randn(1000)
    assert torch.equal(round_trip(small), small)  # grows by what there is
    handle = transfer.offload(large, "host")
    for _ in range(2):
        with pytest.raises(GraphoptError, match=r"needs 4032 bytes more, and 1000 are available: .*offload to disk"):
            transfer.offload_wait(handle, large)
    with pytest.raises(GraphoptError, match="needs 4032 bytes more"):
        back(handle, large)
    there[0] = 5000
    assert torch.equal(round_trip(large), large)
    del handle
    assert stored_bytes() == 0


def test_a_mapping_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    x = torch.ones(3)
    with pytest.raises(GraphoptError, match=r"the system refuses them \(.*Cannot allocate memory\): .*ulimit -v"):
        held(x)


def test_blocks_are_aligned_and_grow_the_slab_when_it_is_full() -> None:
    slab = HostSlab(lambda: None)
    blocks = [slab.allocate(nbytes) for nbytes in (1, 65, 40 * MIB, 3)]
    assert all(block.address % ALIGNMENT == 0 for block in blocks)
    assert slab.capacity_bytes == 32 * MIB + 40 * MIB
    for block in blocks:
        block.free()
    assert slab.used_bytes == 0
    slab.trim()
    assert slab.capacity_bytes == 0


def test_memory_that_cannot_be_pinned_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    pinned, refused, released = [], [], []

    def pin(address: int, nbytes: int) -> bool:
        (refused if nbytes > MIB else pinned).append((address, nbytes))
        return nbytes <= MIB

    slab = HostSlab(lambda: None, pin, released.append)
    slab.reserve(MIB)
    with caplog.at_level(logging.WARNING, "graphopt"):
        block = slab.allocate(2 * MIB)
    assert "33554432 bytes of host memory could not be pinned" in caplog.text
    assert [nbytes for _, nbytes in pinned] == [MIB]
    block.free()
    slab.trim()
    assert released == [address for address, _ in pinned]
