"""Whether the device has kernels for what a program runs in low precision, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.analysis.costs.isolated_call import LARGEST_CALL, call_bytes, call_tensors, prepare, refusal
from graphopt.errors import GraphoptError, quoted
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.node import info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.values import DTYPE_NAMES, cuda_indices
from graphopt.rewriting.precision.autocast_rules import LOW_DTYPES, tensor_leaves

__all__ = ["check_kernels"]

_MISSING = re.compile(r"not implemented|not support|unsupported|unimplemented|no kernel", re.IGNORECASE)

_known: dict[str, str] = {}
"""What the device said to an op with arguments of some dtypes; empty where it runs."""


def check_kernels(nodes: Iterable[fx.Node]) -> None:
    """Run each op that reads low precision once, forward and backward, on zeros of its smallest shapes.

    Ops on a device that is not here or of a program without data, and calls that take more than two gigabytes, are not
    tried. The random-number generators are left as they were.

    Raises:
        GraphoptError: for an op without a kernel: its module and source line, and what to keep in float32.
    """
    smallest: dict[str, fx.Node] = {}
    for node in nodes:
        if isinstance(node.target, _torch.OpOverload) and not refusal(node) and _tried(node):
            key = _key(node)
            if key not in smallest or call_bytes(node) < call_bytes(smallest[key]):
                smallest[key] = node
    for key, node in smallest.items():
        if key not in _known:
            with plain_precision(), torch.random.fork_rng(devices=cuda_indices(call_tensors(node))):
                _known[key] = _attempt(node)
        if _known[key]:
            raise _missing(node, _known[key])


def _tried(node: fx.Node) -> bool:
    tensors = [tensor for source in node.all_input_nodes for tensor in tensor_leaves(value_of(source))]
    low = any(tensor.dtype in LOW_DTYPES.values() for tensor in tensors)
    devices = {tensor.device.type for tensor in call_tensors(node)}
    if any(_torch.stand_in_of(tensor) is not None for tensor in call_tensors(node)):
        return False
    here = devices == {"cpu"} or (devices == {"cuda"} and torch.cuda.is_available())
    return low and here and call_bytes(node) <= LARGEST_CALL


def _key(node: fx.Node) -> str:
    dtypes = [tensor.dtype for source in node.all_input_nodes for tensor in tensor_leaves(value_of(source))]
    return f"{node.target} {dtypes} {call_tensors(node)[0].device.type}"


def _attempt(node: fx.Node) -> str:
    """What the device says to a call and to its backward where it has no kernel; other refusals do not count."""
    target, args, kwargs = prepare(node, lambda count, dtype, device: torch.zeros(count, dtype=dtype, device=device))
    try:
        with torch.enable_grad():
            args, kwargs = _torch.pytree.tree_map(_leaf, (args, kwargs))
            results = [t for t in tensor_leaves(target(*args, **kwargs)) if t.requires_grad]
            if results:
                torch.autograd.backward(results, [torch.zeros_like(t) for t in results])
    except Exception as error:
        text = str(error).split("\n")[0]
        return quoted(error).split("\n")[0] if _MISSING.search(text) and not text.startswith("derivative for") else ""
    return ""


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_(True)
    return value


def _missing(node: fx.Node, said: str) -> GraphoptError:
    known, name = info(node), schema.op_name(node)
    dtypes = {t.dtype for source in node.all_input_nodes for t in tensor_leaves(value_of(source))}
    low = ", ".join(sorted(DTYPE_NAMES[dtype] for dtype in dtypes if dtype in LOW_DTYPES.values()))
    place = ", ".join(part for part in (known.module, known.source) if part)
    entries = f"deny=({name!r},)" + (f", or deny=({known.module!r},) for its module" if known.module else "")
    return GraphoptError(
        f"{name} in {low} has no kernel on this device: {said}\n"
        f"  where: {place or node.name}\n"
        f"  what to do: keep it in float32 with {entries}"
    )
