"""Forward and backward as one graph, captured and made differentiable again by ``torch._functorch.aot_autograd``.

Its joint capture with descriptors is the only interface that says what each input and output of a joint graph is, and
that takes a rewritten graph back.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_compile, runtime_wrappers
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from graphopt._torch.capture.export_regions import plain_checks
from graphopt._torch.capture.interception import hooks_of_users_modules
from graphopt._torch.capture.written_joint import written_joint
from graphopt._torch.private_names import JOINT, attribute
from graphopt.errors import CaptureError

__all__ = ["AotInput", "AotOutput", "GradientRoutes", "JointTrace"]


@dataclass(frozen=True, slots=True)
class AotInput:
    """What one placeholder of a joint graph is: ``kind`` is parameter, buffer, input or tangent.

    Attributes:
        of_parameter: whether it is the tangent of a parameter that forward has changed; it is always zero, since no
            gradient goes through the change of a leaf.
    """

    kind: str
    target: str | int
    of_parameter: bool = False


@dataclass(frozen=True, slots=True)
class AotOutput:
    """What one output of a joint graph is: ``kind`` is output, gradient, mutation or base; ``of`` its input."""

    kind: str
    index: int | None = None
    of: AotInput | None = None


@dataclass(frozen=True, slots=True)
class GradientRoutes:
    """How gradients of what a callable returns, or has changed, come back into it.

    Attributes:
        tangents: for each tangent, in order, the outputs whose gradients are part of it: one, or all views of a tensor
            that is computed inside.
        changed: for tangents that are of an argument after its change, the place of the argument.
        views: for outputs that are an argument or a view of one, and have its gradient, the place of the argument.
        together: groups of outputs that are one tensor and views of it; their gradients are added up outside.
    """

    tangents: list[tuple[int, ...]]
    changed: dict[int, int]
    views: dict[int, int]
    together: list[tuple[int, ...]]


def _classify_input(desc: Any) -> AotInput:
    kind = type(desc).__name__
    if kind == "ParamAOTInput":
        return AotInput("parameter", desc.target)
    if kind == "BufferAOTInput":
        return AotInput("buffer", desc.target)
    if kind == "PlainAOTInput":
        return AotInput("input", desc.idx)
    if kind == "ViewBaseAOTInput":  # the memory that arguments share, of which torch has made one input
        return AotInput("shared", "")
    if kind == "TangentAOTInput":
        return _tangent_of(desc.output)
    if "Token" in kind:
        raise CaptureError(
            "it calls an op whose order torch keeps by tokens, such as a collective that writes into its argument "
            "(dist.all_reduce(x)): use the form that returns its result (all_reduce and wait_tensor of "
            "torch.distributed._functional_collectives, or torch.distributed.nn.functional.all_reduce)"
        )
    raise CaptureError(f"torch made a joint graph with an input of a kind that graphopt does not know: {desc!r}")


def _tangent_of(desc: Any) -> AotInput:
    """A tangent, by the number of its output, or by a description where that is none of the module's own."""
    output = _classify_output(desc)
    if output.kind == "output" and output.index is not None:
        return AotInput("tangent", output.index)
    changed = output.of is not None and output.kind == "mutation" and output.of.kind == "parameter"
    return AotInput("tangent", str(desc), of_parameter=changed)


def _classify_output(desc: Any) -> AotOutput:
    kind = type(desc).__name__
    if kind == "PlainAOTOutput":
        return AotOutput("output", index=desc.idx)
    if kind == "GradAOTOutput":
        return AotOutput("gradient", of=_classify_input(desc.grad_of))
    if kind == "InputMutationAOTOutput":
        return AotOutput("mutation", of=_classify_input(desc.mutated_input))
    return AotOutput("base")  # what torch adds to rebuild outputs that are views of each other


