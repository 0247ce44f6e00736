"""Models and optimizers that cannot be captured as they are, and why."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from typing import cast

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.capture.call.call_checks import check_model
from graphopt.capture.call.sharded_form import is_as_shards
from graphopt.capture.call.source_lines import source_line
from graphopt.errors import CaptureError, GraphBreakError, GraphoptError
from graphopt.ir import region_effects
from graphopt.ir.gradients import base_of
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import tensors_of
from graphopt.ir.program import Program

__all__ = [
    "refuse_compressed_arguments",
    "refuse_coupling",
    "refuse_cumulative_averages",
    "refuse_distributed_arguments",
    "refuse_loops",
    "refuse_missing_data",
    "refuse_overlapping",
    "refuse_overlapping_writes",
    "refuse_varying_lstm",
    "refuse_wrapped",
    "shared_write",
    "step_hooks",
    "takes_lists_by_elements",
    "tell_shared_outputs",
    "works_by_elements",
]

logger = logging.getLogger("graphopt")

_WAY_OUT = {
    "OptimizedModule": "it is wrapped by torch.compile; pass the bare module (model._orig_mod) and choose "
    'backend="inductor" to compile the rewritten program',
    "DistributedDataParallel": "it is wrapped by DistributedDataParallel, whose reducer cannot be captured: "
    "graphopt.optimize takes it as it is; anything else takes the bare module (model.module), and DataParallel() among "
    "the passes exchanges gradients",
    "DataParallel": "it is wrapped by DataParallel, which runs replicas in threads; pass the bare module "
    "(model.module)",
    "FullyShardedDataParallel": "it is wrapped by FullyShardedDataParallel, which swaps parameters during the step; "
    "pass the bare module",
    "FSDPModule": "fully_shard was given it, and not the model as a whole, or in a way that is not for models after "
    "fully_shard: give optimize, optimize_step or capture the whole model, of which fully_shard(model) was the last "
    "call, or the module before fully_shard",
    "ScriptModule": "it is a TorchScript module, which has no Python to trace; pass the module it was made from",
}

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

_EACH_BY_ITSELF = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "clone",
    "copy_",
    "_to_copy",
    "zero_",
    "fill_",
    "masked_fill_",
)
_NORMS = ("_foreach_norm", "_foreach_max")


def refuse_wrapped(model: object, *, fully_sharded: bool = False, distributed: bool = False) -> None:
    """Raise a ``CaptureError`` with the way out for a model, or a part of one, that another tool has wrapped.

    Args:
        model: to look at.
        fully_sharded: let pass what was given to ``fully_shard``, as all is that a program sees as shards.
        distributed: let distributed tensors pass, which a program sees as this rank's parts.
    """
    check_model(model)
    assert isinstance(model, nn.Module)
    for path, module in model.named_modules():
        where = f"its submodule {path!r}" if path else type(module).__name__
        for cls in type(module).__mro__:
            if cls.__name__ == "FSDPModule" and (fully_sharded or is_as_shards(module)):
                continue
            if cls.__name__ in _WAY_OUT and cls.__module__.startswith("torch."):
                raise CaptureError(f"{where} cannot be captured: {_WAY_OUT[cls.__name__]}")
            if slots := _slots(cls):
                raise CaptureError(
                    f"{where} cannot be captured: its class {cls.__name__} keeps {', '.join(map(repr, slots))} in "
                    "__slots__, where changes between calls are not seen; leave __slots__ out"
                )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _torch.is_distributed(tensor) and not (fully_sharded or distributed):
            raise CaptureError(
                f"{type(model).__name__} cannot be captured here: {name!r} is a DTensor, whose operations talk to "
                "other ranks by themselves; graphopt.optimize, optimize_step and capture take such a model, and "
                "anything else the module before parallelize_module, distribute_module or distribute_tensor"
            )


def _slots(cls: type) -> list[str]:
    """The attributes that a class keeps outside of ``__dict__``; graphopt's own classes of optimized models aside."""
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [] if "_graphopt" in names else [name for name in names if name not in ("__dict__", "__weakref__")]


def refuse_distributed_arguments(model: nn.Module, arguments: Iterable[object]) -> None:
    """Raise a ``CaptureError`` for a batch that is distributed over a mesh of devices."""
    if any(_torch.is_distributed(argument) for argument in arguments):
        raise CaptureError(
            f"{type(model).__name__} is given a DTensor, whose operations talk to other ranks by themselves, and its "
            "parameters are none: give this rank's part of it (batch.to_local())"
        )


