"""A graph compiled by ``torch._inductor``, in the order in which it stands, with inputs that die at their last use.

``torch.compile`` is the public way to inductor, but it captures the program anew and chooses the calling convention.
``compile_fx`` is called instead; its settings, autograd's cache in ``torch._functorch.config`` and the tracing context
in ``torch._guards`` are set for the call. Inductor is imported at the first call: that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphopt._torch.capture.fake_tensors import example_twins
from graphopt._torch.capture.generator_states import traceable_generator_states
from graphopt._torch.private_names import INDUCTOR, require

__all__ = ["InductorCode", "compile_with_inductor", "generated_function"]


@dataclass(frozen=True, slots=True)
class InductorCode:
    """What inductor made of a graph.

    Attributes:
        run: takes the inputs in a list, which it empties, and drops each at its last use.
        generated: inductor's own callable under ``run``; it takes the values of ``extra``, then the inputs.
        extra: example values of the tensors that the graph holds itself.
    """

    run: Callable[[list[Any]], Any]
    generated: Any
    extra: tuple[Any, ...]


def compile_with_inductor(module: fx.GraphModule, inputs: Sequence[Any], owned: Container[int]) -> InductorCode:
    """Compile an aten graph with inductor, in the order in which it stands as far as inductor keeps it.

    Random ops stay torch's own, so that they draw what eager draws; strides are not padded. Inductor frees what it is
    given at the last use where nobody else holds it: hence one list of inputs, marked as one to steal from.

    Args:
        module: takes one list of inputs.
        inputs: example values without data.
        owned: the positions of inputs that nobody else holds when the code runs.
    """
    require(INDUCTOR)
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[tuple[Any, tuple[Any, ...]]] = []

    def compile_inner(graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        extra = len(examples) - len(inputs)
        _let_inductor_free(graph, extra, owned)
        options["is_inference"] = False  # for inference, ops are moved to their first use
        code = compile_fx_inner(graph, examples, **options)
        found.append((code, tuple(examples[:extra])))
        return code

    (given,) = module.graph.find_nodes(op="placeholder")
    given.meta["steal_arg"] = True
    examples = list(_cacheable(inputs))
    # A capture that is being compiled keeps its own notes on the calling convention; inductor must not read them.
    with (
        tracing(None),
        traceable_generator_states(),
        functorch_config.patch(enable_autograd_cache=False),  # it would not ask compile_inner
        config.patch({"fallback_random": True, "comprehensive_padding": False}),
    ):
        run: Any = compile_fx(module, [examples], inner_compile=compile_inner)  # type: ignore[list-item]
    ((generated, extra),) = found
    return InductorCode(run, generated, extra)


def _let_inductor_free(graph: fx.GraphModule, extra: int, owned: Container[int]) -> None:
    """Rename the owned inputs of a graph: inductor takes those that are called arg… for ones that cannot be freed.

    Args:
        graph: takes ``extra`` values of its own, then the inputs.
        extra: how many values come before the inputs.
        owned: the positions among the inputs.
    """
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        if index - extra in owned:
            node.target = f"saved_{index}"
            node._rename(f"saved_{index}")
    graph.recompile()


def _cacheable(inputs: Sequence[Any]) -> Sequence[Any]:
    """The same example values in a mode with an environment of sizes: inductor caches nothing without one.

    Where sizes are symbolic there is one already.
    """
    mode = detect_fake_mode(inputs)
    if mode is None or mode.shape_env is not None or not all(isinstance(value, torch.Tensor) for value in inputs):
        return inputs
    return example_twins(inputs, FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))


def generated_function(code: InductorCode) -> Callable[..., Any]:
    """The Python function that inductor generated; it takes the values of ``extra`` and the inputs in one list."""
    runner = getattr(code.generated, "compiled_fn_runner", None)
    if runner is not None:
        return runner.call  # type: ignore[no-any-return]
    return getattr(code.generated, "current_callable", code.generated)  # type: ignore[no-any-return]
