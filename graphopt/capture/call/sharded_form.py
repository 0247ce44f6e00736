"""A model after ``fully_shard`` (FSDP2) as a program sees it: this rank's shards are its parameters.

Around each module that was given to ``fully_shard`` stand two hooks in place of FSDP2's: the first one gathers the
parameters of its groups, in FSDP2's buckets, and puts the whole ones into the modules; the second one puts the shards
back. A gather is one autograd function whose backward reduces the gradients of the bucket and leaves this rank's part
to each shard. So a program has gathers and reductions as ops of forward and backward, and everything that is done with
activations can be done with whole parameters too: freed behind forward and gathered again is nothing but recomputed.

Source: Zhang et al., "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile", 2024 (arXiv 2411.00284).
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.call.local_parameters import LocalParameters
from graphopt.capture.call.tensor_parallel_form import DistributedInputs, trace_as_one
from graphopt.errors import CaptureError
from graphopt.ir.ops.communication.collectives import REDUCE_SCATTER, WAIT, gather_shards
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.communication.unreduced_gradient import ACCUMULATED_GRADIENT, NOT_REDUCED
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.sharding.accumulated_gradients import sum_of_gradients
from graphopt.rewriting.shards import WholeParameter, piece_of

__all__ = ["FullySharded", "is_as_shards", "is_fully_sharded", "shard_hooks"]

aten = torch.ops.aten

logger = logging.getLogger("graphopt")


def is_fully_sharded(model: object) -> bool:
    """Whether ``fully_shard`` was given this module itself."""
    return any(cls.__name__ == "FSDPModule" and cls.__module__.startswith("torch.") for cls in type(model).__mro__)


@dataclass(frozen=True)
class Accumulation:
    """What a backward does with the gradients of a group's whole parameters.

    Attributes:
        reduces: whether ranks reduce them; else they are added up on each rank for a later backward.
        waiting: the names of those of which there is such a sum, where they are reduced.
    """

    reduces: bool = True
    waiting: frozenset[str] = frozenset()

    @classmethod
    def of(cls, group: _torch.ShardedGroup) -> Accumulation:
        """What the next backward of a group does."""
        if not group.reduces:
            return cls(False)
        return cls(True, frozenset(p.path for p in group.parameters if p.whole_gradient is not None))


_AT_ONCE = Accumulation()


class ShardHook:
    """What stands in place of a hook of FSDP2's, which a program keeps also where it leaves out what runs around it."""

    def __init__(self, run: _Run) -> None:
        self.run = run


