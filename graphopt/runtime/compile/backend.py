"""From a program to something that runs: the generated GraphModule, inductor, or the user's own compiler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx

from graphopt import _torch
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.node import value_of
from graphopt.ir.ops.communication.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    REDUCE_SCATTER_SUM,
)
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import counted
from graphopt.rewriting.progress import working
from graphopt.runtime.compile.functional import gather_one_at_a_time, write_nothing
from graphopt.runtime.compile.inductor import Boxed, compile_graph
from graphopt.runtime.compile.partition import split_update

__all__ = ["Backend", "Boxed", "check_backend", "compile_module", "compile_program"]

Backend = Literal["eager", "inductor"] | Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def check_backend(backend: Backend) -> None:
    """Raise for a backend that does not exist."""
    if not callable(backend) and backend not in ("eager", "inductor"):
        hint = did_you_mean(str(backend), ("eager", "inductor"))
        raise GraphoptError(
            f"no backend {backend!r}; {hint or 'use'} 'eager', 'inductor' or a callable(graph_module, inputs)"
        )


@no_collection()
def compile_program(program: Program, backend: Backend) -> tuple[fx.GraphModule, Boxed]:
    """The generated module of a program, and a callable that takes its inputs in a list and empties the list.

    A compiler gets everything up to the gradients; the optimizer's update, a few fused kernels, runs in eager mode.
    """
    module = program.to_graph_module()
    if backend == "eager" or program.stage != "step":
        return module, compile_module(module, [value_of(node) for node in program.placeholders], backend)
    first, second, first_inputs, second_inputs = split_update(program)
    examples = [value_of(node) for node in program.placeholders]
    compiled = compile_module(first, [examples[index] for index in first_inputs], backend)
    update = compile_module(second, [], "eager")
    own = sum(1 for spec in program.outputs if spec.role != "state")

    def run(args: list[Any]) -> Any:
        early, late = [args[index] for index in first_inputs], [args[index] for index in second_inputs]
        args.clear()
        results = list(compiled(early))
        late += results[own:]
        del results[own:]
        return (*results, *update(late))

    return module, _boxed(run)


def compile_module(module: fx.GraphModule, inputs: Sequence[Any], backend: Backend, *, room: int = 0) -> Boxed:
    """Compile a GraphModule of the boxed convention with a backend; the result is boxed too.

    Args:
        module: a generated module.
        inputs: example values without data.
        backend: what compiles it; what inductor makes of it takes no more memory than the module's own code, or
            ``room``.
        room: bytes that it may take in any case, above what is there before it runs.
    """
    if backend == "eager":
        _torch.LazyGraphModule.force_recompile(module)
        return _boxed(module.forward)
    if gather_one_at_a_time(module.graph):
        module.recompile()
    what = "the given backend" if callable(backend) else backend
    with torch.no_grad(), working(f"compiling {counted(len(module.graph.nodes), 'ops')} with {what}"):
        if backend == "inductor":
            return _boxed(compile_graph(module, inputs, room))
        compiled = backend(fx.GraphModule(module, _unboxed(module.graph)), inputs)
    if not callable(compiled):
        raise GraphoptError(f"the backend {backend!r} returned {type(compiled).__name__}, which cannot be called")
    return _boxed(compiled if _takes_a_list(compiled) else _unpacking(compiled))


def _takes_a_list(function: Callable[..., Any]) -> bool:
    """Whether a callable takes all its inputs in one list.

    It says so by ``_boxed_call``; torch's own backends copy that from what they wrap and take ``*args`` all the same.
    """
    if not getattr(function, "_boxed_call", False):
        return False
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return True
    return not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)


def _unpacking(function: Callable[..., Any]) -> Boxed:
    def run(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return function(*taken)

    return run


def _unboxed(graph: fx.Graph) -> fx.Graph:
    """A copy for compilers, without the boxed convention and without collectives in place."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copies))
    for node in graph.nodes:
        if node.target in (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER_SUM):
            write_nothing(node, copies[node])
    return copy


def _boxed(function: Callable[..., Any]) -> Boxed:
    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
