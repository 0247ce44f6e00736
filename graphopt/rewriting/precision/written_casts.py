"""Regions under autocast, written out as casts: their calls are taken out of them, to be cast around one by one.

A call in such a region has the dtypes that the model's Python read under autocast; what it lacks are the casts, which
autocast makes below it. Traced as a region, a parameter would be cast anew by each call, where eager autocast casts it
once and so adds up its gradients in low precision.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphopt import _torch
from graphopt.ir.graphs.autocast import is_around
from graphopt.ir.node import info, unique_names, value_of
from graphopt.ir.program import Program
from graphopt.rewriting.precision.autocast_rules import ELIGIBLE, LOW_DTYPES, Autocast, tensor_leaves
from graphopt.rewriting.precision.cast_insertion import Rewriter
from graphopt.rewriting.precision.casts import ORIGIN
from graphopt.rewriting.precision.levels import Policy, sets_dtype
from graphopt.rewriting.precision.op_selection import Selection

__all__ = ["open_regions", "plain_dtypes", "write_casts"]


def open_regions(program: Program) -> int:
    """Take the calls out of the regions under autocast that the capture has put around everything.

    Until casts are put in, the values of the calls are those under autocast.

    Args:
        program: of stage forward; changed in place.

    Returns:
        How many regions there were; 0 for a program that is captured without autocast.
    """
    opened = 0
    while region := next(filter(is_around, program.graph.nodes), None):
        _open(program, region)
        opened += 1
    if opened:
        unique_names(program.graph)
    return opened


def write_casts(program: Program) -> Program:
    """A forward program in which what runs under autocast, by the model's own code or its caller's, is cast one by one.

    Returns:
        ``program`` itself where there is nothing to do, else another one.

    Raises:
        GraphoptError: where an op refuses what autocast gives it.
    """
    if not any(map(_can_open, program.graph.nodes)):
        return program
    result = program.copy()
    for region in result.nodes:
        if not _can_open(region):
            continue
        calls = _opened(result, region, {})
        alive = set(result.graph.nodes)
        writers: dict[torch.dtype, Rewriter] = {}
        for dtype, together in itertools.groupby((c for c in calls if c[1] in alive), key=_low_dtype):
            if dtype is not None:
                writer = writers.setdefault(dtype, _writer(result, dtype))
                writer.write([node for _, node in together])
    unique_names(result.graph)
    return result


def _writer(program: Program, dtype: torch.dtype) -> Rewriter:
    rules = Autocast(dtype, program.fake_mode)
    return Rewriter(program, rules, Policy(rules, "O1", ()), Selection(program, (), ()), under=True)


_Settings = dict[str, torch.dtype | None]
"""By kind of device the dtype that autocast casts to; None where it is off."""


def _opened(program: Program, region: fx.Node, around: _Settings) -> list[tuple[_Settings, fx.Node]]:
    """Open a region, and those in it; returns the calls, each with the settings that it runs under."""
    device, dtype, enabled, *_ = region.args
    now = {**around, str(device): _dtype(device, dtype) if enabled else None}
    found: list[tuple[_Settings, fx.Node]] = []
    for node in _open(program, region):
        found += _opened(program, node, now) if _can_open(node) else [(now, node)]
    return found


def _low_dtype(call: tuple[_Settings, fx.Node]) -> torch.dtype | None:
    """The dtype that autocast casts the arguments of a call to, on their device."""
    settings, node = call
    tensors = [leaf for source in node.all_input_nodes for leaf in tensor_leaves(value_of(source))]
    return settings.get(tensors[0].device.type) if tensors else None


def _can_open(node: fx.Node) -> bool:
    """Whether a node is a region, under autocast or kept out of it, whose calls can be cast one by one."""
    if node.target is not torch.ops.higher_order.wrap_with_autocast or info(node).made_by == ORIGIN:
        return False
    device, dtype, enabled, *_ = node.args
    return not enabled or _dtype(device, dtype) in LOW_DTYPES.values()


def _dtype(device: Any, dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(str(device))


def _open(program: Program, region: fx.Node) -> list[fx.Node]:
    """Put the body of a region in its place; returns its calls."""
    name, *inputs = region.args[4:]
    assert isinstance(name, fx.Node)
    body = program.attributes.pop(str(name.target))
    mapping = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    nested = {child: f"{name.target}_{child}" for child, _ in body.named_children()}
    program.attributes |= {nested[child]: module for child, module in body.named_children()}  # type: ignore[misc]
    results: tuple[fx.Node, ...] = ()
    calls: list[fx.Node] = []
    for node in body.graph.nodes:
        if node.op == "output":
            results = node.args[0]
        elif node.op != "placeholder":
            with program.graph.inserting_before(region):
                mapping[node] = copy = program.graph.node_copy(node, lambda n: mapping[n])
            calls.append(copy)
            if node.op == "get_attr":
                copy.target = nested[str(node.target)]
    for user in list(region.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(mapping[results[user.args[1]]])  # type: ignore[index]
        program.graph.erase_node(user)
    program.graph.erase_node(region)
    program.graph.erase_node(name)
    return calls


def plain_dtypes(program: Program, low: torch.dtype) -> list[torch.dtype | None]:
    """The dtype that each output of a program captured under autocast has without autocast; None for other values.

    Ops have the widest dtype of their arguments. Where the model casts to ``low`` what autocast has made ``low``
    (``x.to(y.dtype)``), this is taken for a dtype that it read, and which is another one without autocast.
    """
    plain: dict[fx.Node, list[torch.dtype]] = {}
    for node in program.graph.nodes:
        if node.op != "output":
            plain[node] = list(_plain(node, plain, low))
    values = [plain[value] if isinstance(value, fx.Node) else [] for value in program.output_values]
    return [dtypes[0] if dtypes else None for dtypes in values]


def _plain(node: fx.Node, plain: dict[fx.Node, list[torch.dtype]], low: torch.dtype) -> Iterator[torch.dtype]:
    recorded = _dtypes(node)
    sources = node.all_input_nodes
    if node.target is operator.getitem:
        (source,) = sources
        place = node.args[1]
        if len(plain[source]) == len(value_of(source)):
            yield plain[source][place]  # type: ignore[index]
            return
    floats = [dtype for source in sources for dtype in plain[source] if dtype in ELIGIBLE]
    lowered = any(plain[source] != _dtypes(source) for source in sources)
    for dtype in recorded:
        keeps = dtype not in ELIGIBLE or not floats or not isinstance(node.target, _torch.OpOverload)
        asked = sets_dtype(node) and not (dtype == low and lowered)
        yield dtype if keeps or asked else functools.reduce(torch.promote_types, floats)


def _dtypes(node: fx.Node) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensor_leaves(value_of(node))]