def refuse_compressed_arguments(model: nn.Module, arguments: Iterable[object]) -> None:
    """Raise a ``GraphBreakError`` for sparse arguments in compressed rows or columns, which torch cannot trace."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.layout in _COMPRESSED:
            raise GraphBreakError(
                f"{type(model).__name__} is given a sparse tensor in the layout {argument.layout}, which torch cannot "
                f"trace\n  what to do: give it as coordinates (batch.to_sparse_coo()) or as dense{IN_PARTS}"
            )


def refuse_cumulative_averages(model: nn.Module) -> None:
    """Raise a ``GraphBreakError`` for norms whose running averages weigh each batch by a number that Python reads."""
    for path, module in model.named_modules():
        counts = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None and module.training
        if counts and module.num_batches_tracked is not None:
            raise GraphBreakError(
                f"{type(model).__name__}: {path or 'it'} is a {type(module).__name__} with momentum=None, which weighs "
                "each batch by 1 / num_batches_tracked, a number that Python reads from a tensor in each call\n"
                f"  what to do: give it a momentum (0.1), or switch its running averages off by .eval(){IN_PARTS}"
            )


def refuse_loops(title: str, nodes: Iterable[fx.Node]) -> None:
    """Raise a ``GraphBreakError`` for loops with an open number of rounds, which torch cannot trace any further.

    Args:
        title: of the program.
        nodes: of it and of its sub-graphs.
    """
    for node in nodes:
        if getattr(node.target, "__name__", "") == "while_loop":
            where = source_line(node.stack_trace) or "forward"
            raise GraphBreakError(
                f"{title} runs a while_loop, whose number of rounds is open, and a program that is "
                f"differentiated has none\n  where: {where}\n  what to do: a for loop whose "
                f"length is known, or do it outside of the model{IN_PARTS}"
            )


def refuse_missing_data(model: nn.Module, arguments: Iterable[object]) -> None:
    """Raise a ``CaptureError`` for a model without data that gets a batch with data."""
    missing = next((name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta), "")
    if missing and any(isinstance(argument, torch.Tensor) and not argument.is_meta for argument in arguments):
        raise CaptureError(
            f"{type(model).__name__} has no data: {missing!r} is on the device meta, and the batch is not; give the "
            "model its values (model.load_state_dict(state, assign=True), or graphopt.materialize_shards(model) on "
            "several ranks), or plan it without running by graphopt.capture(..., device=)"
        )


def step_hooks(optimizer: torch.optim.Optimizer) -> str:
    """Which hooks an optimizer's step calls, in words; empty where it has none."""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    hooks = [kind for kind in kinds if any(not _is_own(hook) for hook in getattr(optimizer, kind, {}).values())]
    return "its step has hooks" if hooks or _torch.has_global_step_hooks() else ""


def refuse_overlapping(program: Program, differentiated: Container[int]) -> None:
    """Raise a ``CaptureError`` for results whose elements share memory: traced, their gradients are added up wrongly.

    Args:
        program: of stage forward.
        differentiated: the numbers of its outputs that gradients arrive for.
    """
    for number, (value, spec) in enumerate(zip(program.output_values, program.outputs, strict=True)):
        tensor: torch.Tensor | None = value_of(value) if isinstance(value, fx.Node) else None
        if tensor is not None and number in differentiated and _overlaps(tensor):
            raise CaptureError(
                f"{program.title} returns a tensor whose elements overlap in memory ({spec.target}, shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}), and gradients of it would be wrong: return a "
                "copy of it (.contiguous())"
            )


def refuse_overlapping_writes(title: str, nodes: Iterable[fx.Node]) -> None:
    """Raise a ``CaptureError`` for calls that write to a tensor whose elements share memory.

    Eager mode writes to shared memory as often as elements lie there, in an order of its own; traced, each element is
    written once.

    Args:
        title: of the model.
        nodes: the calls of a program of stage forward, those inside of its regions included.
    """
    for node in nodes:
        for target in schema.mutated_inputs(node):
            tensor = value_of(target)
            if isinstance(tensor, torch.Tensor) and _overlaps(tensor):
                raise CaptureError(
                    f"{title} writes in place ({schema.op_name(node)}, {info(node).source or 'an unknown line'}) to a "
                    f"tensor whose elements overlap in memory (shape {list(tensor.shape)}, strides "
                    f"{list(tensor.stride())}): write to a copy of it (.contiguous())"
                )