class _Any:
    """Equal to every size and to every stride."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


_ANY: Any = _Any()


_FIRST_CALL_CHECK: type[Any] | None = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", None)
"""The dispatch mode under which torch runs the first call of what it compiles; None for a torch without it."""


def without_first_call_check(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """What a first call runs as every later one does: outside of torch's look at how custom ops share memory.

    Torch looks under a dispatch mode in the first call of each compiled callable (``check_custom_op_aliasing``). Some
    kernels give other results under any such mode, ``torch.linalg.pinv`` of complex matrices wrong ones. Switched off
    by the setting, the look would only wait for the next call.

    Args:
        run: takes its arguments in a list.
    """
    if _FIRST_CALL_CHECK is None:
        return run
    check = _FIRST_CALL_CHECK

    @functools.wraps(run)
    def call(args: list[Any]) -> Any:
        if torch._C._len_torch_dispatch_stack() and isinstance(_get_current_dispatch_mode(), check):
            with _pop_mode_temporarily():
                return run(args)
        return run(args)

    return call


def _graphs_are_read() -> bool:
    """Whether what torch logs of graphs goes anywhere (``TORCH_LOGS``, ``TORCH_TRACE``): it prints them in any case."""
    logs = [getattr(graph_compile, name, None) for name in ("aot_graphs_log", "aot_joint_log")]
    if any(log is None or log.isEnabledFor(logging.INFO) for log in logs):
        return True
    # torch's handler is there from the start, with the folder that it would write to
    return any(getattr(each, "root_dir", "") is not None for each in logging.getLogger("torch.__trace").handlers)


class JointTrace:
    """A captured joint graph and what is needed to turn a rewritten version of it into a differentiable callable."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        has_gradient: Callable[[AotInput], bool] | None = None,
    ) -> None:
        """Capture a module.

        Args:
            module: what is captured.
            args: its arguments.
            has_gradient: for a module that computes nothing: whether an input of it has a gradient.
        """
        written: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if has_gradient is not None:
            written = written_joint(lambda desc: has_gradient(_classify_input(desc)))
        # torch wants the stack open until compilation; but its contexts make every tensor op of the thread fake, and
        # user code runs in between. Nothing that compile() does below needs them.
        with (
            contextlib.ExitStack() as stack,
            torch.enable_grad(),
            plain_checks(),
            hooks_of_users_modules(),
            written,
        ):
            self._joint = aot_export_joint_with_descriptors(
                stack, module, args, decompositions={}, keep_inference_input_mutations=True
            )
        self.graph: fx.Graph = self._joint.graph_module.graph

    def inputs(self) -> list[tuple[fx.Node, AotInput]]:
        """Each placeholder with what it stands for, in calling order."""
        return [(n, _classify_input(n.meta["desc"])) for n in self.graph.nodes if n.op == "placeholder"]

    def outputs(self) -> list[tuple[Any, AotOutput]]:
        """Each output value (a node, a constant or None) with what it stands for, in order."""
        return [(value, _classify_output(desc)) for value, desc in self._raw_outputs() if value is not None]

    def _raw_outputs(self) -> list[tuple[Any, Any]]:
        node = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        flat = pytree.tree_leaves(node.args[0], is_leaf=lambda x: x is None)
        return list(zip(flat, node.meta["desc"], strict=True))

    def backward_layout(self) -> list[bool]:
        """For each input that backward may answer for, in order: whether it has a gradient."""
        values = [value is not None for value, _ in self._raw_outputs()]
        number = sum(1 for value, role in self.outputs() if role.kind != "gradient")
        return values[number:]

    @property
    def requires_grad(self) -> bool:
        """Whether there is a backward at all."""
        return any(desc.kind == "tangent" for _, desc in self.inputs())

    def parameter_order(self) -> list[str]:
        """The names of the module's parameters and buffers in the order in which the compiled callable takes them."""
        return [str(role.target) for _, role in self.inputs() if role.kind in ("parameter", "buffer")]

    def gradient_routes(self) -> GradientRoutes:
        """Where gradients come in, as torch notes it (``OutputAliasInfo``)."""
        metadata = attribute(self._joint, "_aot_state.fw_metadata", JOINT)
        outputs: list[tuple[str, int | None]] = [
            (info.output_type.name, info.base_idx) if info.requires_grad else ("", None)
            for info in metadata.output_info
        ]
        bases: dict[int, tuple[int, ...]] = {}
        views: dict[int, int] = {}
        returned: dict[int, tuple[int, ...]] = {}
        for number, (kind, base) in enumerate(outputs):
            if base is not None and kind in ("alias_of_intermediate", "alias_of_intermediate_save_as_output"):
                bases[base] = (*bases.get(base, ()), number)
            if base is not None and kind in ("alias_of_input", "is_input"):
                views[number] = base
            if base is not None and kind == "alias_of_intermediate_base_is_user_output":
                returned[base] = (*returned.get(base, (base,)), number)
        arguments = [role for _, role in self.inputs() if role.kind != "tangent"]
        tangents: list[tuple[int, ...]] = []
        changed: dict[int, int] = {}
        remaining = iter(sorted(bases))
        for node in self.graph.find_nodes(op="placeholder"):
            desc = node.meta["desc"]
            if _classify_input(desc).kind != "tangent":
                continue
            output = _classify_output(desc.output)
            if output.kind == "mutation":
                changed[len(tangents)] = arguments.index(output.of)  # type: ignore[arg-type]
            direct = () if output.index is None else (output.index,)
            tangents.append(bases[next(remaining)] if output.kind == "base" else direct)
        together = [group for group in (*bases.values(), *returned.values()) if len(group) > 1]
        return GradientRoutes(tangents, changed, views, together)

    def returns_arguments(self) -> bool:
        """Whether a result is an argument, a parameter, or a view of one."""
        metadata = attribute(self._joint, "_aot_state.fw_metadata", JOINT)
        plain = ("non_alias", "unsafe_view_alias", "custom_function_view")
        return any(info.output_type.name not in plain for info in metadata.output_info)

    def compile(
        self,
        partition: Callable[[], tuple[fx.GraphModule, fx.GraphModule]],
        forward_compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
        backward_compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
        *,
        tangents_as_they_are: bool = False,
        changes_halves: bool = True,
    ) -> Callable[..., Any]:
        """A differentiable callable ``f(*parameters_and_buffers, *inputs)`` made of the two given halves.

        Args:
            partition: makes them.
            forward_compiler: compiles the first.
            backward_compiler: compiles the second.
            tangents_as_they_are: give tangents to the second half in the strides in which they arrive, as eager mode
                does, where kernels round by layout; torch would copy them into the strides of the outputs.
            changes_halves: whether the compilers change what they are given; where they do not, the second half is not
                copied for its compiler.
        """
        halves: list[fx.GraphModule] = []

        def partition_fn(*_: Any, **__: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            forward, backward = partition()
            halves.append(backward)
            if not changes_halves:
                vars(backward)["__deepcopy__"] = lambda _: backward
            return forward, backward

        state = attribute(self._joint, "_aot_state", JOINT)
        state.aot_config = replace(state.aot_config, enable_log=_graphs_are_read())
        # Donated buffers are freed by the first backward; retain_graph=True would fail.
        with functorch_config.patch(donated_buffer=False):
            compiled = aot_compile_joint_with_descriptors(
                self._joint,
                partition_fn=partition_fn,
                fw_compiler=lambda *half: without_first_call_check(forward_compiler(*half)),  # type: ignore[arg-type]
                bw_compiler=backward_compiler,  # type: ignore[arg-type]
            )
        for half in halves:
            vars(half).pop("__deepcopy__", None)
        if tangents_as_they_are:
            for meta in attribute(self._joint, "_aot_state.fw_metadata.subclass_tangent_meta", JOINT):
                if isinstance(meta, PlainTensorMeta):
                    meta.memory_format = MemoryFormatMeta(size=_ANY, stride=_ANY)
        # The check for retain_graph=True reads this list, and takes its absence for a donation.
        attribute(self._joint, "_aot_state.fw_metadata", JOINT).bw_donated_idxs = []
        return compiled
