"""What a model does for itself while it is captured: names, checkpointed regions, autograd functions, gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.inner_gradients import refused_inside
from graphopt.capture.source_lines import user_frame
from graphopt.errors import CaptureError, GraphBreakError
from graphopt.ir.names import add_name
from graphopt.ir.ops import schema

__all__ = ["REGION_KEY", "observe"]

_WRITABLE = (torch.Tensor, str, int, float, bool, complex, torch.dtype, torch.device, torch.memory_format, type(None))
"""What an argument of a call in a graph may be."""

REGION_KEY = "graphopt_region"
"""Where a node under construction keeps the number of the ``torch.utils.checkpoint`` call it belongs to."""


@contextlib.contextmanager
def observe(model: nn.Module) -> Iterator[None]:
    """While a capture traces ``model``, name modules' outputs and mark what the model already asks for."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_module_names(model))
        stack.enter_context(_torch.intercept_checkpoint(_checkpoint_regions()))
        stack.enter_context(_torch.intercept_custom_functions(_check_function))
        stack.enter_context(_torch.intercept_inner_gradients(refused_inside))
        yield


@contextlib.contextmanager
def _module_names(model: nn.Module) -> Iterator[None]:
    """Call each module's output by the module's path; a module called again gets ``path@1``, and so on."""
    calls: Counter[str] = Counter()

    def hook_for(path: str) -> Any:
        def hook(_module: nn.Module, _args: Any, result: Any) -> None:
            number = calls[path]
            calls[path] += 1
            base = path if number == 0 else f"{path}@{number}"
            if isinstance(result, torch.Tensor):
                add_name(result, base)
                return
            leaves, _ = _torch.pytree.tree_flatten_with_path(result)
            for place, leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    add_name(leaf, base + _torch.pytree.keystr(place).replace("['", ".").replace("']", ""))

        return hook

    handles = [module.register_forward_hook(hook_for(path)) for path, module in model.named_modules() if path]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _checkpoint_regions() -> Any:
    """A context manager factory that marks every node traced inside with a region number, outermost region first."""
    numbers = itertools.count()
    depth = 0

    @contextlib.contextmanager
    def region(context_fn: Any, preserve: bool) -> Iterator[None]:
        nonlocal depth
        if context_fn is not None:
            raise CaptureError(
                f"selective checkpointing (context_fn={context_fn!r}) at {user_frame()}: its policy is written for "
                "eager's op-by-op dispatch; remove the checkpoint() call and name the tensors to keep with "
                "graphopt.passes.Recompute(checkpoints=[...])"
            )
        graph = _torch.tracing_graph()
        if graph is None:
            yield
            return
        before = set(graph.nodes)
        depth += 1
        try:
            yield
        finally:
            depth -= 1
            inside = [node for node in graph.nodes if node not in before]
            if not depth:
                number = next(numbers)
                for node in inside:
                    node.meta[REGION_KEY] = number
        if not preserve:
            _refuse_other_numbers(inside)

    return region


def _refuse_other_numbers(nodes: Iterable[fx.Node]) -> None:
    """Refuse random ops that eager mode runs again with other numbers, for whose results it computes gradients."""
    drawing = next(filter(schema.is_random, nodes), None)
    if drawing is not None:
        raise GraphBreakError(
            f"checkpoint(preserve_rng_state=False) at {user_frame()} is around {schema.op_name(drawing)}, which draws "
            "other random numbers when eager mode runs it again for backward: gradients are then those of another "
            "forward; leave preserve_rng_state at True, which costs a program nothing"
        )


def _check_function(cls: type, args: tuple[Any, ...]) -> None:
    """Refuse custom autograd functions whose arguments cannot be written into a graph."""
    for position, arg in enumerate(args):
        leaves = _torch.pytree.tree_leaves(arg)
        for leaf in leaves:
            if not isinstance(leaf, _WRITABLE):
                raise GraphBreakError(
                    f"{cls.__qualname__}.apply at {user_frame()} gets a {type(leaf).__name__} as argument {position}; "
                    "a captured autograd function takes tensors, numbers, strings, dtypes and devices: "
                    "pass what the object holds instead of the object"
                )
