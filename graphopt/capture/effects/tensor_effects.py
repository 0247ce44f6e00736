"""What code does with tensors on its way through torch while it is captured, beside what the ops in a program are.

Code may hold a parameter of the model itself, in a list of the user's or in a closure of the loss: what stands for it
in the trace takes its place. It may read what a program does not get of a tensor, its gradient for instance; and it may
use tensors that require gradients and are none of the model's, and read the numbers of tensors that are no arguments.

Tensors whose numbers Python reads while a model is captured, beside those of the call: ``factor.item()``.

A program has such numbers as constants. They are part of what it is for, as numbers in attributes and variables are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphopt import _torch
from graphopt.capture.call.assigned_buffers import IN_PARTS
from graphopt.capture.call.source_lines import user_frame
from graphopt.errors import GraphBreakError

__all__ = ["READS", "NumbersRead", "Outside", "TensorsMet", "attributes_set", "refuse_outside", "tensors_of"]

_OF_TENSORS = vars(torch.Tensor.__base__)
_WRITES: Any = _OF_TENSORS["_version"].__get__
_READS: dict[Any, str] = {
    _OF_TENSORS["grad"].__get__: "the gradient (.grad)",
    _WRITES: "the number of writes (._version)",
}
"""What a tensor has beside what a program gets of it, by the function that reads it."""

_LIKE = frozenset((
    "to", "type_as", "view_as", "expand_as", "reshape_as", "detach", "detach_", "__len__", "__hash__", "__repr__",
    "size", "dim", "stride", "numel", "element_size", "is_contiguous", "is_floating_point", "is_complex",
    "storage_offset",    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "requires_grad_", "data_ptr", "untyped_storage",
))  # fmt: skip
"""Functions that take nothing of a tensor with a gradient, or its shape or dtype only."""


@dataclass(frozen=True)
class Outside:
    """A tensor that requires a gradient, and is neither the model's nor an argument.

    Attributes:
        tensor: as it is.
        where: the line of the user's code that computes with it.
    """

    tensor: torch.Tensor
    where: str


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a model by name, shared ones under each of theirs."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def attributes_set(tensor: torch.Tensor) -> dict[str, Any]:
    """What was set on a tensor from Python (``mask.causal = True``), but for tensors.

    Names that begin with ``_`` are libraries' own.
    """
    own = vars(tensor)
    if not own or not _torch.is_plain_tensor(tensor):
        return {}
    return {
        name: value for name, value in own.items() if not name.startswith("_") and not isinstance(value, torch.Tensor)
    }


class TensorsMet(TorchFunctionMode):
    """Sees each call of torch's functions while code is captured.

    Args:
        real: the model's tensors, by name.
        traced: what stands for them in the trace.

    Attributes:
        outside: tensors that require gradients and are none of the model's, by their ids.
        numbers: tensors whose numbers became Python's, by their ids.

    Raises:
        GraphBreakError: inside of the block, where code reads a gradient of a parameter or an argument, or how often
            one was written to.
    """

    def __init__(self, real: Mapping[str, torch.Tensor], traced: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.outside: dict[int, Outside] = {}
        self.numbers: dict[int, NumbersRead] = {}
        self._traced = {id(real[name]): tensor for name, tensor in traced.items() if name in real}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in ("__set__", "__delete__"):
            real: list[torch.Tensor] = []
            args, kwargs = self._stand_in(args, real), self._stand_in(kwargs or {}, real)
            what = _READS.get(func)
            if what is not None and _is_given(args[0]):
                raise _refused(func, what)
            if name in READS and args and isinstance(args[0], torch.Tensor):
                self._note_numbers(args[0])
            if real and torch.is_grad_enabled() and name != "__get__" and name not in _LIKE:
                self._note(real)
        return func(*args, **(kwargs or {}))

    def _stand_in(self, value: Any, real: list[torch.Tensor]) -> Any:
        """A value with what stands for the model's tensors in their place; ``real`` gets what requires a gradient."""
        if isinstance(value, torch.Tensor):
            found = self._traced.get(id(value))
            if found is None and value.requires_grad and _torch.is_plain_tensor(value):
                real.append(value)
            return value if found is None else found
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)([self._stand_in(item, real) for item in value])
        if type(value) is dict:
            return {key: self._stand_in(item, real) for key, item in value.items()}
        return value

    def _note_numbers(self, tensor: torch.Tensor) -> None:
        """Note a tensor with data, which is none of the trace; those of a call and of the model have none."""
        if _torch.is_plain_tensor(tensor) and not tensor.is_meta and id(tensor) not in self.numbers:
            self.numbers[id(tensor)] = NumbersRead(tensor, user_frame())

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self.outside:
                self.outside[id(tensor)] = Outside(tensor, user_frame())


def _refused(func: object, what: str) -> GraphBreakError:
    error = GraphBreakError(
        f"forward reads {what} of a parameter or an argument, which a program does not get\n"
        f"  where: {user_frame()}\n"
        f"  what to do: read it outside of the model, and give what is made of it as an argument{IN_PARTS}"
    )
    error.in_parts = func != _WRITES  # which Dynamo takes for a constant
    return error


def _is_given(tensor: torch.Tensor) -> bool:
    node = _torch.traced_node(tensor)
    return node is not None and node.op == "placeholder"


def refuse_outside(found: Iterable[Outside], title: str, optimizer: torch.optim.Optimizer | None) -> dict[str, None]:
    """Refuse tensors that a program would not train; gives the lines that compute with others, which nobody trains.

    Args:
        found: tensors that require gradients and are neither the model's nor arguments.
        title: whose program it is.
        optimizer: of a whole step; without one, whoever calls backward may look at any gradient.

    Raises:
        GraphBreakError: with the line, and what to do.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    told: dict[str, None] = {}
    for outside in found:
        if optimizer is None or id(outside.tensor) in held:
            whose = "" if optimizer is None else ", and that the optimizer holds"
            raise GraphBreakError(
                f"{title} computes with a tensor of shape {tuple(outside.tensor.shape)} that requires a gradient, is "
                f"neither a parameter of the model nor an argument{whose}: a program has no gradient for it\n"
                f"  where: {outside.where}\n"
                "  what to do: register the module or parameter that it belongs to on the model (model.criterion = "
                "criterion), or give it as an argument; requires_grad_(False), or torch.no_grad around the line, where "
                f"no gradient is wanted{IN_PARTS}"
            )
        told[outside.where] = None
    return told


READS = frozenset((
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__",
    "__repr__", "item", "numpy", "tolist",
))  # fmt: skip
"""Methods of tensors that give numbers to Python."""

_MOST = 1_024
"""Numbers that are compared one by one; of larger tensors, and those on devices, it is how often ops have written."""


class NumbersRead:
    """A tensor whose numbers were read, which it does not keep alive.

    Args:
        tensor: with data.
        where: the line that read them, for people.
    """

    def __init__(self, tensor: torch.Tensor, where: str) -> None:
        self._tensor = weakref.ref(tensor)
        self.where = where

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor; None once it is gone."""
        return self._tensor()

    def now(self) -> Hashable:
        """What is equal as long as the numbers are; None once the tensor is gone."""
        tensor = self.tensor
        if tensor is None:
            return None
        with torch.no_grad(), _torch.without_dispatch_modes():
            if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() <= _MOST:
                return repr(tensor.tolist())  # so that NaN equals itself, and zeros differ by sign
            place = tensor.data_ptr() if tensor.layout is torch.strided else 0
            return place, None if tensor.is_inference() else tensor._version