def shared_write(program: Program, given: Mapping[str, torch.Tensor]) -> GraphBreakError | None:
    """The error for a call that writes to a tensor which shares memory with another one that the program is given.

    Args:
        program: of stage forward.
        given: the tensors behind its inputs, by name.
    """
    memory: dict[int, list[str]] = {}
    names = {node: spec.target for node, spec in zip(program.placeholders, program.inputs, strict=True)}
    for name in names.values():
        tensor = given.get(name)
        if tensor is not None and tensor.layout is torch.strided:
            memory.setdefault(_torch.storage_key(tensor), []).append(name)
    for node in program.graph.nodes:
        for written in map(base_of, region_effects.mutated_inputs(node, program.attributes)):
            name = names.get(written, "")
            together = next((group for group in memory.values() if name in group and len(group) > 1), None)
            if together is not None:
                return GraphBreakError(
                    f"{program.title} is given {' and '.join(together)} in the same memory and writes to {name} in "
                    f"place ({schema.op_name(node)}): a program reads the others as they were before\n  where: "
                    f"{info(node).source or 'an unknown line'}\n  what to do: give tensors of their own (x.clone()), "
                    f"or let forward write to a copy{IN_PARTS}"
                )
    return None


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory otherwise than by ``expand``."""
    extents = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if not all(isinstance(number, int) for extent in extents for number in extent):
        return False
    reach = 0
    for stride, size in sorted(extent for extent in extents if extent[0] != 0 and extent[1] > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def tell_shared_outputs(program: Program, groups: Iterable[tuple[int, ...]]) -> None:
    """Warn of results that are views of one tensor which forward reads too: the sum of their gradients is rounded anew.

    torch adds up what reaches such results outside of a program; eager mode adds it in the order of all uses.

    Args:
        program: of stage forward.
        groups: the numbers of outputs that are one tensor and views of it.
    """
    for group in groups:
        base = base_of(cast(fx.Node, program.output_values[group[0]]))
        readers = {
            reader
            for node in program.graph.nodes
            if node.op != "output" and base_of(node) is base
            for reader in node.users
            if reader.op == "call_function" and base_of(reader) is not base and _passes_gradients(reader)
        }
        if readers:
            logger.warning(
                "%s returns %s as views of one tensor (%s), and uses it further: its gradients are added in another "
                "order than in eager mode, which may round the last bit; return a copy (.clone()) to avoid it",
                program.title,
                ", ".join(program.outputs[number].target for number in group),
                info(base).names[0] if info(base).names else base.name,
            )


def _passes_gradients(node: fx.Node) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors_of(value_of(node)))


def refuse_varying_lstm(graph: fx.Graph) -> None:
    """Raise a ``CaptureError`` for ``nn.LSTM`` on a CPU where sizes vary: a workspace is known for fixed ones only."""
    for node in graph.nodes:
        if node.target is not torch.ops.aten.lstm.input or not torch.backends.mkldnn.enabled:
            continue
        value: torch.Tensor = value_of(node)[0]
        if value.device.type == "cpu" and not all(isinstance(size, int) for size in value.shape):
            raise CaptureError(
                "nn.LSTM on a CPU runs a kernel of oneDNN whose workspace is known for fixed sizes only, and "
                "dynamic_shapes lets them vary: train inside of `with torch.backends.mkldnn.flags(enabled=False):`, "
                "where eager PyTorch and the program both compute it by matrix products"
            )


def _is_own(hook: object) -> bool:
    """Whether a hook is graphopt's, which changes nothing."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("graphopt.")


def works_by_elements(node: fx.Node) -> bool:
    """Whether a call of an update computes each element of its result from the same element of its arguments."""
    known = isinstance(node.target, _torch.OpOverload) and torch.Tag.pointwise in node.target.tags
    return known or schema.op_name(node) in _EACH_BY_ITSELF


def takes_lists_by_elements(node: fx.Node) -> bool:
    """The same for a call on lists of tensors."""
    name = schema.op_name(node)
    return name.startswith(("_foreach_", "_fused_")) and name not in _NORMS


def refuse_coupling(optimizer: torch.optim.Optimizer, graph: fx.Graph) -> None:
    """Raise where the update of one element of a parameter depends on other elements: shards would then be wrong."""
    for node in graph.nodes:
        name = schema.op_name(node)
        if not isinstance(node.target, _torch.OpOverload) or schema.is_view(node):
            continue
        if takes_lists_by_elements(node) or works_by_elements(node):
            continue
        if any(tensor.dim() > 0 for source in node.all_input_nodes for tensor in tensors_of(value_of(source))):
            raise GraphoptError(
                f"{type(optimizer).__name__} cannot be sharded: its update of an element depends on other elements of "
                f"the parameter ({name}); use an optimizer that works element by element (SGD, Adam, AdamW, Adagrad, "
                "RMSprop), or leave shard-optimizer out"
            )
