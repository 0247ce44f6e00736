"""What forward reads of the tensors that it is given beside their values, and a program would have from its capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphopt import _torch
from graphopt.capture.assigned_buffers import IN_PARTS
from graphopt.capture.source_lines import user_frame
from graphopt.errors import GraphBreakError

__all__ = ["gradients_read_refused"]

_WRITES: Any = vars(torch.Tensor.__base__)["_version"].__get__
_READS: dict[Any, str] = {
    vars(torch.Tensor.__base__)["grad"].__get__: "the gradient (.grad)",
    _WRITES: "the number of writes (._version)",
}
"""What a tensor has beside what a program gets of it, by the function that reads it."""


class gradients_read_refused(TorchFunctionMode):  # noqa: N801 - used as a function, as torch.no_grad is
    """Refuse code that reads the gradient of a parameter or an argument, or how often it was written to.

    Raises:
        GraphBreakError: inside of the block, where it does so.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        what = _READS.get(func)
        if what is not None and _is_given(args[0]):
            error = GraphBreakError(
                f"forward reads {what} of a parameter or an argument, which a program does not get\n"
                f"  where: {user_frame()}\n"
                f"  what to do: read it outside of the model, and give what is made of it as an argument{IN_PARTS}"
            )
            error.in_parts = func != _WRITES  # which Dynamo takes for a constant
            raise error
        return func(*args, **(kwargs or {}))


def _is_given(tensor: torch.Tensor) -> bool:
    node = _torch.traced_node(tensor)
    return node is not None and node.op == "placeholder"
