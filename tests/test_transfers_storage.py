"""Where held bytes are: ranges, host memory that is limited, a file on a disk that fills up."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt import GraphoptError
from graphopt.ops import transfer
from graphopt.runtime import transfers
from graphopt.runtime.transfers import Engine
from graphopt.runtime.transfers.freelist import ALIGNMENT, FreeList, aligned, slab_bytes
from graphopt.runtime.transfers.hostmemory import available_host_bytes
from graphopt.runtime.transfers.slab import HostSlab
from tests.transferring import back, gated, held, held_bytes, round_trip

MIB = 1024**2


@pytest.fixture(autouse=True)
def _own_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transfers._process, "engine", Engine(disk_directory=tmp_path))
    yield
    transfers.engine().close()


def engine_of(**settings: Any) -> Engine:
    """An engine of a test's own, in place of the process's."""
    transfers.engine().close()
    transfers._process.engine = Engine(**settings)
    return transfers._process.engine


# --- ranges ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=100, deadline=None)
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
    assert held_bytes() == 0


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


# --- disk ------------------------------------------------------------------------------------------------------------


def test_nothing_is_seen_in_the_directory(tmp_path: Path) -> None:
    x = torch.randn(1000)
    handle = held(x, "disk")
    assert transfers.statistics("disk").capacity_bytes >= 4000
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(back(handle, x), x)


def test_the_environment_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_of()
    monkeypatch.setenv("GRAPHOPT_DISK", str(tmp_path / "missing"))
    x = torch.randn(10)
    handle = transfer.offload(x, "disk")
    with pytest.raises(GraphoptError, match=r"no file can be made in .*missing \(No such file.*GRAPHOPT_DISK"):
        transfer.offload_wait(handle, x)
    (tmp_path / "missing").mkdir()
    assert torch.equal(round_trip(x, "disk"), x)


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return original(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    x = torch.randn(10)
    assert torch.equal(round_trip(x, "disk"), x)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = os.stat(tmp_path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    original = Path.read_text

    def lines(self: Path, *more: Any) -> str:
        if str(self) == "/proc/self/mountinfo":
            return f"22 1 0:5 / /x rw - ext4 a rw\n23 1 {number} / /tmp rw,nosuid - tmpfs tmpfs rw\n"
        return original(self, *more)

    monkeypatch.setattr(Path, "read_text", lines)
    with caplog.at_level(logging.WARNING, "graphopt"):
        round_trip(torch.ones(1), "disk")
    assert f"{tmp_path} is a tmpfs, which is kept in memory" in caplog.text


def full(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """Let every file system have so many free blocks of 512 bytes."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=blocks, f_frsize=512))


def test_a_full_disk_is_an_error_of_the_wait_and_the_next_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = torch.randn(100), torch.randn(20_000)
    with monkeypatch.context() as patch:
        full(patch, 128)
        handle = transfer.offload(large, "disk")
        with pytest.raises(
            GraphoptError, match=rf"needs 80000 bytes more in {tmp_path}, and 65536 are free: .*GRAPHOPT_DISK"
        ):
            transfer.offload_wait(handle, large)
        with pytest.raises(GraphoptError, match="needs 80000 bytes more"):
            back(handle, large)
        assert torch.equal(round_trip(small, "disk"), small)
        with gated() as gate:  # what is still to be written takes room already
            first, second = (transfer.offload(half.clone(), "disk") for half in large.chunk(2))
            gate.open()
            transfer.offload_wait(first, large)
            with pytest.raises(GraphoptError, match=r"needs \d+ bytes more"):
                transfer.offload_wait(second, large)
    assert torch.equal(round_trip(large, "disk"), large)


