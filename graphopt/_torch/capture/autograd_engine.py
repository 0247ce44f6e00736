"""Gradients that a model takes inside of its forward, kept as one call that is differentiated like any other.

Whatever takes gradients ends in ``torch.autograd._engine_run_backward``, which is replaced while a model is traced: the
engine's calls below it are no calls of the model's Python, and no tracer sees them. A
``torch._ops.HigherOrderOperator`` stands for them in the graph. torch has no public hook for either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree

from graphopt._torch.capture.fake_tensors import has_no_data
from graphopt._torch.capture.traced_tensors import traced_node, tracing_graph
from graphopt._torch.facts.change_detection import in_function_transform
from graphopt.errors import GraphoptError

__all__ = ["inner_gradients", "intercept_inner_gradients"]

_RUN: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


class _InnerGradients(HigherOrderOperator):
    """A call of ``torch.autograd.grad`` in a forward program.

    Its arguments are how many tensors are differentiated, whether that can be differentiated again, whether tensors may
    be left out, and then all tensors: what is differentiated, the gradients of these, and what it is differentiated by.
    """

    def __init__(self) -> None:
        super().__init__("graphopt_inner_gradients")

    def __call__(self, count: int, create_graph: bool, allow_unused: bool, *tensors: Any) -> Any:
        if tracing_graph() is None:
            raise GraphoptError(
                "gradients that forward takes by itself are there only when the program is differentiated: run the "
                "joint stage (graphopt.capture(...), without stage='forward'), or the model"
            )
        return super().__call__(count, create_graph, allow_unused, *tensors)

    def original(self, count: int, create_graph: bool, allow_unused: bool, *tensors: torch.Tensor) -> Any:
        """Run autograd's engine; what it has saved stays, for the call may run again."""
        given, inputs = tensors[: 2 * count], self.inputs(count, *tensors)
        return _RUN(given[:count], given[count:], True, create_graph, inputs, allow_unused, accumulate_grad=False)

    def inputs(self, count: Any, *tensors: Any) -> tuple[Any, ...]:
        """Of the tensors of a call, those that it differentiates by."""
        return tensors[2 * count :]


inner_gradients = _InnerGradients()


@inner_gradients.py_impl(ProxyTorchDispatchMode)
def _trace_inner_gradients(mode: ProxyTorchDispatchMode, *args: Any) -> Any:
    """Record the call as one node, and compute its result outside of the graph."""
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)
    proxy = mode.tracer.create_proxy("call_function", inner_gradients, proxies, {}, name="gradients")
    with disable_proxy_modes_tracing():
        result = inner_gradients.original(*args)
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


@contextlib.contextmanager
def intercept_inner_gradients(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """While tracing, record gradients that the model takes as one node.

    Args:
        refuse: the error for what cannot be recorded, made from what it is.
    """

    def run(
        outputs: Sequence[Any],
        gradients: Sequence[Any],
        retain_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any],
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        tensors = (*outputs, *gradients, *inputs)
        untouched = in_function_transform() or not any(map(_is_traced, tensors))
        if untouched or any(gradient is None for gradient in gradients):  # without one autograd raises
            options = {"allow_unreachable": allow_unreachable, "accumulate_grad": accumulate_grad}
            return before(outputs, gradients, retain_graph, create_graph, inputs, **options)
        if accumulate_grad:
            raise refuse("backward()")
        if not all(isinstance(each, torch.Tensor) and traced_node(each) is not None for each in tensors):
            raise refuse("torch.autograd.grad of what are no tensors of its own, such as edges of the graph,")
        return inner_gradients(len(outputs), create_graph, allow_unreachable, *tensors)

    before: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    torch.autograd._engine_run_backward = run  # type: ignore[assignment,attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = before  # type: ignore[attr-defined]


def _is_traced(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and (has_no_data(tensor) or traced_node(tensor) is not None)
