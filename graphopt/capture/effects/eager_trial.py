"""What eager mode does with a call that could not be captured: where it fails too, its error is the one to see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.call.flatten import loss_in
from graphopt.capture.call.without_memory import has_memory
from graphopt.capture.effects.side_effects import generators_now, modules_now
from graphopt.capture.effects.state_changes import reached_places
from graphopt.errors import CaptureError
from graphopt.ir.host import is_memory_shortage

__all__ = ["EagerCall", "FailsInEagerError", "autocast_devices"]


class FailsInEagerError(CaptureError):
    """A call of the user's that cannot be captured, and that raises in eager mode too; its cause is what it raises.

    Whoever has made the call runs it in eager mode, so that it raises there, and leaves behind what it leaves there.
    """


@dataclass(frozen=True)
class EagerCall:
    """A call of a model, or of a loss function, as eager mode runs it.

    Attributes:
        function: called as ``function(model, *args, **kwargs)``.
        model: whose parameters and buffers it computes with.
        args: positional arguments.
        kwargs: those given by keyword.
        loss: the loss function where it is one, True where the model gives its loss, None where it gives anything.
        autocast: the dtype that a pass has the model run under.
    """

    function: Callable[..., Any]
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., Any] | bool | None = None
    autocast: torch.dtype | None = None

    def run(self) -> Any:
        """What it returns."""
        with contextlib.ExitStack() as stack:
            for device in autocast_devices(self._tensors()) if self.autocast is not None else []:
                stack.enter_context(torch.autocast(device, dtype=self.autocast))
            return self.function(self.model, *self.args, **self.kwargs)

    def try_it(self, *, backward: bool = False) -> None:
        """Run the call, and raise what it raises; either way everything is afterwards as it was before.

        Nothing is run on tensors without data. Memory that runs out is no finding, and an exchange with other ranks,
        which may not take part, ends it without one.

        Args:
            backward: differentiate what it returns as well, without touching any ``.grad``.
        """
        if not all(map(_has_data, self._tensors())):
            return
        if not backward:
            try:
                with torch.autograd.graph.saved_tensors_hooks(_forget, _need):
                    self._try(backward=False)
                return
            except _NeedsSavedError:
                pass
            except RuntimeError as error:  # transforms of torch.func allow no such hooks
                if "saved tensor hooks" not in str(error):
                    raise
        self._try(backward=backward)

    def _try(self, *, backward: bool) -> None:
        writes, undo = _torch.TrialWrites(), self._undo()
        try:
            with torch.enable_grad(), writes:
                result = self.run()
                if backward:
                    self._differentiate(result)
        except _torch.ExchangeMetError:
            return
        except Exception as error:
            if not is_memory_shortage(error):
                raise
        finally:
            writes.undo()
            for put_back in undo:
                put_back()

    def _tensors(self) -> list[torch.Tensor]:
        given = _torch.pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *(leaf for leaf in given if isinstance(leaf, torch.Tensor)),
        ]

    def _undo(self) -> list[Callable[[], None]]:
        """What takes back, one after the other, what the call may do beside writing into tensors."""
        gradients = [(tensor, tensor.grad) for tensor in self._tensors() if tensor.is_leaf]
        dtype = torch.get_default_dtype()
        strict = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        # statistics of batch norm are written to by an op that does not say so
        buffers = [
            (tensor, tensor.detach().clone()) for tensor in self.model.buffers() if tensor.layout is torch.strided
        ]

        def settings() -> None:
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            for tensor, gradient in gradients:
                tensor.grad = gradient
            for tensor, kept in buffers:
                if not torch.equal(tensor, kept):
                    tensor.detach().copy_(kept)

        called = self.loss if callable(self.loss) else None
        places = reached_places(self.model, called, (*self.args, *self.kwargs.values()))
        return [generators_now(self._tensors()), modules_now(self.model), settings, *(each.restore for each in places)]

    def _differentiate(self, result: Any) -> None:
        found = [loss_in(result)] if self.loss is not None else _torch.pytree.tree_leaves(result)
        outputs = [value for value in found if isinstance(value, torch.Tensor) and value.requires_grad]
        leaves = {id(tensor): tensor for tensor in self._tensors() if tensor.requires_grad}
        if outputs and leaves:
            ones = [torch.ones_like(value) for value in outputs]
            torch.autograd.grad(outputs, list(leaves.values()), ones, allow_unused=True)


class _NeedsSavedError(BaseException):
    """Forward takes gradients by itself."""


def _forget(_tensor: torch.Tensor) -> None:
    """What a trial that ends behind forward saves for backward: nothing, so that it takes no memory for it."""


def _need(_nothing: None) -> torch.Tensor:
    raise _NeedsSavedError


def autocast_devices(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The kinds of devices of tensors for which there is autocast."""
    kinds = {tensor.device.type for tensor in tensors}
    return sorted(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def _has_data(tensor: torch.Tensor) -> bool:
    return not _torch.has_no_data(tensor) and has_memory(tensor)
