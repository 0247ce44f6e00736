"""Process groups and stores of ``torch.distributed``, and its collectives as ops of a graph.

Groups by name and the default store are in ``torch.distributed.distributed_c10d`` only, the classes of stores in
``torch._C``; the ops are the functional collectives ``_c10d_functional``. A function imports what it needs of
``torch.distributed`` when it is called.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from graphopt._torch.private_names import ABORT, COLLECTIVES, FAKE_RANKS, GROUPS, MESSAGES, require

__all__ = [
    "abort_group",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "all_to_all_op",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "collectives_draw_apart",
    "default_store",
    "group_on_host",
    "is_gloo",
    "is_tcp_store",
    "process_groups",
    "ranks_without_network",
    "reduce_scatter_tensor",
    "start_receiving",
    "start_sending",
    "wait_tensor",
    "wait_with",
    "work_of",
]

require(COLLECTIVES)

all_gather_into_tensor = torch.ops._c10d_functional.all_gather_into_tensor.default
all_gather_into_tensor_out = torch.ops._c10d_functional.all_gather_into_tensor_out.default
all_reduce = torch.ops._c10d_functional.all_reduce.default
all_to_all_op = torch.ops._c10d_functional.all_to_all_single.default
all_reduce_ = torch.ops._c10d_functional.all_reduce_.default
broadcast = torch.ops._c10d_functional.broadcast.default
broadcast_ = torch.ops._c10d_functional.broadcast_.default
reduce_scatter_tensor = torch.ops._c10d_functional.reduce_scatter_tensor.default
wait_tensor = torch.ops._c10d_functional.wait_tensor.default


def all_to_all_single(input: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Start to give each rank its part of as many equal ones, by the backend's own way; ``wait_tensor`` waits."""
    parts = [input.shape[0] // group_size] * group_size
    found: torch.Tensor = all_to_all_op(input, parts, parts, group_name)
    return found


def process_groups() -> dict[str, Any]:
    """Every process group that this process belongs to, by name; torch has no public way to look one up."""
    require(GROUPS)
    from torch.distributed.distributed_c10d import _world

    return {name: group for group, name in _world.pg_names.items()}


@contextlib.contextmanager
def collectives_draw_apart() -> Iterator[None]:
    """Leave Python's random numbers where they are, of which torch's stand-ins for collectives take one each."""
    module: Any = sys.modules.get("torch.distributed._meta_registrations")
    original = getattr(module, "generate_unique_id", None)
    if original is None:
        yield
        return

    def number() -> int:
        state = random.getstate()
        try:
            found: int = original()
        finally:
            random.setstate(state)
        return found

    module.generate_unique_id = number
    try:
        yield
    finally:
        module.generate_unique_id = original


def default_store() -> Any:
    """The store of the default process group, typed loosely: torch's stubs leave ``clone`` out.

    Raises:
        RuntimeError: where its backend has none.
    """
    require(GROUPS)
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:
        raise RuntimeError("this process group has no store")
    return store


def group_on_host(group: Any) -> Any | None:
    """A group of the same ranks that exchanges tensors on the host; None where its backend is the one for tests.

    All ranks of the group have to come here together for the first time: where it has no backend for the host, as with
    NCCL alone, one of gloo is made for them.
    """
    import torch.distributed as dist

    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if "fake" in backends.values():
        return None
    if "cpu" in backends:
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def abort_group(group: Any) -> None:
    """End the exchanges of a process group that are under way; its backend cannot be used afterwards.

    Raises:
        TorchVersionError: where the installed torch cannot.
        RuntimeError: where the group's backend cannot.
    """
    require(ABORT)
    group.abort()


def is_gloo(group: Any, device: torch.device) -> bool:
    """Whether gloo serves a process group's tensors on a device; to be asked before anything is sent from rank to rank.

    Raises:
        TorchVersionError: where the installed torch cannot send.
    """
    require(MESSAGES)
    import torch.distributed as dist

    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def start_sending(group: Any, tensor: torch.Tensor, rank: int, tag: int) -> Any:
    """Begin to send a contiguous tensor to a rank of a process group; what ``wait_with`` waits for."""
    return group.send([tensor], rank, tag)


def start_receiving(group: Any, tensor: torch.Tensor, rank: int, tag: int) -> Any:
    """Begin to receive a contiguous tensor from a rank of a process group; what ``wait_with`` waits for."""
    return group.recv([tensor], rank, tag)


def wait_with(tensor: torch.Tensor, work: Any) -> None:
    """Let ``wait_tensor`` of a tensor wait for some work too."""
    from torch._C._distributed_c10d import _register_work

    _register_work(tensor, work)


def work_of(wait: Callable[[], None]) -> Any:
    """What ``wait_with`` takes, for something that a function waits for; it raises what went wrong."""
    found = _python_work()(wait)
    _unfinished.add(found)  # torch keeps the half in C++ alone
    return found


_unfinished: set[Any] = set()


@functools.cache
def _python_work() -> Any:
    require(MESSAGES)
    from torch._C._distributed_c10d import Work

    base: Any = Work

    class PythonWork(base):  # type: ignore[misc]
        """Work that a function waits for."""

        def __init__(self, wait: Callable[[], None]) -> None:
            super().__init__()
            self._wait = wait

        def wait(self, timeout: Any = None) -> bool:
            del timeout
            _unfinished.discard(self)
            self._wait()
            return True

    return PythonWork


def is_tcp_store(store: Any) -> bool:
    """Whether a store lives in one process that the others reach over TCP; torch exports the classes to no checker."""
    require(GROUPS)
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


@contextlib.contextmanager
def ranks_without_network(count: int, per_host: int = 1) -> Iterator[None]:
    """While the block runs, this process is the first of so many ranks, the others of which are not there.

    Collectives of torch's own stand-in for a backend exchange nothing and give what they are given. Nothing is done
    where a process group exists already.

    Args:
        count: how many ranks.
        per_host: how many of them share a host; where there are several hosts with as many each, they are a mesh
            with the dimensions ``hosts`` and ``host``.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if count == 1 or not dist.is_available() or dist.is_initialized():
        yield
        return
    require(FAKE_RANKS)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        meshes = [(count // per_host, per_host)] if count > per_host > 1 and count % per_host == 0 else []
        joined = [init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "host")) for shape in meshes]
        yield
        del joined  # groups are found by the names of its dimensions as long as it is there
    finally:
        dist.destroy_process_group()
