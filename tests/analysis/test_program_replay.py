"""What a device's allocator takes for a program: exact figures for small ones, and what holds for all."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

import graphopt
from graphopt import Program, _torch
from graphopt.analysis.allocator import AllocatorRules
from graphopt.analysis.costs.cost import PROFILES
from graphopt.analysis.program_replay import reserved_where_cached
from graphopt.errors import ArgumentError
from graphopt.ir.context import GraphPartContext
from graphopt.ir.node import set_value, value_of
from graphopt.passes import Offload, Recompute
from tests.support.fitting import applied, wide
from tests.support.toy_devices import on_device, toy_device
from tests.support.training import Net, captured, mean_square

MIB = 2**20
ROWS = torch.ones(64, 8)


def whole_step() -> Program:
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return graphopt.capture(model, (ROWS,), loss=mean_square, optimizer=optimizer)


def offloaded() -> Program:
    return applied(captured(wide(), ROWS), Offload(min_bytes=1024, cost="roofline"))[0]


def recomputed() -> Program:
    return applied(captured(wide(), ROWS), Recompute(checkpoints=("net.3", "net.8")))[0]


PROGRAMS = {
    "joint": lambda: captured(wide(), ROWS),
    "step": whole_step,
    "offloaded": offloaded,
    "recomputed": recomputed,
    "convolution": lambda: captured(Net(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()), torch.ones(2, 3, 8, 8)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("case", PROGRAMS)
def test_reserved_covers_allocated_which_covers_what_is_asked_for(case: str) -> None:
    program = PROGRAMS[case]()
    peak = program.memory().peak_bytes
    plain = program.reserved()
    assert not plain.caching
    assert plain.reserved_peak_bytes == plain.allocated_peak_bytes == plain.requested_peak_bytes == peak
    assert plain.fits is None
    cached = program.reserved(toy_device())
    assert cached.requested_peak_bytes == peak
    assert peak <= cached.allocated_peak_bytes <= cached.active_peak_bytes <= cached.reserved_peak_bytes
    assert cached.reserved_peak_bytes % 4096 == 0
    assert 0 <= cached.inactive_split_bytes <= cached.unused_bytes
    assert cached.fits


def test_a_small_program_has_known_figures() -> None:
    """A weight of 4 MB, a batch, a result and its gradient of 2 MB each, and the gradient of the weight."""
    program = graphopt.capture(Net(nn.Linear(1000, 1000, bias=False)), (torch.ones(500, 1000),))
    found = program.reserved(dataclasses.replace(PROFILES["h100-80gb"], workspaces={}))
    assert found.requested_peak_bytes == 2 * 4_000_000 + 3 * 2_000_000
    assert found.allocated_peak_bytes == 2 * 4_000_256 + 3 * 2_000_384
    assert found.reserved_peak_bytes == 20 * MIB
    assert (found.segments, found.device) == (1, "h100-80gb")
    assert found.total_bytes == found.reserved_peak_bytes + found.context_bytes
    assert repr(found).startswith("<ReservedMemory on h100-80gb: 21.0 MB reserved")


def test_most_is_reserved_at_a_call_that_is_told() -> None:
    program = captured(wide(), ROWS)
    found = program.reserved(toy_device())
    assert found.peak_at in program.nodes
    assert found.alive == found.timeline.alive_at(found.position)
    assert sum(item.bytes for item in found.alive) <= found.reserved_peak_bytes


def test_workspaces_are_held_from_the_first_call_that_uses_them() -> None:
    device = toy_device(workspaces={"cublas": 8_519_680, "cudnn": 2 * MIB, "nccl": 4096}, context_bytes=300_000)
    products = captured(wide(), ROWS)
    found = products.reserved(device)
    bare = products.reserved(toy_device())
    assert found.workspaces == {"nccl": 4096, "cublas": 8_519_680}
    assert found.requested_peak_bytes == bare.requested_peak_bytes + 8_519_680 + 4096
    assert found.reserved_peak_bytes >= bare.reserved_peak_bytes + 8_519_680
    assert found.total_bytes == found.reserved_peak_bytes + 300_000
    convolution = PROGRAMS["convolution"]().reserved(device)
    assert convolution.workspaces == {"nccl": 4096, "cudnn": 2 * MIB}
    neither = captured(Net(nn.LayerNorm(8)), ROWS).reserved(device)
    assert neither.workspaces == {"nccl": 4096}


@pytest.mark.sweep
def test_a_device_that_is_too_small_is_told() -> None:
    program = captured(wide(), ROWS)
    needed = program.reserved(toy_device()).reserved_peak_bytes
    assert program.reserved(toy_device(memory_bytes=needed)).fits is True
    assert program.reserved(toy_device(memory_bytes=needed, context_bytes=1)).fits is False


def test_the_device_of_the_program_is_taken_where_none_is_named() -> None:
    plain = captured(wide(), ROWS)
    assert reserved_where_cached(plain, plain.memory()) is None
    program = on_device(plain, toy_device())
    found = reserved_where_cached(program, program.memory())
    assert found is not None
    assert found.reserved_peak_bytes == plain.reserved(toy_device()).reserved_peak_bytes
    part = program.copy()
    part.context = replace(part.context, part=GraphPartContext(10**6))
    assert reserved_where_cached(part, part.memory()) is None


def test_unknown_devices_are_refused_with_near_names() -> None:
    program = captured(wide(), ROWS)
    with pytest.raises(ArgumentError, match=r"device='h100-80GB' is not known; did you mean 'h100-80gb'"):
        program.reserved("h100-80GB")
    with pytest.raises(ArgumentError, match="the name of a device or a DeviceProfile"):
        program.reserved(80)


def for_cuda(program: Program, *on_host: str) -> Program:
    """A copy whose values are on a CUDA device, as a capture there has them, but for some inputs."""
    copied = program.copy()
    with _torch.FakeTensorMode() as mode:
        for node in copied.nodes:
            if node.name not in on_host and node.op != "output":
                value = _torch.pytree.tree_map_only(
                    torch.Tensor,
                    lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"),
                    value_of(node),
                )
                set_value(node, value)
    assert mode is not None
    return copied


def test_a_program_on_cuda_follows_the_settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = graphopt.capture(Net(nn.GELU()), (torch.ones(6 * MIB, requires_grad=True),))
    program = for_cuda(plain)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    found = program.reserved()
    assert (found.device, found.caching, found.memory_bytes) == ("cuda", True, None)
    assert found.reserved_peak_bytes == 4 * 24 * MIB
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert program.reserved().reserved_peak_bytes == 100 * MIB  # 96 MiB in pages of 20
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert program.reserved().reserved_peak_bytes == 4 * 24 * MIB


def test_what_is_on_the_host_is_not_reserved_on_the_device() -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, y + 1

    plain = graphopt.capture(Sum(), (torch.ones(6 * MIB, requires_grad=True), torch.ones(6 * MIB)))
    y = plain.placeholders[1]
    (after,) = y.users
    program = for_cuda(plain, y.name, after.name)
    assert for_cuda(plain).reserved().reserved_peak_bytes >= 6 * 24 * MIB
    assert program.reserved().reserved_peak_bytes == 4 * 24 * MIB


@pytest.mark.sweep
def test_growing_segments_leave_less_unused() -> None:
    program = captured(wide(), ROWS)
    growing = toy_device(allocator=replace(toy_device().allocator, expandable_segments=True))
    assert program.reserved(growing).unused_bytes <= program.reserved(toy_device()).unused_bytes + 40_960
    assert isinstance(growing.allocator, AllocatorRules)
