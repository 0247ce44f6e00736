"""Writes into real tensors while a model is traced.

Tracing runs an op whose arguments are all real: a tensor that is neither parameter nor buffer (an attribute, an element
of a list) is written there once more than the model was called. Seen with a mode of ``torch.utils._python_dispatch``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["ExchangeMetError", "RealWrites", "TrialWrites"]


class RealWrites(TorchDispatchMode):
    """While it is active, keeps what real tensors hold before an op writes into them; ``undo`` puts it back."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say that what is traced does not depend on it."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile below it, as it does for the bodies of ``torch.cond``."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for place, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[place] if place < len(args) else given.get(argument.name)
                    for tensor in value if isinstance(value, (list, tuple)) else (value,):
                        self._keep(tensor)
        return func(*args, **given)

    def _keep(self, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, (FakeTensor, FunctionalTensor)):
            return
        if tensor.device.type == "meta" or id(tensor) in self._kept:
            return
        with _disable_current_modes(), torch.no_grad():
            self._kept[id(tensor)] = tensor, tensor.detach().clone()

    def undo(self) -> None:
        """Write back what was there, the last first: views of one tensor may have been kept one after the other."""
        with _disable_current_modes(), torch.no_grad():
            for tensor, kept in reversed(self._kept.values()):
                if tensor.shape == kept.shape:  # other than of a temporary whose axes were changed
                    tensor.detach().copy_(kept)
        self._kept.clear()


class ExchangeMetError(BaseException):
    """Code that is tried by one rank alone was about to talk to others."""


class TrialWrites(RealWrites):
    """The same where code is tried with data: what it makes by itself is not kept, and it ends at an exchange.

    Raises:
        ExchangeMetError: where the code talks to other ranks, which may not run it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()  # storages; none that was there before can have the address of one of these

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in _EXCHANGES:
            raise ExchangeMetError
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made, given = _storages(result), _storages((args, kwargs))
        self._made |= made - given
        return result

    def _keep(self, tensor: Any) -> None:
        if not self._made.issuperset(_storages(tensor) or {0}):
            super()._keep(tensor)


def _storages(value: Any) -> set[int]:
    """Addresses of the storages of tensors."""
    leaves = pytree.tree_leaves(value)
    dense = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    return {leaf.untyped_storage()._cdata for leaf in dense}


_EXCHANGES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
