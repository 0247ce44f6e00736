"""The gradient of a loss in the place of its log-probabilities: two tensors of the logits' size become one.

Where the gradient that the loss begins with is known before the loss (a whole step, or a loss that is in the program),
the gradient of the logits can be computed as soon as the loss is, and nothing needs the log-probabilities behind it.
The calls of backward for it move to the end of forward, and are one call that writes where the log-probabilities are.
Where both run in chunks of rows, or in slices of the batch, they are one call and stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphopt.ir.node import Phase, info, set_info, value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.layers.loss_gradient import loss_gradient
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes

__all__ = ["chunks_in_place", "loss_gradients_in_place"]

_aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def loss_gradients_in_place(program: Program, origin: str, *, weigh: bool = True) -> tuple[Program, str] | None:
    """A program whose losses over classes have their gradients in the place of their log-probabilities.

    Args:
        program: is only read.
        origin: who does it, for people.
        weigh: whether to look at the peak; not where another program of the capture has the form already.

    Returns:
        a copy in that form, with what a user should read; None where there is no such loss, where a compiler makes the
        code, or where the peak would be higher than that of the unmodified program.
    """
    if program.context.compiled or not any(_pairs(program)):
        return None
    trial = program.copy()
    sizes = [_rewrite(trial, nll, softmax, origin) for nll, softmax in list(_pairs(trial))]
    trial.erase_dead()
    if weigh and trial.memory().peak_bytes > program.memory().peak_bytes:
        return None
    return trial, f"gradients of losses replace log-probabilities: saves {format_bytes(sum(sizes))}"


def chunks_in_place(program: Program, origin: str) -> None:
    """Make gradients of losses that are computed in chunks in the place of their log-probabilities.

    Args:
        program: is rewritten, unless a compiler makes the code.
        origin: who does it, for people.
    """
    if not program.context.compiled:
        for nll, softmax in [pair for pair in _pairs(program) if _in_chunks(pair[0])]:
            _rewrite(program, nll, softmax, origin)


def _pairs(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two calls of each gradient that can be made in place: for the log-probabilities, and for the logits."""
    tangents = {node for node, _ in program.inputs_of("tangent")}
    for softmax in program.phase_nodes(Phase.BACKWARD):
        if softmax.target is not _aten._log_softmax_backward_data.default or softmax.kwargs:
            continue
        given: tuple[Any, ...] = softmax.args
        nll, log_probs, dim, dtype = given
        if _is_of_classes(nll, log_probs, dim, dtype) and list(nll.users) == [softmax]:
            behind = [
                user for user in log_probs.users if user not in (nll, softmax) and not _is_in_front(user, softmax)
            ]
            moved = _moved(nll)
            known = tangents.isdisjoint({*nll.all_input_nodes, *_sources(moved)})
            if known and not behind and _can_move(program, moved):
                yield nll, softmax


def _is_of_classes(nll: Any, log_probs: Any, dim: Any, dtype: Any) -> bool:
    """Whether it is the loss of a matrix of log-probabilities that forward made of logits of their dtype."""
    if not (isinstance(nll, fx.Node) and isinstance(log_probs, fx.Node)) or nll.kwargs:
        return False
    if nll.target is not _aten.nll_loss_backward.default or nll.args[1] is not log_probs:
        return False
    value = value_of(log_probs)
    made_once = log_probs.target is _aten._log_softmax.default and info(log_probs).phase is not Phase.RECOMPUTE
    plain = made_once and value.dim() == 2 and value.is_contiguous() and value.dtype == dtype
    return plain and dim in (1, -1) and nll.args[4] in (_MEAN, _SUM)


def _in_chunks(nll: fx.Node) -> bool:
    """Whether the log-probabilities were made in backward too, of a chunk of rows or a slice of the batch."""
    log_probs = nll.args[1]
    return isinstance(log_probs, fx.Node) and info(log_probs).phase is Phase.BACKWARD


def _is_in_front(reader: fx.Node, softmax: fx.Node) -> bool:
    """Whether what reads the log-probabilities does so before the gradient will be made."""
    if reader.op == "output":
        return False
    nll = softmax.args[0]
    assert isinstance(nll, fx.Node)
    return reader < softmax if _in_chunks(nll) else info(reader).phase is Phase.FORWARD


def _moved(nll: fx.Node) -> list[fx.Node]:
    """The calls of backward that the call reads, and they read, in any order; none where it stays where it is."""
    if _in_chunks(nll):
        return []
    found: dict[fx.Node, None] = {}
    pending = list(nll.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.op == "call_function" and info(node).phase is not Phase.FORWARD and node not in found:
            found[node] = None
            pending += node.all_input_nodes
    return list(found)


def _sources(nodes: list[fx.Node]) -> set[fx.Node]:
    return {source for node in nodes for source in node.all_input_nodes}


def _can_move(program: Program, nodes: list[fx.Node]) -> bool:
    """Whether calls are of backward alone, without effects, and read what forward has made."""
    pure = all(
        info(node).phase is Phase.BACKWARD
        and not (schema.mutated_inputs(node) or schema.is_collective(node) or schema.is_random(node))
        for node in nodes
    )
    written = {target for node in program.phase_nodes(Phase.FORWARD) for target in schema.mutated_inputs(node)}
    return pure and written.isdisjoint(_sources(nodes))


def _rewrite(program: Program, nll: fx.Node, softmax: fx.Node, origin: str) -> int:
    """Compute a gradient in forward, behind all that reads the log-probabilities; the bytes of these."""
    given: tuple[Any, ...] = nll.args
    grad_output, log_probs, *others = given
    softmax.target, softmax.args = loss_gradient, (log_probs, grad_output, *others)
    set_info(softmax, replace(info(softmax), origin=origin))
    if not _in_chunks(nll):
        _to_forward(program, nll, softmax)
    program.graph.erase_node(nll)
    return storage_bytes(value_of(log_probs))


def _to_forward(program: Program, nll: fx.Node, softmax: fx.Node) -> None:
    """Let a gradient and the calls that make what it reads be the last ones of forward."""
    log_probs = softmax.args[0]
    assert isinstance(log_probs, fx.Node)
    position = {node: place for place, node in enumerate(program.graph.nodes)}
    moved = sorted(_moved(nll), key=position.__getitem__)
    there = {*nll.all_input_nodes, *_sources(moved), *log_probs.users}.difference(moved, (nll, softmax))
    place = max(there, key=position.__getitem__).next
    while place in moved:
        place = place.next
    for node in moved:
        place.prepend(node)
        set_info(node, replace(info(node), phase=Phase.FORWARD))
    while place in (nll, softmax):
        place = place.next
    place.prepend(softmax)
    set_info(softmax, replace(info(softmax), phase=Phase.FORWARD))
