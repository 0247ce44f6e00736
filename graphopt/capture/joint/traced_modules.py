"""Modules and checkpoints inside of a call that a forward program has as one node, noted on what is traced of it.

A forward program with a node for each op says of which module that is. Where a model's whole call is one node
(``DistributedCall``), hooks note it on the nodes of the joint program while these are traced.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import traceback

from graphopt import _torch
from graphopt.capture.call.source_lines import user_frame
from graphopt.capture.forward.regions import refuse_other_numbers
from graphopt.errors import CaptureError
from graphopt.ir.node import NodeInfo, Phase

__all__ = ["modules_noted"]


@contextlib.contextmanager
def modules_noted(
    model: nn.Module, mark: str, known: dict[str, NodeInfo], hold: Callable[[torch.Tensor, str], None], key: str
) -> Iterator[None]:
    """While a model's call is traced, mark joint nodes by module and checkpoint.

    Args:
        model: that is called.
        mark: of the node of the forward program; others are made of it.
        known: is given what each mark stands for.
        hold: notes on the node of a module's result that it is the one of a mark.
        key: under which marks are in ``meta["custom"]``.
    """
    notes = _Notes(mark, known, hold, key)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch.intercept_checkpoint(notes.checkpoint))
        for path, module in model.named_modules():
            if path:
                before = module.register_forward_pre_hook(notes.enter(path), prepend=True)
                behind = module.register_forward_hook(notes.leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(behind.remove)
        yield


class _Notes:
    """Where in a model a call is."""

    def __init__(
        self, mark: str, known: dict[str, NodeInfo], hold: Callable[[torch.Tensor, str], None], key: str
    ) -> None:
        self._mark, self._known, self._hold, self._key = mark, known, hold, key
        self._calls: Counter[str] = Counter()
        self._inside: list[tuple[str, contextlib.ExitStack]] = []
        self._regions = 0
        self._region: int | None = None

    def enter(self, path: str) -> Callable[..., None]:
        """A hook before the forward of a module."""

        def hook(_module: nn.Module, _args: Any) -> None:
            number = self._calls[path]
            self._calls[path] += 1
            name = path if number == 0 else f"{path}@{number}"
            info = NodeInfo(Phase.FORWARD, module=path, names=(name,), region=self._region)
            self._inside.append((self._noted(name, info), self._stack(name)))

        return hook

    def leave(self, _module: nn.Module, _args: Any, result: Any) -> None:
        """A hook behind it."""
        mark, stack = self._inside.pop()
        stack.close()
        if isinstance(result, torch.Tensor):
            local = _torch.local_part(result)
            self._hold(result if local is None else local, mark)

    def _noted(self, name: str, info: NodeInfo) -> str:
        mark = f"{self._mark}@{name}" if info.region is None else f"{self._mark}@{name}#{info.region}"
        self._known[mark] = info
        return mark

    def _stack(self, name: str) -> contextlib.ExitStack:
        """What is traced until this is closed has the mark of a name."""
        region = "" if self._region is None else f"#{self._region}"
        stack = contextlib.ExitStack()
        stack.enter_context(traceback.annotate({self._key: f"{self._mark}@{name}{region}"}))
        return stack

    @contextlib.contextmanager
    def checkpoint(self, context_fn: Any, preserve: bool) -> Iterator[None]:
        """Around what a model gives to ``torch.utils.checkpoint``, of which the outermost call counts."""
        if context_fn is not None:
            raise CaptureError(
                f"selective checkpointing (context_fn={context_fn!r}) at {user_frame()}: its policy is written for "
                "eager's op-by-op dispatch; leave the checkpoint out, and let FitMemory choose"
            )
        if self._region is not None:
            yield
            return
        graph = _torch.tracing_graph()
        before = set() if graph is None else set(graph.nodes)
        self._region, self._regions = self._regions, self._regions + 1
        here = self._inside[-1][0].partition("@")[2] if self._inside else ""
        known = self._known[self._inside[-1][0]] if self._inside else NodeInfo(Phase.FORWARD)
        self._noted(here, replace(known, names=(), region=self._region))
        try:
            with self._stack(here):
                yield
        finally:
            self._region = None
        if not preserve and graph is not None:
            refuse_other_numbers(node for node in graph.nodes if node not in before)
