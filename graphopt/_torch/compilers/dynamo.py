"""torch's Dynamo, which cuts a function into graphs and runs what lies between them as it is.

``torch.compile`` is public; its settings, and where a graph's values stood in the user's modules, are not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphopt._torch.private_names import PARTS, require
from graphopt.errors import quoted

__all__ = [
    "MOST_GRAPHS",
    "cut",
    "cut_as_in_eager",
    "function_that_is_cut",
    "guard_by",
    "guard_hooks",
    "input_paths",
    "input_sources",
    "number_places",
    "tell_of_limits",
    "with_paths",
]

MOST_GRAPHS = 64
"""Of one function, before it runs without being cut: Dynamo's own limit of 8 is for graphs that are compiled."""

logger = logging.getLogger("graphopt.runtime.graph_breaks.parts")

_CUT_HINTS = logging.getLogger("torch._dynamo.variables.tensor")
_REFUSALS = [
    logging.getLogger(f"torch.{name}")
    for name in ("_dynamo.convert_frame", "_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
]
"""Where torch logs what it could not trace, with a traceback of its own code; what raises is raised besides."""

_LIMITS = logging.getLogger("torch._dynamo.convert_frame")
"""Where torch says that a function has had as many graphs as it makes: it tells nobody in another way."""

_ROOT = re.compile(r"^[LG]\['\w+'\]\.?|^L__self___?")


def _told_of_limits(tell: Callable[[str], bool]) -> Callable[[logging.LogRecord], bool]:
    """A filter of ``_LIMITS`` that tells whose graphs these are.

    Args:
        tell: is called with the function that runs in eager mode from now on, as torch names it, in the thread of the
            call; says whether torch is to log it too. What it raises is what the call raises.
    """

    def look(record: logging.LogRecord) -> bool:
        reached = "hit config." in str(record.msg) and isinstance(record.args, tuple) and len(record.args) > 2
        return tell(str(record.args[2])) if reached else True  # type: ignore[index]

    return look


@contextlib.contextmanager
def cut_as_in_eager(limited: bool, tell: Callable[[str], bool]) -> Iterator[None]:
    """While functions are cut: hooks of modules are looked at in every call, and NumPy runs in eager mode.

    Args:
        limited: let a function of more than ``MOST_GRAPHS`` graphs run without being cut.
        tell: is called where one does (``_told_of_limits``).

    Raises:
        TorchVersionError: where the installed torch lacks what it takes.
    """
    changes = {
        "skip_nnmodule_hook_guards": False,
        "recompile_limit": MOST_GRAPHS if limited else sys.maxsize,
        "accumulated_recompile_limit": sys.maxsize,  # counts the graphs of all models of a class
        "rewrite_assert_with_torch_assert": False,  # which would raise a RuntimeError
        "suppress_errors": True,  # code that Dynamo cannot read runs in eager mode
        "trace_numpy": False,  # NumPy's own results, and its own random numbers
    }
    unread: dict[str, None] = {}
    beyond = _filtered([_LIMITS], _told_of_limits(tell))  # first: what the next one keeps quiet is still looked at
    quiet = _filtered(_REFUSALS, _asked_for(unread))
    with _filtered([_CUT_HINTS], _is_no_hint), beyond, quiet, _config().patch(changes):
        yield
    for words in unread:
        logger.warning("%s, and its bytes are not counted", words)


@contextlib.contextmanager
def _filtered(loggers: Sequence[logging.Logger], wanted: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """While the block runs, loggers give the records alone that are wanted."""
    for logger in loggers:
        logger.addFilter(wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(wanted)


_UNREAD = "WON'T CONVERT "
"""How Dynamo begins to say so."""


def _asked_for(unread: dict[str, None]) -> Callable[[logging.LogRecord], bool]:
    """Whether a record is of a logger that gives more than warnings, which the user has asked for (TORCH_LOGS).

    Args:
        unread: gets, in one line each, what Dynamo could not read and runs in eager mode.
    """

    def asked_for(record: logging.LogRecord) -> bool:
        head, *_ = str(record.msg).splitlines() or [""]
        if head.startswith(_UNREAD):
            error = record.exc_info[1] if record.exc_info else None
            reason = "" if error is None else f": {quoted(error).splitlines()[0]}"
            unread[
                f"{head.removeprefix(_UNREAD).strip()} runs in eager mode, since torch's Dynamo cannot read it{reason}"
            ] = None
        return logging.getLogger(record.name).isEnabledFor(logging.INFO)

    return asked_for


def _is_no_hint(record: logging.LogRecord) -> bool:
    """Whether a line of torch's log is something else than advice to avoid a cut; cuts are told by us."""
    return "Graph break from" not in str(record.msg)


@functools.cache
def _config() -> Any:
    require(PARTS)
    from torch._dynamo import config  # torch imports Dynamo when it is first needed, in seconds

    return config


def cut(
    function: Callable[..., Any], backend: Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]
) -> Callable[..., Any]:
    """A function that Dynamo cuts, each of whose graphs a backend takes; other models of its class do not count."""
    apart: dict[str, Any] = (
        {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    )
    # A cut is told by us; torch's advice at calls into C would have the user file an issue or register an operator.
    warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin", UserWarning)
    result: Callable[..., Any] = torch.compile(function, backend=backend, **apart)
    return result


def guard_hooks() -> None:
    """Have Dynamo look at the hooks of modules in every call, in the whole process: it makes it more careful only."""
    _config().skip_nnmodule_hook_guards = False


def tell_of_limits(tell: Callable[[str], bool]) -> None:
    """Tell, in the whole process from now on, of each function that torch cuts no more (``_told_of_limits``)."""
    _LIMITS.addFilter(_told_of_limits(tell))


_Same = Callable[[Mapping[str, Any]], bool]


def guard_by(make: Callable[[Mapping[str, Any]], _Same], what: str) -> None:
    """While Dynamo hands over a graph: have it cut anew at a later call for which a condition does not hold.

    Args:
        make: is given the local variables of the function that is cut, and gives the condition on those of a call.
        what: the condition, for the log of torch's guards.

    Raises:
        TorchVersionError: where the installed torch lacks what it takes.
    """
    require(PARTS)
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import Guard, TracingContext

    def create(builder: Any, guard: Any) -> None:
        same = make(builder.scope["L"])
        builder.guard_manager.root.add_lambda_guard(same, [what], guard.user_stack)

    context = TracingContext.try_get()
    if context is not None:
        context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))


def function_that_is_cut() -> int:
    """A number for the function, or the rest of one behind a cut, whose graph Dynamo is handing over."""
    from torch._guards import CompileContext

    identity = CompileContext.current_compile_id()
    return -1 if identity is None or identity.frame_id is None else identity.frame_id


def input_paths(graph: fx.GraphModule) -> list[str]:
    """Where the inputs of one of Dynamo's graphs come from, as modules have it; empty where that is not known.

    To be asked while Dynamo hands the graph over; it forgets it then.
    """
    return [_relative_path(name) for name in _sources(graph)]


def input_sources(graph: fx.GraphModule) -> list[str]:
    """What the inputs of one of Dynamo's graphs are in the function that was cut: ``x``, ``x.size()[0]``; likewise."""
    return [re.sub(r"^[LG]\['(\w+)'\]", r"\1", name) for name in _sources(graph)]


def number_places(graph: fx.GraphModule) -> frozenset[int]:
    """Which inputs of one of Dynamo's graphs are tensors that stand for a number of Python's, and are read as that."""
    inputs = graph.graph.find_nodes(op="placeholder")
    return frozenset(place for place, node in enumerate(inputs) if node.users and all(map(_reads, node.users)))


def _reads(call: fx.Node) -> bool:
    return call.op == "call_method" and call.target == "item"


def _sources(graph: fx.GraphModule) -> list[str]:
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in graph.graph.find_nodes(op="placeholder")]
    names = [getattr(source, "name", "") for source in sources]
    return [str(name() if callable(name) else name) for name in names]


def _relative_path(path: str) -> str:
    """A path of Dynamo's (``L['self']._modules['layers']._modules['0']``) as modules have it (``layers.0``)."""
    short = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", path)
    short = re.sub(r"\[(\d+)\]", r".\1", _ROOT.sub("", short, count=1))
    return short.lstrip(".")


def with_paths(graph: fx.GraphModule, place: Callable[[str], str]) -> None:
    """Give the nodes of one of Dynamo's graphs the module paths of the whole model, where they have them not yet.

    Args:
        graph: to change.
        place: the whole path of a path in the function that Dynamo has cut.
    """
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["nn_module_stack"] = {
                key: (place(_relative_path(path)) if _ROOT.match(path) else path, kind)
                for key, (path, kind) in stack.items()
            }
