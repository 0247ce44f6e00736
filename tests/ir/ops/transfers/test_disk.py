"""The file of the disk tier: nothing of it is seen, it fills up, it fails; and what an engine leaves behind."""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphopt import GraphoptError
from graphopt.ir.ops import transfers
from graphopt.ir.ops.storage import transfer
from graphopt.ir.ops.transfers.worker import Worker
from tests.support.transferring import back, engine_in, engine_of, gated, held, round_trip, stored_bytes

MIB = 1024**2


@pytest.fixture(autouse=True)
def _own_engine(tmp_path: Path) -> Iterator[None]:
    with engine_in(tmp_path):
        yield


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
    assert stored_bytes() == 0
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


def test_work_that_fails_keeps_nothing_alive() -> None:
    class Memory:
        """What is copied."""

    def fail(memory: Memory) -> None:
        raise OSError(errno.EIO, f"cannot copy {type(memory).__name__}")

    memory, worker = Memory(), Worker()
    alive = weakref.ref(memory)
    job = worker.submit(partial(fail, memory), keep=memory)
    del memory
    for _ in range(2):
        with pytest.raises(GraphoptError, match="cannot copy Memory") as caught:
            job.wait()
        assert isinstance(caught.value.__cause__, OSError)
    assert alive() is None
    worker.close()


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
    with pytest.raises(GraphoptError, match="12 bytes of offloaded tensors are stored"):
        transfers.configure(disk_directory=tmp_path)
    assert torch.equal(back(handle, x), x)
