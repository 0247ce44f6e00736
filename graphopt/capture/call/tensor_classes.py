"""Arguments that are tensors of a class of their own: programs compute with their data.

Where a class adds nothing to how torch computes, what comes of its tensors has the class that eager mode gives it.
Whether the model looks at the class is found in its code. Other classes decide themselves what an op does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.capture.dynamo.graph_part import title_of
from graphopt.capture.guards.code_analysis import found_by
from graphopt.capture.guards.code_owner import is_covered_class
from graphopt.errors import GraphBreakError
from graphopt.ir.program import Program

__all__ = ["adds_nothing", "class_of", "data_of", "has_rules", "refuse_classes", "result_classes"]

Class = type[torch.Tensor]

_OF_CLASSES = frozenset(
    f"__{name}__"
    for name in (
        *("annotations", "dict", "doc", "firstlineno", "init", "init_subclass", "module", "new", "orig_bases"),
        *("parameters", "repr", "slots", "static_attributes", "str", "weakref"),
    )
)
"""What a class may define without a word in what is computed with its tensors."""

_DISABLED = nn.Parameter.__torch_function__


@functools.lru_cache(maxsize=10_000)
def adds_nothing(cls: Any) -> bool:
    """Whether torch computes with tensors of a class as with plain ones, and gives results of that class."""
    own: Any = torch.Tensor
    function = getattr(cls.__torch_function__, "__func__", None)
    return cls is not own and function is own.__torch_function__.__func__ and not has_rules(cls)


@functools.lru_cache(maxsize=10_000)
def has_rules(cls: Any) -> bool:
    """Whether a class of tensors decides itself what ops, functions or operators do with these."""
    own: Any = torch.Tensor
    if issubclass(cls, _torch.FakeTensor):
        return False
    functions = own.__torch_function__.__func__, _DISABLED
    if getattr(cls.__torch_function__, "__func__", cls.__torch_function__) not in functions:
        return True
    if cls.__torch_dispatch__ is not own.__torch_dispatch__:
        return True
    return any(name.startswith("__") and name not in _OF_CLASSES for name in _members(cls))


def class_of(tensor: torch.Tensor) -> Class | None:
    """The class of a tensor, where it has one of its own that adds nothing; None for others."""
    cls: Any = type(tensor)
    return cls if adds_nothing(cls) else None


def data_of(value: Any) -> Any:
    """A tensor of a class of its own as a plain one, with the attributes that Python has set on it; else the value."""
    cls: Any = type(value)
    if cls is torch.Tensor or not isinstance(value, torch.Tensor) or not (adds_nothing(cls) or _has_own_function(cls)):
        return value
    plain: torch.Tensor = _torch.call_plainly(torch.Tensor.as_subclass, (value, torch.Tensor), {})
    vars(plain).update(vars(value))
    return plain


def _has_own_function(cls: Any) -> bool:
    own: Any = torch.Tensor
    return has_rules(cls) and cls.__torch_dispatch__ is own.__torch_dispatch__


def refuse_classes(model: nn.Module, called: object, arguments: Iterable[object]) -> None:
    """Raise a ``GraphBreakError`` for tensors whose class has rules of its own, or that the code looks at.

    Args:
        model: that is captured, whose parameters and buffers count.
        called: a function that is captured around it, a loss for instance; None for the model alone.
        arguments: of the call.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if has_rules(type(tensor)) and not nn.parameter.is_lazy(tensor):
            raise _rules(model, f"its {name} is", type(tensor), "dequantize it, or leave this model without graphopt")
    given = {type(each): each for each in arguments if isinstance(each, torch.Tensor)}
    for cls, tensor in given.items():
        if tensor.is_nested:
            raise GraphBreakError(
                f"{title_of(model)} is given a nested tensor, whose rows have lengths of their own, and a program has "
                "tensors of fixed shapes\n  what to do: give the rows one after the other (batch.values()) with their "
                f"offsets, or padded to one length (batch.to_padded_tensor(0.0)) with a mask{IN_PARTS}"
            )
        if has_rules(cls):
            raise _rules(model, "it is given", cls, "give its data (batch.as_subclass(torch.Tensor), or what it wraps)")
    classes = [cls for cls in given if adds_nothing(cls)]
    if not classes:
        return
    found = found_by(model, called)
    for cls in classes:
        seen = sorted(_members(cls) & found.names)
        looked_at = [
            f"asks for {base.__name__}" for base in cls.__mro__ if base in found.classes and not _is_torchs(base)
        ]
        if seen or looked_at:
            what = looked_at[0] if looked_at else f"reads .{seen[0]}"
            raise GraphBreakError(
                f"{title_of(model)} is given a tensor of the class {cls.__name__}, and its code {what}: programs "
                "compute with the data of tensors, and the class is not there while they are captured\n  what to do: "
                f"give the data (batch.as_subclass(torch.Tensor)), and what the class says as other arguments{IN_PARTS}"
            )


def _rules(model: nn.Module, where: str, cls: type, advice: str) -> GraphBreakError:
    return GraphBreakError(
        f"{title_of(model)} cannot be captured: {where} a tensor of the class {cls.__qualname__} ({cls.__module__}), "
        f"which decides itself what an op does\n  what to do: {advice}{IN_PARTS}"
    )


def _is_torchs(cls: type) -> bool:
    return cls is object or is_covered_class(cls)


def _members(cls: type) -> set[str]:
    """What a class of tensors defines beside torch's."""
    return {name for base in cls.__mro__ if not _is_torchs(base) for name in vars(base)}


def result_classes(program: Program, given: Sequence[Class | None]) -> tuple[Class | None, ...]:
    """The classes that eager mode gives the results of a program, None for plain tensors; empty where all are.

    Args:
        program: forward, or with what comes behind it.
        given: the classes of the tensors of a call that add nothing, None for others.
    """
    found: dict[fx.Node, Class] = {}
    for (node, _), cls in zip(program.inputs_of("input"), given, strict=False):
        if cls is not None:
            found[node] = cls
    for node in program.graph.nodes if found else ():
        of_operands = [found[operand] for operand in node.all_input_nodes if operand in found]
        if of_operands and node not in found:
            found[node] = max(of_operands, key=lambda cls: len(cls.__mro__))
    results = zip(program.output_values, program.outputs, strict=True)
    return tuple(found.get(value) for value, spec in results if spec.role in ("loss", "output")) if found else ()