def shard_hooks(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Those of a module's hooks that gather its parameters or put the shards back."""
    return OrderedDict((key, hook) for key, hook in hooks.items() if isinstance(hook, ShardHook))


def is_as_shards(module: nn.Module) -> bool:
    """Whether a module that was given to ``fully_shard`` is as a program sees it at the moment."""
    return bool(shard_hooks(module._forward_pre_hooks))


class _Run:
    """A forward of modules that are gathered together: from the first call of one of them until all have run."""

    def __init__(self, module: _torch.ShardedModule, inside: Sequence[_Run]) -> None:
        self.module = module
        self.gathers = [_Gather(group) for group in module.groups]
        self._inside = inside
        self._waiting: set[nn.Module] = set()

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather parameters before the call of a module, where they are not gathered yet."""
        args, kwargs = self.module.cast_inputs(args, kwargs)
        if not self._waiting:
            self._waiting.update(self.module.modules)
            for gather in self.gathers:
                gather.put_whole()
                args, kwargs = _through(args, kwargs)
        return args, kwargs

    def end(self, module: nn.Module) -> None:
        """Put the shards back behind the call of the last module, and of those inside some of which have not run."""
        self._waiting.discard(module)
        if not self._waiting or len(self.module.modules) == 1:  # which another object may stand for
            self.stop()
            for run in self._inside:
                run.stop()

    def stop(self) -> None:
        """Put the shards back, where parameters are gathered."""
        self._waiting.clear()
        for gather in self.gathers:
            gather.put_shards()


class _Before(ShardHook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.run.begin(args, kwargs)


class _Behind(ShardHook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.run.end(module)
        return self.run.module.cast_output(output)


class _Through(torch.autograd.Function):
    """Gives what it is given.

    FSDP2 passes the inputs of a module through one like it, to see that backward has left the module. The gradients of
    an input that several modules read are added up first within each of them, which the last bit shows.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def _through(args: Any, kwargs: Any) -> tuple[Any, Any]:
    leaves, structure = _torch.pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if places:
        passed = _torch.apply_function(_Through, *(leaves[place] for place in places))
        for place, tensor in zip(places, passed, strict=True):
            leaves[place] = tensor
    args, kwargs = _torch.pytree.tree_unflatten(leaves, structure)
    return args, kwargs


class _Gather:
    """The gather of one group, and what stands in the modules meanwhile."""

    def __init__(self, group: _torch.ShardedGroup) -> None:
        self.accumulation = _AT_ONCE
        self._group = group
        self._functions: dict[Accumulation, type[torch.autograd.Function]] = {}
        self._shards: list[nn.Parameter] = []

    def put_whole(self) -> None:
        parameters = self._group.parameters
        self._shards = [module._parameters[name] for module, name in (p.places[0] for p in parameters)]  # type: ignore[misc]
        function = self._functions.get(self.accumulation)
        if function is None:
            function = self._functions[self.accumulation] = _function(self._group, self.accumulation)
        whole = _torch.apply_function(function, *self._shards)
        for parameter, gathered in zip(parameters, whole, strict=True):
            spec = parameter.whole_spec
            tensor = gathered
            if spec is not None:  # whose gradient has its placements before it is reduced, as FSDP2 has it
                tensor = _torch.distributed_from(gathered, spec, _torch.placements_of_gradient(spec))
            for module, name in parameter.places:
                module._parameters[name] = tensor

    def put_shards(self) -> None:
        for parameter, shard in zip(self._group.parameters if self._shards else (), self._shards, strict=True):
            for module, name in parameter.places:
                module._parameters[name] = shard
        self._shards = []


def _function(group: _torch.ShardedGroup, accumulation: Accumulation) -> type[torch.autograd.Function]:
    """The autograd function of a group, under a name of its own, by which a program keeps it."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ctx.set_materialize_grads(False)
            if accumulation != _AT_ONCE:
                ctx.save_for_backward(*shards)
            return _gathered(group, shards)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            if accumulation == _AT_ONCE:
                return _reduced(group, gradients)
            sums = _summed(group, ctx.saved_tensors, gradients, accumulation)
            if accumulation.reduces:
                return _reduced(group, sums)
            pairs = zip(sums, ctx.saved_tensors, strict=True)
            return tuple(None if total is None else NOT_REDUCED(total, shard) for total, shard in pairs)

    Gather.__name__ = Gather.__qualname__ = f"gather_{group.path or 'root'}".replace(".", "_").replace(", ", "_")
    return Gather


def _gathered(group: _torch.ShardedGroup, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The whole parameters of a group, for this rank's shards."""
    flat = []
    for parameter, shard in zip(group.parameters, shards, strict=True):
        one = shard.reshape(-1)
        if parameter.dtype is not None and one.dtype != parameter.dtype:
            one = aten._to_copy.default(one, dtype=parameter.dtype)
        if parameter.size[0] % group.ranks:  # then on all ranks, which must have the same program
            one = aten.constant_pad_nd.default(one, [0, parameter.length - one.numel()], 0.0)
        flat.append(one)
    together = flat[0] if len(flat) == 1 else aten.cat.default(flat)
    everything = gather_shards(together, group.ranks, group.frees, group.group).view(group.ranks, -1)
    if len(flat) == 1:
        pieces = [everything]
    else:
        pieces = aten.split_with_sizes_copy.default(everything, [p.length for p in group.parameters], 1)
    return tuple(
        aten.as_strided.default(piece, list(parameter.size), list(parameter.strides), 0)
        for parameter, piece in zip(group.parameters, pieces, strict=True)
    )


def _reduced(group: _torch.ShardedGroup, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a group's shards, for those of its whole parameters; in the order of FSDP2's additions."""
    there = [(place, gradient) for place, gradient in enumerate(gradients) if gradient is not None]
    results: list[torch.Tensor | None] = [None] * len(gradients)
    if not there:
        return tuple(results)
    before, behind = group.divides
    flat = aten._chunk_cat.default([gradient for _, gradient in there], 0, group.ranks).view(-1)
    flat = _divided(_as(flat, group.reduce_dtype), before)
    mine = WAIT(REDUCE_SCATTER(flat, group.ops[0], group.ranks, group.group))
    if group.replicas:
        mine = WAIT(_torch.all_reduce(mine, group.ops[1], group.replicas))
    mine = _as(_divided(mine, behind), group.dtype)
    offset = 0
    for place, _ in there:
        parameter = group.parameters[place]
        size, strides = list(parameter.shard_size), list(parameter.shard_strides)
        results[place] = aten.as_strided.default(mine, size, strides, offset)
        offset += parameter.length
    return tuple(results)


def _summed(
    group: _torch.ShardedGroup,
    shards: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    accumulation: Accumulation,
) -> list[torch.Tensor | None]:
    """The sums of whole gradients with those of this backward, in the dtypes that FSDP2 adds them up in."""
    sums: list[torch.Tensor | None] = []
    for parameter, shard, gradient in zip(group.parameters, shards, gradients, strict=True):
        dtype = group.reduce_dtype or parameter.gradient_dtype
        if parameter.path in accumulation.waiting or (gradient is not None and not accumulation.reduces):
            sums.append(ACCUMULATED_GRADIENT(gradient, shard, parameter.size, dtype))
        else:
            sums.append(None if gradient is None else _as(gradient, dtype))
    return sums


def _as(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or tensor.dtype == dtype else aten._to_copy.default(tensor, dtype=dtype)


def _divided(tensor: torch.Tensor, by: float) -> torch.Tensor:
    return tensor if by == 1 else aten.div.Tensor(tensor, by)


class FullySharded:
    """A model after ``fully_shard``.

    Args:
        model: that ``fully_shard`` was given as a whole, and whose parameters are there.

    Attributes:
        title: the model's class, for people.
        groups: the parameters that are gathered together.
        inputs: of calls that are distributed tensors.

    Raises:
        CaptureError: for what FSDP2 does and a program does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.title = type(model).__name__
        self._told = False
        self.inputs = DistributedInputs(self.title)
        self._modules = _torch.sharded_modules(model)
        root, *others = self._modules
        inside = [_Run(module, ()) for module in others]
        self._runs = [_Run(root, inside), *inside]
        self._gathers = [gather for run in self._runs for gather in run.gathers]
        self._hooks: dict[tuple[Accumulation, ...], list[tuple[_Before, _Behind]]] = {}
        self.groups = [group for module in self._modules for group in module.groups]
        self._shards = LocalParameters([parameter for group in self.groups for parameter in group.parameters])

    @property
    def is_current(self) -> bool:
        """Whether FSDP2's settings are as they were."""
        return all(group.is_current for group in self.groups)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether parameters are divided by tensor parallelism too."""
        return any(parameter.whole_spec is not None for group in self.groups for parameter in group.parameters)

    @property
    def users(self) -> dict[str, torch.Tensor]:
        """The user's sharded parameters by name."""
        return {parameter.path: parameter.tensor for group in self.groups for parameter in group.parameters}

    @property
    def wholes(self) -> dict[int, WholeParameter]:
        """By ``id``, what the shards that stand in the model now are shards of.

        Raises:
            CaptureError: for shards that are no rows of their parameters.
        """
        found = {}
        for group in self.groups:
            rank = find_group(group.group).rank
            for parameter in group.parameters:
                rows, *columns = parameter.size
                if parameter.length != piece_of(rows, group.ranks) * math.prod(columns):
                    raise CaptureError(f"shards of {parameter.path!r} are no rows of it, as the optimizer needs them")
                first = min(rank * parameter.length, math.prod(parameter.size))
                whole = WholeParameter(parameter.size, parameter.strides, group.group, first)
                found[id(self._shards.part(parameter))] = whole
        return found

    @contextmanager
    def as_shards(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """While a call is looked at, captured, or its tensors are gathered, the model is as a program sees it.

        Args:
            optimizer: of a whole step, which then holds shards too, and state of these.
        """
        adds_up = optimizer is None and not self.is_tensor_parallel
        self._tell_of_settings(adds_up)
        for group, gather in zip(self.groups, self._gathers, strict=True):
            gather.accumulation = Accumulation.of(group) if adds_up else _AT_ONCE
            group.free_whole()
        accumulations = self.accumulations
        if accumulations not in self._hooks:  # others for another program, which guards tell from this one by them
            self._hooks[accumulations] = [(_Before(run), _Behind(run)) for run in self._runs]
        with ExitStack() as stack:
            for module, hooks in zip(self._modules, self._hooks[accumulations], strict=True):
                stack.enter_context(module.hooks(*hooks))
            stack.enter_context(self._shards.in_place(optimizer))
            for run in self._runs:
                stack.callback(run.stop)  # where an error has ended a forward
            distributed = [p for group in self.groups for p in group.parameters if p.whole_spec is not None]
            trace_as_one(self, map(self._shards.part, distributed))
            yield

    def _tell_of_settings(self, adds_up: bool) -> None:
        """Warn, once, of what FSDP2 leaves for a later backward and a program does in each."""
        early = [] if adds_up or all(group.reduces for group in self.groups) else ["set_requires_gradient_sync(False)"]
        if any(group.reduces and not group.reduces_replicas for group in self.groups):
            early.append("set_requires_all_reduce(False)")
        if early and not self._told:
            self._told = True
            logger.warning(
                "%s: %s has no effect on %s, which reduces gradients in each backward: their sums are the same within "
                "rounding",
                self.title,
                " and ".join(early),
                "a program" if adds_up else "a whole step or a model with tensor parallelism",
            )

    @property
    def accumulations(self) -> tuple[Accumulation, ...]:
        """What the backward of the call that was looked at last does with the gradients of each group."""
        return tuple(gather.accumulation for gather in self._gathers)

    @property
    def reduces(self) -> list[bool]:
        """Whether FSDP2 would reduce the gradients of each group at a backward now."""
        return [group.reduces for group in self.groups]

    def reduced_by(self, accumulations: Sequence[Accumulation]) -> set[_torch.ShardedParameter]:
        """The parameters whose gradients a backward reduces.

        Args:
            accumulations: what it does with the gradients of each group.
        """
        pairs = zip(self.groups, accumulations, strict=True)
        return {parameter for group, each in pairs if each.reduces for parameter in group.parameters}

    def sums(self, program: Program, tensors: Mapping[str, torch.Tensor]) -> list[tuple[_torch.ShardedParameter, str]]:
        """The parameters of which a program adds up whole gradients, each with the name of the state that is the sum.

        Args:
            program: of a call of the model.
            tensors: the model's by name, while it is as a program sees it.
        """
        of_part = {id(self._shards.part(p)): p for group in self.groups for p in group.parameters}
        return [
            (of_part[id(tensor)], sum_of_gradients(name))
            for name, tensor in tensors.items()
            if sum_of_gradients(name) in program.pass_state
        ]

    def take_over(self, known: FullySharded) -> None:
        """Go on with what programs are of that an earlier form of the model was for."""
        self.inputs = known.inputs

    def spec_of(self, _part: torch.Tensor) -> None:
        """No shard is made a distributed tensor before it is gathered."""

    def connected(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``LocalParameters``; shards that get no gradient in this call stay what they are."""
        without = {
            id(self._shards.part(parameter))
            for group, accumulation in zip(self.groups, self.accumulations, strict=True)
            if not accumulation.reduces
            for parameter in group.parameters
        }
        return self._shards.connected(tensors, without=without)
