"""torch's Dynamo, which cuts a function into graphs and runs what lies between them as it is.

``torch.compile`` is public; its settings, and where a graph's values stood in the user's modules, are not.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

from torch import fx

from graphopt._torch.private_names import PARTS, require

__all__ = ["cut_as_in_eager", "input_paths", "with_paths"]

_MOST_GRAPHS = 64
"""Of one function, before Dynamo runs it without cutting it: its own limit of 8 is for graphs that are compiled."""

_ROOT = re.compile(r"^L\['\w+'\]\.?|^L__self___?")


def cut_as_in_eager(strict: bool) -> contextlib.AbstractContextManager[Any]:
    """While functions are cut: hooks of modules are looked at in every call.

    Args:
        strict: raise an error for a function of more graphs than are made, which would run without graphs.

    Raises:
        TorchVersionError: where the installed torch lacks what it takes.
    """
    changes = {
        "skip_nnmodule_hook_guards": False,
        "recompile_limit": _MOST_GRAPHS,
        "accumulated_recompile_limit": 16 * _MOST_GRAPHS,
        "fail_on_recompile_limit_hit": strict,
        "rewrite_assert_with_torch_assert": False,  # which would raise a RuntimeError
        "suppress_errors": True,  # code that Dynamo cannot read runs as it is
    }
    patched: contextlib.AbstractContextManager[Any] = _config().patch(changes)
    return patched


@functools.cache
def _config() -> Any:
    require(PARTS)
    from torch._dynamo import config  # torch imports Dynamo when it is first needed, in seconds

    return config


def input_paths(graph: fx.GraphModule) -> list[str]:
    """Where the inputs of one of Dynamo's graphs come from, as modules have it; empty where that is not known.

    To be asked while Dynamo hands the graph over; it forgets it then.
    """
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in graph.graph.find_nodes(op="placeholder")]
    names = [getattr(source, "name", "") for source in sources]
    return [_relative_path(str(name() if callable(name) else name)) for name in names]


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
