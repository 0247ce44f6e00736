"""What ``fully_shard`` (FSDP2) has made of a model: its groups of parameters, and what it does around each module.

torch keeps this in private objects; they are read once, here, into plain records. Nothing of FSDP2's is changed but the
two hooks of each module, which are exchanged under their own places and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt._torch.distributed_tensors import local_part
from graphopt._torch.private_names import FULLY_SHARDED, require
from graphopt.errors import CaptureError

__all__ = [
    "ShardedGroup",
    "ShardedModule",
    "ShardedParameter",
    "root_hooks",
    "sharded_modules",
    "share_state",
]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter of a group.

    Attributes:
        path: its name in the model.
        places: the modules that have it, each with its name there.
        size: of the whole parameter.
        strides: of the whole parameter.
        shard_size: of this rank's rows.
        shard_strides: of these.
        length: elements of a shard on every rank, those that fill it up included.
        dtype: in which it is gathered; None for its own.
        whole_spec: of the distributed tensor that it is once it is gathered (tensor parallelism); None for others.
        handle: FSDP2's.
    """

    path: str
    places: tuple[tuple[nn.Module, str], ...]
    size: tuple[int, ...]
    strides: tuple[int, ...]
    shard_size: tuple[int, ...]
    shard_strides: tuple[int, ...]
    length: int
    dtype: torch.dtype | None
    whole_spec: Any
    handle: Any

    @property
    def tensor(self) -> Any:
        """The user's ``DTensor``."""
        return self.handle.sharded_param

    @property
    def local(self) -> torch.Tensor:
        """This rank's part of it, in its memory."""
        local = local_part(self.tensor)
        assert local is not None
        return local

    def distributed(self, local: torch.Tensor) -> Any:
        """A ``DTensor`` like the user's of another tensor of the shard's shape."""
        return self.handle.to_sharded_dtensor(local)

    @property
    def whole_gradient(self) -> torch.Tensor | None:
        """The sum of whole gradients that wait for the backward that reduces them."""
        waits: torch.Tensor | None = self.handle.unsharded_accumulated_grad
        if waits is None and hasattr(self.handle, "_unsharded_param"):  # where FSDP2 adds up in the parameter's dtype
            waits = self.handle._unsharded_param.grad
        return waits

    def put_whole_gradient(self, waits: torch.Tensor | None) -> None:
        """Let another sum wait, or none."""
        self.handle.unsharded_accumulated_grad = waits
        if hasattr(self.handle, "_unsharded_param"):
            self.handle._unsharded_param.grad = None

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of its whole gradient."""
        own: torch.dtype = self.dtype or self.handle.orig_dtype
        return own


@dataclass(frozen=True, eq=False)
class ShardedGroup:
    """Parameters that are gathered together, and whose gradients are reduced together.

    Attributes:
        path: of the module that they belong to; empty for the whole model.
        parameters: in the order of their bytes in the exchanges.
        ranks: how many share them.
        group: the name of the process group of these.
        replicas: the name of the group of ranks that have the same shards; empty without any (HSDP).
        frees: whether whole parameters are freed behind forward and gathered again (``reshard_after_forward``; a number
            of ranks among which parts stay there counts as yes).
        reduce_dtype: in which gradients are reduced; None for their own.
        dtype: of the gradients that the shards get.
        divides: by what gradients are divided before and behind their reduction; 1 for nothing.
        ops: how they are reduced over the ranks, and over replicas.
        settings: of FSDP2's, all this comes from.
    """

    path: str
    parameters: tuple[ShardedParameter, ...]
    ranks: int
    group: str
    replicas: str
    frees: bool
    reduce_dtype: torch.dtype | None
    dtype: torch.dtype | None
    divides: tuple[float, float]
    ops: tuple[str, str]
    settings: tuple[object, ...]
    handle: Any

    @property
    def is_current(self) -> bool:
        """Whether FSDP2's settings are as they were (``set_reshard_after_forward``)."""
        return self.settings == _settings(self.handle)

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced at the next backward (``set_requires_gradient_sync``)."""
        return bool(self.handle.reduce_grads)

    @property
    def reduces_replicas(self) -> bool:
        """Whether they are reduced over replicas then too (``set_requires_all_reduce``)."""
        return bool(self.handle.all_reduce_grads)

    def free_whole(self) -> None:
        """Free whole parameters that a call which FSDP2 has run has left, as evaluation leaves those of the root."""
        if not self.handle.is_sharded:
            self.handle._to_sharded()


@dataclass(frozen=True, eq=False)
class ShardedModule:
    """What ``fully_shard`` was given at one time: a module, or several that are gathered together.

    Attributes:
        modules: these.
        groups: the parameters that are gathered around its forward.
        state: FSDP2's.
    """

    modules: tuple[nn.Module, ...]
    groups: tuple[ShardedGroup, ...]
    state: Any

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of its forward as the policy for mixed precision has them."""
        cast: tuple[tuple[Any, ...], dict[str, Any]] = self.state._cast_forward_inputs(args, kwargs)
        return cast

    def cast_output(self, output: Any) -> Any:
        """What its forward returns, likewise."""
        return self.state._cast_output_dtype(output)

    @contextmanager
    def hooks(self, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
        """Meanwhile, run these in place of what FSDP2 runs around a forward of theirs; hooks of others stay."""
        places = [place for pair in _hooks(self.state) for place in pair]
        kept = [(hooks, key, hooks[key]) for hooks, key in places]
        for number, (hooks, key) in enumerate(places):
            hooks[key] = after if number % 2 else before
        try:
            yield
        finally:
            for hooks, key, hook in kept:
                hooks[key] = hook


Hook = tuple[dict[int, Any], int]
"""The hooks of a module, and the key of one of them."""


def _hooks(state: Any) -> list[tuple[Hook, Hook]]:
    """What FSDP2 runs before and behind the forward of each module of a state."""
    before, behind = state._pre_forward_hook_handle, state._post_forward_hook_handle
    several = getattr(before, "handles", None)  # of all modules: those before their forwards, then those behind
    keys = [before.id, behind.id] if several is None else [handle.id for handle in several]
    count = len(state._modules)
    return [
        ((module._forward_pre_hooks, keys[place]), (module._forward_hooks, keys[count + place]))
        for place, module in enumerate(state._modules)
    ]


def share_state(model: nn.Module, other: nn.Module) -> None:
    """Let FSDP2's methods work on another object that shares all attributes with a model (``model.unshard()``)."""
    from torch.distributed._composable_state import _insert_module_state

    require(FULLY_SHARDED)
    _insert_module_state(other, model._get_fsdp_state())  # type: ignore[operator]


def root_hooks(model: nn.Module) -> list[Hook]:
    """The two places of hooks of a model with what FSDP2 runs around its forward: before it, and behind it."""
    require(FULLY_SHARDED)
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    (pair,) = _hooks(state)  # of several modules none is the whole model
    return list(pair)


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """The modules of a model that ``fully_shard`` was given, the model itself among them.

    Raises:
        CaptureError: for what FSDP2 does and graphopt does not, and a part of a model that has run as a whole.
    """
    require(FULLY_SHARDED)
    root: Any = model._get_fsdp_state()  # type: ignore[operator]
    root._lazy_init()  # FSDP2 decides at its first forward what the root is, and what is freed
    if not root._is_root:
        raise _refused(model, "", "it is a part of a model that FSDP2 has run as a whole", "optimize the whole model")
    return [_module(model, state) for state in root._state_ctx.all_states]


def _module(model: nn.Module, state: Any) -> ShardedModule:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    made = tuple(_group(model, found) for found in groups if found.fsdp_params)
    return ShardedModule(tuple(state._modules), made, state)


def _group(model: nn.Module, found: Any) -> ShardedGroup:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    path = found._module_fqn or ""
    if found._all_reduce_hook is not None:
        raise _refused(model, path, "it has an all-reduce hook", "leave set_all_reduce_hook out")
    own = type(found._all_gather_comm).__name__, type(found._reduce_scatter_comm).__name__
    if own != ("DefaultAllGather", "DefaultReduceScatter"):
        raise _refused(model, path, f"it communicates in a way of its own ({', '.join(own)})", "leave that out")
    parameters = tuple(_parameter(model, parameter) for parameter in found.fsdp_params)
    trained = [parameter for parameter in found.fsdp_params if parameter.sharded_param.requires_grad]
    reduced = found._reduce_dtype or (trained[0].param_dtype or trained[0].orig_dtype if trained else torch.float32)
    scatter, replicas = found._reduce_scatter_process_group, found._all_reduce_process_group if found._is_hsdp else None
    before, behind, *ops = _get_gradient_divide_factors(
        scatter,
        replicas,
        reduced,
        found.device.type,
        found.gradient_divide_factor,
        found.force_sum_reduction_for_comms,
    )
    return ShardedGroup(
        path,
        parameters,
        scatter.size(),
        scatter.group_name,
        replicas.group_name if replicas is not None else "",
        found._reshard_after_forward,
        found._reduce_dtype,
        found._orig_dtype,
        (before or 1, behind or 1),
        (_op(model, path, ops[0]), _op(model, path, ops[1])),
        _settings(found),
        found,
    )


def _settings(found: Any) -> tuple[object, ...]:
    return found._reshard_after_forward, found.gradient_divide_factor, found.force_sum_reduction_for_comms


def _op(model: nn.Module, path: str, op: Any) -> str:
    names = {torch.distributed.ReduceOp.AVG: "avg", torch.distributed.ReduceOp.SUM: "sum"}
    if op not in names:
        raise _refused(model, path, "its gradients are divided by a factor of their own", "leave that out")
    return names[op]


def _parameter(model: nn.Module, found: Any) -> ShardedParameter:
    path, what = found._param_fqn or "", found._module_info
    if getattr(found.mesh_info, "is_spmd_mesh", False):
        raise _refused(model, path, "its mesh has dimensions of other kinds (dp_mesh_dims)", "give the mesh of shards")
    if found.fsdp_placement.dim != 0:
        raise _refused(model, path, f"it is divided along dimension {found.fsdp_placement.dim}", "divide dimension 0")
    if found.offload_to_cpu and found.device.type != "cpu":  # where they are anyway
        why = f"its shards wait on the host and are gathered on {found.device} (CPUOffloadPolicy)"
        raise _refused(model, path, why, "leave offload_policy out")
    if hasattr(found._sharded_local_tensor, "fsdp_pre_all_gather"):
        raise _refused(model, path, "its tensor class has a way of its own to be gathered", "use a plain parameter")
    return ShardedParameter(
        path,
        (
            (what.module, what.param_name),
            *zip(what.shared_modules, what.shared_param_names, strict=True),
        ),
        tuple(found._orig_size),
        tuple(found._contiguous_orig_stride),
        tuple(found.sharded_size),
        tuple(found.contiguous_sharded_stride),
        found._sharded_param_data.numel(),
        found.param_dtype,
        _whole_spec(found),
        found,
    )


def _whole_spec(found: Any) -> Any:
    """What a parameter is as a distributed tensor once it is gathered; None for one that is plain then."""
    if not found.is_dtensor:
        return None
    name = "_unsharded_dtensor_spec" if hasattr(found, "_unsharded_dtensor_spec") else "_tp_spec"  # up to torch 2.12
    return getattr(found, name)


def _refused(model: nn.Module, path: str, why: str, way: str) -> CaptureError:
    where = f"{path!r} of {type(model).__name__}" if path else type(model).__name__
    return CaptureError(
        f"{where} was given to fully_shard in a way that cannot be captured: {why}\n  what to do: {way}, or optimize "
        "the module before fully_shard"
    )
