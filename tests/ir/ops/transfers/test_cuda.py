"""Transfers of CUDA tensors: the order of what is put on streams, and, where there is a device, the values."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphopt import GraphoptError
from graphopt.ir.ops import transfers
from graphopt.ir.ops.transfers import Engine, cuda
from graphopt.ir.ops.transfers.disk import DiskFile
from graphopt.ir.ops.transfers.lanes import Settled
from graphopt.ir.ops.transfers.slab import HostSlab
from graphopt.ir.ops.transfers.worker import Worker
from tests.support.transferring import TIERS, back, engine_in, held, round_trip, started, stored_bytes

HERE = torch.device("cpu")


# --- on streams that only take notes ---------------------------------------------------------------------------------


class Device:
    """Stands for ``torch.cuda``: streams and events that write down what is asked of them, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done = False
        self.compute = Stream(self, "compute")
        self.current = self.compute
        self.sides = iter(("out", "in"))

    def Stream(self, _: torch.device) -> Stream:  # noqa: N802 - torch's name
        return Stream(self, next(self.sides))

    def current_stream(self, _: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def record_copies(self, patch: pytest.MonkeyPatch) -> None:
        """Write down copies, and fail where memory is tied to a stream."""
        original = torch.Tensor.copy_

        def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            self.log.append(f"{self.current.name}: copy {source.numel()}{'' if non_blocking else ', blocking'}")
            return original(target, source)

        patch.setattr(torch.Tensor, "copy_", copy)
        patch.setattr(torch.Tensor, "record_stream", None)


class Stream:
    """A stream of a ``Device``."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def record_event(self) -> Event:
        self.device.log.append(f"{self.name}: record")
        return Event(self.device, self.name)

    def wait_event(self, event: Event) -> None:
        self.device.log.append(f"{self.name}: wait for {event.stream}")


class Event:
    """An event of a ``Device``, recorded on the stream of the given name."""

    def __init__(self, device: Device, stream: str) -> None:
        self.device, self.stream = device, stream

    def query(self) -> bool:
        return self.device.done

    def synchronize(self) -> None:
        self.device.log.append(f"host: wait for {self.stream}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(cuda, "_cuda", device)
    device.record_copies(monkeypatch)
    return device


@pytest.fixture
def lane(device: Device) -> cuda.CudaLane:
    return cuda.CudaLane(HERE, Worker(), HostSlab(lambda: None))


def test_a_copy_to_the_host_is_between_what_was_computed_and_what_waits(device: Device, lane: cuda.CudaLane) -> None:
    x, space = torch.arange(10.0), HostSlab(lambda: None).allocate(40)
    transfer = lane.save(x.untyped_storage(), 40, space)
    assert device.log == ["compute: record", "out: wait for compute", "out: copy 40", "out: record"]
    device.log.clear()
    transfer.wait()
    assert device.log == ["compute: wait for out"]
    device.log.clear()
    y = torch.empty(10)
    lane.restore(space, y.untyped_storage(), 40, transfer).wait()
    assert device.log == [
        "compute: record", "in: wait for out", "in: wait for compute", "in: copy 40", "in: record",
        "compute: wait for in",
    ]  # fmt: skip
    assert torch.equal(x, y)


def test_what_comes_back_does_not_queue_behind_what_still_goes_out(device: Device, lane: cuda.CudaLane) -> None:
    slab, x = HostSlab(lambda: None), torch.arange(10.0)
    spaces = [slab.allocate(40) for _ in range(3)]
    first, *_ = [lane.save(x.untyped_storage(), 40, space) for space in spaces]
    device.log.clear()
    lane.restore(spaces[0], torch.empty(10).untyped_storage(), 40, first)
    inward = [line for line in device.log if line.startswith("in:")]
    assert inward == ["in: wait for out", "in: wait for compute", "in: copy 40", "in: record"]
    assert not [line for line in device.log if line.startswith("out:")]


def test_memory_lives_until_the_compute_stream_waits_or_the_copy_is_done(device: Device, lane: cuda.CudaLane) -> None:
    space = HostSlab(lambda: None).allocate(40)
    for end in ("wait", "done", "join"):
        memory, device.done = (ctypes.c_float * 10)(), False
        alive = weakref.ref(memory)
        transfer = lane.save(torch.frombuffer(memory, dtype=torch.float32).untyped_storage(), 40, space)
        del memory
        assert not transfer.finished
        assert alive() is not None
        device.done = end == "done"
        assert transfer.finished if end == "done" else getattr(transfer, end)() is None
        assert alive() is None, end


def test_a_file_is_written_and_read_through_pinned_memory_in_pieces(
    device: Device, lane: cuda.CudaLane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "STAGING", 64)
    x, y, space = torch.arange(40.0), torch.empty(40), DiskFile(tmp_path).allocate(160)
    saved = lane.save(x.untyped_storage(), 160, space)
    saved.wait()

    def pieces(side: str) -> list[str]:
        piece = ["{0}: wait for compute", "{0}: copy {1}", "{0}: record", "host: wait for {0}"]
        return [line.format(side, nbytes) for nbytes in (64, 64, 32) for line in piece]

    assert device.log == ["compute: record", *pieces("out")]
    device.log.clear()
    lane.restore(space, y.untyped_storage(), 160, saved).wait()
    assert device.log == ["compute: record", *pieces("in")]
    assert torch.equal(x, y)
    assert lane._slab.used_bytes == 0


def test_what_could_not_be_written_is_not_read_back(lane: cuda.CudaLane, tmp_path: Path) -> None:
    space = DiskFile(tmp_path).allocate(40)
    transfer = lane.restore(space, torch.empty(10).untyped_storage(), 40, Settled("the disk is full"))
    with pytest.raises(GraphoptError, match="the disk is full"):
        transfer.wait()
    with pytest.raises(GraphoptError, match="the disk is full"):
        lane.restore(
            HostSlab(lambda: None).allocate(8), torch.empty(2).untyped_storage(), 8, Settled("the disk is full")
        )


def test_a_block_is_used_again_only_when_its_copies_are_done(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = Engine(disk_directory=tmp_path)
    engine._lanes[HERE] = cuda.CudaLane(HERE, engine._worker, engine._slab("cpu"))
    monkeypatch.setattr(transfers._process, "engine", engine)
    x = torch.randn(10)
    handle = held(x)
    y = started(handle, x)
    del handle, y  # an exception came before the wait
    assert stored_bytes() == 40
    device.done = True
    assert stored_bytes() == 0


@pytest.mark.parametrize("code", [0, 2])
def test_pinning_reports_success_and_clears_errors(device: Device, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    calls, cleared = [], []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append(args) or code, cudaHostUnregister=lambda *args: code
    )
    monkeypatch.setattr(device, "cudart", lambda: runtime, raising=False)

    def report(*_: Any, **__: Any) -> None:
        cleared.append(True)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", report)
    assert cuda.pin(4096, 64) == (code == 0)
    assert calls == [(4096, 64, 1)]
    cuda.unpin(4096)
    assert len(cleared) == (2 if code else 0)


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_in(tmp_path) as engine:
        yield engine
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_values_come_back_to_the_device(own_engine: Engine, tier: str, dtype: torch.dtype) -> None:
    for x in (torch.randn(301, 50, device="cuda").to(dtype).t()[3:], torch.ones((), device="cuda", dtype=dtype)):
        y = round_trip(x, tier)
        assert torch.equal(x, y)
        assert (y.stride(), y.storage_offset(), y.device) == (x.stride(), x.storage_offset(), x.device)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", TIERS)
def test_copies_wait_for_the_compute_stream_and_it_for_them(own_engine: Engine, tier: str) -> None:
    """Long computing before each copy and memory that is used again at once: what is not ordered gives wrong values."""
    for number in range(20):
        x = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(20_000_000)
        x += number
        handle = held(x, tier)
        del x
        torch.full((1 << 22,), -1.0, device="cuda")
        like = torch.empty(1 << 22, device="meta")
        y = started(handle, like, device=torch.device("cuda"))
        assert torch.equal(back_on(y, handle), torch.full((1 << 22,), float(number), device="cuda"))
        del y, handle


def back_on(y: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    """``y``, once it is there."""
    return torch.ops.graphopt.prefetch_wait(y, handle)


@pytest.mark.gpu
def test_memory_of_an_abandoned_prefetch_is_not_handed_out(own_engine: Engine) -> None:
    x = torch.full((1 << 24,), 7.0, device="cuda")
    handle = held(x)
    for _ in range(10):
        abandoned = started(handle, x)
        del abandoned
        other = torch.zeros(1 << 24, device="cuda")
        torch.cuda.synchronize()
        assert not other.any()
    assert torch.equal(back(handle, x), x)
    del handle
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_reserved_memory_is_pinned_and_exact(own_engine: Engine) -> None:
    transfers.reserve(3 << 20, device="cuda")
    assert transfers.statistics("host").capacity_bytes == 3 << 20
    x = torch.randn((3 << 20) // 4, device="cuda")
    assert torch.equal(round_trip(x), x)
    assert transfers.statistics("host").capacity_bytes == 3 << 20
    (chunk,) = own_engine._slabs["cuda"]._chunks
    assert chunk.pinned


@pytest.mark.gpu
def test_only_the_device_storage_is_allocated(own_engine: Engine) -> None:
    x = torch.randn(1 << 20, device="cuda")
    handle = held(x)
    before = torch.cuda.memory_allocated()
    y = back(handle, x)
    assert torch.cuda.memory_allocated() - before == y.nbytes
    del y, handle
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("tier", TIERS)
def test_between_devices(own_engine: Engine, tier: str) -> None:
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        x = torch.randn(1000, device=source)
        handle = held(x, tier)
        y = back_on(started(handle, x, device=torch.device(target)), handle)
        assert torch.equal(x.cpu(), y.cpu())
        assert y.device.type == target
        del y, handle
