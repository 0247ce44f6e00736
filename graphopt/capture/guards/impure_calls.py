"""Functions whose answer is another one at each call, or while a program is captured: named where code calls them."""

from __future__ import annotations

import types
from collections.abc import Sequence

import torch

__all__ = ["TYPES_COMPARED", "asks_whether_compiled", "told_call"]

_CLOCK = "reads the clock ({}), and a program has the time of its capture at every call"
_ANSWER = "asks for {}, and a program has the answer of its capture at every call"
_COMPILED = "asks {}, which is true while a program is captured, as under torch.compile"
TYPES_COMPARED = (
    "compares type(...) of something with a class of tensors: while a program is captured, tensors and parameters are "
    "of other classes; isinstance holds for them"
)

_CLOCKS = (
    *(f"time.{name}" for name in ("time", "perf_counter", "monotonic", "process_time")),
    *(f"time.{name}_ns" for name in ("time", "perf_counter", "monotonic", "process_time")),
    *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
    "datetime.date.today",
)
_QUESTIONS = (
    "torch.compiler.is_compiling",
    "torch._utils.is_compiling",
    "torch._dynamo.is_compiling",
    "torch._dynamo.external_utils.is_compiling",
    "torch.fx._symbolic_trace.is_fx_tracing",
)
_OF_PROCESS = (
    *(f"torch.{name}" for name in ("get_num_threads", "get_num_interop_threads")),
    *(
        f"torch.cuda.{of}{name}"
        for of in ("", "memory.")
        for name in ("mem_get_info", "memory_allocated", "memory_reserved", "memory_stats")
    ),
    *("decimal.getcontext", "gc.get_count", "os.getcwd", "os.getpid", "sys.argv", "sys.getrecursionlimit"),
    *("numpy.geterr", "threading.current_thread", "threading.get_ident", "warnings.filters"),
)
_TOLD = dict.fromkeys(_CLOCKS, _CLOCK) | dict.fromkeys(_QUESTIONS, _COMPILED) | dict.fromkeys(_OF_PROCESS, _ANSWER)


def asks_whether_compiled(sentence: str) -> bool:
    """Whether what is told is that code asks whether it is compiled."""
    return sentence.endswith(_COMPILED.partition("{}")[2])


def told_call(value: object, rest: Sequence[str]) -> str | None:
    """What to tell of a chain of names that has come to ``value``; None for nothing.

    >>> told_call(time, ["perf_counter"])
    'reads the clock (time.perf_counter), and a program has the time of its capture at every call'
    """
    if isinstance(value, torch.jit.ScriptFunction):
        return (
            f"calls {value.name}, a function of TorchScript, whose own derivative may round otherwise than a program's"
        )
    if isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        name = f"{value.__module__}.{value.__qualname__}"
    else:
        return None
    words = [name, *rest]
    for count in range(len(words), 0, -1):
        path = ".".join(words[:count])
        if path in _TOLD:
            return _TOLD[path].format(path)
    return None
