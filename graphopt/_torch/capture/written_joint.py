"""The joint graph of a module that computes nothing, written down where torch would trace it.

Torch takes its inputs and outputs from that graph, and everything in between from the halves that it is given later.
Most of the time of tracing goes into what describes the parameters, one after the other; here they are placeholders and
outputs of a graph that is made at once. What has more to it is traced: changed inputs, results that share memory,
classes of tensors, and releases of torch that say it otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_args

import torch
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors, graph_compile
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["HasGradient", "written_joint"]

HasGradient = Callable[[Any], bool]
"""Whether an input has a gradient, by torch's description of it."""

_NAME = "aot_dispatch_autograd_graph"
_TAKES = ("flat_fn", "flat_args", "flat_args_descs", "aot_config", "fw_metadata")
_GIVES = 4


@contextlib.contextmanager
def written_joint(has_gradient: HasGradient) -> Iterator[None]:
    """Within, this thread's joint captures write their graph down where that can be done.

    Args:
        has_gradient: whether a parameter, buffer or argument has a gradient.
    """
    traced = getattr(graph_compile, _NAME, None)
    if traced is None or not _is_known(traced):
        yield
        return
    thread = threading.get_ident()

    def capture(flat_fn: Any, flat_args: Any, flat_args_descs: Any, aot_config: Any, *, fw_metadata: Any) -> Any:
        if threading.get_ident() != thread or not _is_plain(flat_args, fw_metadata):
            return traced(flat_fn, flat_args, flat_args_descs, aot_config, fw_metadata=fw_metadata)
        fw_metadata.mutated_inp_stream_indices = []
        graph = _graph(flat_args, flat_args_descs, fw_metadata, has_gradient)
        inputs = (flat_args, fw_metadata.traced_tangents)
        return graph, inputs, (flat_args_descs, fw_metadata.traced_tangents_descs), None

    setattr(graph_compile, _NAME, capture)
    try:
        yield
    finally:
        setattr(graph_compile, _NAME, traced)


def _is_known(traced: Callable[..., Any]) -> bool:
    """Whether this torch takes and gives what ``written_joint`` does."""
    signature = inspect.signature(traced)
    gives = get_args(signature.return_annotation)
    return tuple(signature.parameters) == _TAKES and len(gives) == _GIVES


def _is_plain(flat_args: list[Any], metadata: Any) -> bool:
    """Whether all is plain tensors: no input is changed, and no result is one or a view of another."""
    return (
        all(type(each) in _PLAIN for each in flat_args if isinstance(each, torch.Tensor))
        and not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
        and all(info.output_type.name == "non_alias" for info in metadata.output_info)
        and not metadata.num_intermediate_bases
        and not metadata.tokens
        and not metadata.is_rng_op_functionalized
    )


_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)


def _graph(
    flat_args: list[Any], flat_args_descs: list[Any], metadata: Any, has_gradient: HasGradient
) -> fx.GraphModule:
    """Inputs and tangents in; results, and a gradient for each input that has one, out."""
    graph = fx.Graph()
    given = [*zip(flat_args, flat_args_descs, strict=True)]
    given += [*zip(metadata.traced_tangents, metadata.traced_tangents_descs, strict=True)]
    nodes = []
    for number, (value, desc) in enumerate(given):
        node = graph.placeholder(f"given_{number}")
        node.meta = {"val": value, "desc": desc}
        nodes.append(node)
    results = [descriptors.PlainAOTOutput(number) for number in range(len(metadata.output_info))]
    values: list[Any] = [nodes[0]] * len(results)
    gradients: list[Any] = []
    for node, (value, desc) in zip(nodes, given[: len(flat_args)], strict=False):
        asked = isinstance(value, torch.Tensor) and value.requires_grad
        gradients.append(descriptors.GradAOTOutput(desc) if asked else None)
        values.append(node if asked and has_gradient(desc) else None)
    output = graph.output(tuple(values))
    output.meta["desc"] = [*results, *gradients]
    return fx.GraphModule(nn.Module(), graph)