def test_a_disk_that_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    x = torch.randn(1000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        handle = transfer.offload(x, "disk")
        message = rf"in {tmp_path}, failed with 4000 bytes left .*No space left"
        with pytest.raises(GraphoptError, match=message):
            transfer.offload_wait(handle, x)
        with pytest.raises(GraphoptError, match=message):
            back(handle, x)
    del handle
    assert held_bytes() == 0
    assert torch.equal(round_trip(x, "disk"), x)


def test_a_file_that_may_not_grow() -> None:
    """The system refuses to write, though the disk has room."""
    x, limits = torch.randn(1000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(GraphoptError, match=r"failed with 1952 bytes left to write \(File too large"):
            held(x, "disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(round_trip(x, "disk"), x)


def test_a_disk_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    x = torch.randn(1000)
    handle = held(x, "disk")
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(GraphoptError, match=r"reading back from disk, in .*, failed: .*Input/output error"):
            back(handle, x)
        patch.setattr(os, "preadv", lambda *_: 0)
        with pytest.raises(GraphoptError, match="4000 of 4000 bytes are missing"):
            back(handle, x)
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(GraphoptError, match=r"offloading to disk, in .*, failed: .*Input/output error"):
            held(x, "disk")
    assert torch.equal(back(handle, x), x)


def test_calls_of_the_system_that_move_only_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:999], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:777]], offset))
    x = torch.randn(1000)
    assert torch.equal(round_trip(x, "disk"), x)


def test_a_limit_for_the_file(tmp_path: Path) -> None:
    transfers.configure(disk_directory=tmp_path, disk_limit=4096)
    x = torch.randn(1000)
    handle = held(x, "disk")
    with pytest.raises(GraphoptError, match=r"a file of 8064 bytes in .*, and disk_limit allows 4096: raise the limit"):
        held(x, "disk")
    del handle
    assert torch.equal(round_trip(x, "disk"), x)


def test_freed_ranges_of_the_file_are_used_again_and_cut_off() -> None:
    for _ in range(20):
        round_trip(torch.randn(10_000), "disk")
    assert 40_000 <= transfers.statistics("disk").capacity_bytes < 80_000
    transfers.trim()
    assert transfers.statistics("disk").capacity_bytes == 0


# --- engines ---------------------------------------------------------------------------------------------------------


def resources() -> tuple[int, int]:
    """Threads that copy, and open files."""
    return sum("transfers" in t.name for t in threading.enumerate()), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("end", ["close", "garbage"])
def test_an_engine_leaves_no_thread_and_no_file(end: str) -> None:
    transfers.engine().close()
    before = resources()
    engine = engine_of()
    for tier in transfers.TIERS:
        round_trip(torch.ones(3), tier)
        round_trip(torch.ones(4), tier)
    assert resources() == (before[0] + 1, before[1] + 1)
    if end == "close":
        engine.close()
    transfers._process.engine = None
    del engine
    assert resources() == before


def test_an_engine_can_be_used_after_it_was_closed() -> None:
    x, engine = torch.randn(10), engine_of()
    handles = [held(x, tier) for tier in transfers.TIERS]
    engine.close()
    assert engine.statistics().capacity_bytes == 0
    for handle in handles:
        with pytest.raises(GraphoptError, match="the engine was closed meanwhile"):
            back(handle, x)
    assert all(torch.equal(round_trip(x, tier), x) for tier in transfers.TIERS)


def test_settings_are_those_of_the_next_engine(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    transfers.configure(disk_directory=tmp_path / "other")
    (tmp_path / "other").rmdir()
    x = torch.ones(3)
    with pytest.raises(GraphoptError, match=r"no file can be made in .*other"):
        held(x, "disk")
    transfers.configure()
    assert torch.equal(round_trip(x, "disk"), x)


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match="'/no/such' is not a directory that can be written to"):
        transfers.configure(disk_directory="/no/such")
    with pytest.raises(GraphoptError, match="-1 is negative"):
        transfers.configure(disk_limit=-1)
    x = torch.ones(3)
    handle = held(x)
    with pytest.raises(GraphoptError, match="12 bytes of offloaded tensors are held"):
        transfers.configure(disk_directory=tmp_path)
    assert torch.equal(back(handle, x), x)
