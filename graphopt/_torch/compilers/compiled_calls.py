"""A backend of ``torch.compile``: which compiled function a graph that torch hands over belongs to.

Code generation for graphs that take their arguments in a list, which is emptied.

Extends ``torch.fx.graph.CodeGen``, whose methods may change with any release of torch. ``LazyGraphModule`` is torch's:
a module whose code is generated when it is first needed, and not by each copy and each change on the way there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.graph import CodeGen

__all__ = ["BoxedCodeGen", "CompiledCall", "LazyGraphModule", "compiled_call", "compiled_with", "whole_function"]

_CALL = "compile_wrapper"
"""The function of torch's that runs a call of what ``torch.compile`` returned."""

_COMPILER = "/torch/_dynamo/convert_frame.py"
"""The file whose objects are called with the code of a function that is about to run, to compile it."""

_BETWEEN = ("/torch/nn/modules/module.py", "/torch/_dynamo/")
"""Files whose frames stand between a call of a compiled model and the model's own ``forward``."""


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """The call of a compiled function in which torch asks its backend to compile a graph.

    Attributes:
        context: one object for each use of ``torch.compile``; None where torch was asked in another way.
        function: what was compiled: a module's method, or a function.
        outermost: whether the graph is of that function itself, and not of another one that it has called.
    """

    context: Any
    function: Any
    outermost: bool

    @property
    def module(self) -> nn.Module | None:
        """The module that was compiled, where it was one."""
        for found in (getattr(self.function, "__self__", None), getattr(self.function, "__wrapped__", None)):
            if isinstance(found, nn.Module):
                return found
        return None


def compiled_call() -> CompiledCall:
    """The compiled function for which this thread's backend is being called."""
    outermost = True
    inside = True  # of torch's compiler, whose frames come first
    for frame in _frames():
        if frame.f_code.co_name == _CALL:
            return CompiledCall(frame.f_locals.get("self"), frame.f_locals.get("fn"), outermost)
        if inside:
            inside = frame.f_code.co_name != "__call__" or _COMPILER not in frame.f_code.co_filename
        else:
            outermost = outermost and any(part in frame.f_code.co_filename for part in _BETWEEN)
    return CompiledCall(None, None, False)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def compiled_with(function: Any) -> Any:
    """The ``context`` of calls of what ``torch.compile`` returned, or of a module that was compiled in place.

    Returns:
        None for anything else.
    """
    if isinstance(function, nn.Module):
        found = vars(function).get("dynamo_ctx")
        if found is not None:
            return found
        function = function._compiled_call_impl
    code = getattr(function, "__code__", None)
    if code is None or code.co_name != _CALL or "self" not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index("self")].cell_contents


def whole_function(graph: Any, call: CompiledCall) -> bool:
    """Whether a graph that torch hands over is all that a compiled function computes, with nothing before or behind."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    return call.outermost and reason is not None and not reason.graph_break


class BoxedCodeGen(CodeGen):
    """Generates a ``forward`` that empties the list it is given, so that arguments die at their last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """The head of the function, which takes its arguments out of one list."""
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name.strip() != "self"]
        lines = [f"def {self._func_name}(self, _boxed_args){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = _boxed_args")
        lines.append("    _boxed_args.clear()")
        return "\n".join(lines)
