"""`optimize`: a module that is used like the one it was made from, and whose training calls run a rewritten program."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import fx, nn

from graphopt.capture import CaptureSession
from graphopt.capture.checks import refuse_wrapped
from graphopt.capture.flatten import Structure, flatten
from graphopt.errors import CaptureError, GraphoptError, PipelineError
from graphopt.ir.autocast import plain_precision
from graphopt.ir.program import Program
from graphopt.report.console.escape import safe
from graphopt.report.console.overview import announce
from graphopt.report.notebook import Records, rewritten_html
from graphopt.rewriting.pipeline import Pass, Pipeline
from graphopt.rewriting.precision.scaling import CheckedGradients, checked_gradients
from graphopt.runtime.binding import tensor_getter
from graphopt.runtime.captures import Entries, SizeRule, size_rules
from graphopt.runtime.check_numerics import check_numerics
from graphopt.runtime.compile.backend import Backend, Boxed, check_backend, compile_module
from graphopt.runtime.compile.partition import bind_held, partition
from graphopt.runtime.missing_gradients import TangentFilter
from graphopt.runtime.ranks.agreement import Agreement
from graphopt.runtime.ranks.watch import StepWatch
from graphopt.runtime.reserve import reserve_host
from graphopt.runtime.rewrite import Rewritten, Verify, rewrite
from graphopt.runtime.signature import signature
from graphopt.runtime.state_store import HeldStore

__all__ = ["Optimized", "optimize"]

M = TypeVar("M", bound=nn.Module)


@dataclass
class _Entry:
    """One capture, compiled into a differentiable function of parameters, buffers and inputs."""

    rewritten: Rewritten
    rules: list[SizeRule]
    outputs: Structure
    forward: fx.GraphModule
    backward: fx.GraphModule
    function: Callable[..., Any]
    held: list[Callable[[], torch.Tensor]]
    tangents: TangentFilter
    checked: CheckedGradients | None


@dataclass(frozen=True)
class _Options:
    pipeline: Pipeline
    dynamic_shapes: Any
    backend: Backend
    verify: Verify


class Optimized(nn.Module):
    """What ``graphopt.optimize`` returns: the given model's class with a ``forward`` that runs a rewritten program.

    It shares parameters, buffers and submodules with the model it was made from. Training calls with gradients on run
    the program; calls in eval mode or without gradients run the plain ``forward``.
    """

    _graphopt_options: _Options
    _graphopt_entries: Entries[_Entry]
    _graphopt_class: type[nn.Module]
    _graphopt_held: HeldStore
    _graphopt_agreement: Agreement
    _graphopt_watch: StepWatch

    # --- looking -----------------------------------------------------------------------------------------------------

    def _graphopt_latest(self) -> _Entry:
        latest = self._graphopt_entries.latest
        if latest is None:
            raise GraphoptError(
                "nothing is captured yet: call the model once in training mode, or give example_inputs="
            )
        return latest

    @property
    def program(self) -> Program:
        """The rewritten joint program of the latest signature."""
        return self._graphopt_latest().rewritten.program

    @property
    def graph_module(self) -> fx.GraphModule:
        """The latest joint program as one generated module (autograd runs its two halves)."""
        return self.program.to_graph_module()

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The half that runs at the call; returns outputs, then what is kept for backward."""
        return self._graphopt_latest().forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The half that autograd runs; takes what was kept and the outputs' tangents, returns gradients."""
        return self._graphopt_latest().backward

    @property
    def snapshots(self) -> list[tuple[str, Program]]:
        """``(label, program)`` after capture, after each lowering and after each pass."""
        return self._graphopt_latest().rewritten.snapshots

    @property
    def records(self) -> Records:
        """What each pass did."""
        return Records(self._graphopt_latest().rewritten.records)

    def _repr_html_(self) -> str:
        inherited = getattr(self._graphopt_class, "_repr_html_", None)
        if inherited is not None:
            return str(inherited(self))
        passes = str(self._graphopt_options.pipeline) or "no passes"
        title = f"{self._graphopt_class.__name__}, optimized with {passes}"
        latest = self._graphopt_entries.latest
        if latest is None:
            return f"<div>{safe(title)}; nothing is captured yet</div><pre>{safe(self)}</pre>"
        return rewritten_html(title, latest.rewritten.program, latest.rewritten.records)

    # --- running -----------------------------------------------------------------------------------------------------

    def _graphopt_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        options = self._graphopt_options
        tensors, structure = flatten((args, kwargs), paths=False)
        key = signature(self, structure, tensors, sizes=options.dynamic_shapes is None)
        entry = self._graphopt_entries.get(key, tensors, lambda: self._graphopt_capture(args, kwargs))
        arguments = [*(get() for get in entry.held), *tensors]
        if not entry.tangents.needed:
            with plain_precision():
                return entry.outputs.restore(entry.function(*arguments))
        reached, arguments = entry.tangents.before(arguments)
        with plain_precision():
            flat = entry.function(*arguments)
        return entry.outputs.restore(entry.tangents.after(reached, flat))

    def _graphopt_plain(self) -> nn.Module:
        """This module as an object of the class it was made from, sharing everything, without the root's hooks."""
        plain = object.__new__(self._graphopt_class)
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if not k.startswith("_graphopt_")})
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            plain.__dict__[hooks] = OrderedDict()
        return plain

    def _graphopt_capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Entry:
        options = self._graphopt_options
        plain = self._graphopt_plain()
        session = CaptureSession(plain, args, kwargs, dynamic_shapes=options.dynamic_shapes)
        rewritten = rewrite(
            session, options.pipeline, until="joint", verify=options.verify, compiled=options.backend != "eager"
        )
        if options.verify == "numerics":
            check_numerics(rewritten, options.pipeline)
        joint = session.joint
        assert joint is not None
        watch = self._graphopt_watch
        with watch.meeting(rewritten.program):
            if not self._graphopt_entries.all():
                for current in options.pipeline.passes:
                    current.prepare(plain)
            self._graphopt_agreement.check(rewritten.program)
        self._graphopt_held.require(rewritten.program.held)
        live = {target: self._graphopt_held[target] for target in rewritten.program.held}
        reserve_host(rewritten.program)
        forward, backward = partition(rewritten.program, joint.trace.backward_layout(), live)
        # forward begins with what is resident, so that it may take what the whole program takes at its peak
        inductor = options.backend == "inductor"
        room = {"forward": rewritten.program.memory().allocated_peak_bytes if inductor else 0, "backward": 0}

        def compiler(part: Literal["forward", "backward"], module: fx.GraphModule, inputs: Any) -> Boxed:
            bind_held(module, rewritten.program, live)
            run = compile_module(module, list(inputs), options.backend, room=room[part])
            return watch.guard(run, module, rewritten.program, part)

        function = joint.trace.compile(
            lambda: (forward, backward),
            functools.partial(compiler, "forward"),
            functools.partial(compiler, "backward"),
        )
        constants = rewritten.program.constants
        held = [
            tensor_getter(plain, spec.target)
            if spec.role != "constant"
            else functools.partial(lambda tensor: tensor, constants[_constant_node(rewritten.program, spec.target)])
            for spec in joint.held
        ]
        if not self._graphopt_entries.all():
            announce(options.pipeline, rewritten)
        return _Entry(
            rewritten,
            size_rules(session.forward.program),
            session.forward.outputs,
            forward,
            backward,
            function,
            held,
            TangentFilter(rewritten.program, [spec.target for spec in joint.held]),
            checked_gradients(rewritten.program),
        )

    # --- copying -----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles hold the plain model, the options and what passes hold; they capture again when called."""
        plain = self._graphopt_plain()
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            plain.__dict__[hooks] = self.__dict__[hooks]
        options = self._graphopt_options
        held = self._graphopt_held.state_dict()
        return _rebuild, (plain, options.pipeline.passes, options.dynamic_shapes, options.backend, options.verify, held)


def _constant_node(program: Program, target: str) -> str:
    return next(node.name for node, spec in program.inputs_of("constant") if spec.target == target)


def _rebuild(
    plain: nn.Module, passes: Iterable[Pass], dynamic_shapes: Any, backend: Backend, verify: Verify,
    held: Mapping[str, torch.Tensor],
) -> nn.Module:  # fmt: skip
    result = optimize(plain, passes, dynamic_shapes=dynamic_shapes, backend=backend, verify=verify)
    result.__dict__["_graphopt_held"].load(held)
    return result


@functools.cache
def _optimized_class(cls: type[nn.Module]) -> type[Optimized]:
    """A subclass of a model's class under the same name, whose training calls run programs."""

    @functools.wraps(cls.forward)
    def forward(self: Optimized, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._graphopt_call(args, kwargs)
        return cls.forward(self, *args, **kwargs)

    body = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Optimized, cls), body)


def optimize(
    model: M,
    passes: str | Iterable[Pass] = (),
    *,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    backend: Backend = "eager",
    verify: Verify = "structure",
) -> M:
    """A module with the same parameters, ``state_dict`` keys and call, whose training calls run a rewritten program.

    The user's loop stays as it is: ``loss = criterion(model(x), y); loss.backward(); optimizer.step()``. Captures
    happen at the first call of each signature (shapes, dtypes, structure, training flags); calls in eval mode or under
    ``no_grad`` run the plain forward.

    Args:
        model: the bare module. It is not changed, and shares everything with the result.
        passes: ``Pass`` objects, or their text form (``"recompute{checkpoints=blocks.*}"``); in any order.
        example_inputs: positional inputs to capture with right away.
        dynamic_shapes: sizes that may vary, as for ``torch.export.export``.
        backend: ``"eager"`` (the generated code), ``"inductor"``, or ``callable(graph_module, inputs)`` applied to the
            forward and the backward half.
        verify: ``"structure"`` (the invariant table after each pass), ``"numerics"`` (also compare with the unrewritten
            program on the example inputs), or False.

    Returns:
        An object of a subclass of the model's class, with ``program``, ``snapshots``, ``records``, ``graph_module``,
        ``forward_graph`` and ``backward_graph`` to look at.

    Raises:
        PipelineError: where the passes do not fit together, or one needs the whole step.
        CaptureError: where the model cannot be captured.
    """
    refuse_wrapped(model)
    check_backend(backend)
    if isinstance(model, Optimized):
        raise CaptureError("the model is optimized already: give all passes to one call of graphopt.optimize")
    pipeline = passes if isinstance(passes, Pipeline) else Pipeline(passes)
    late = [p.name for p in pipeline.passes if p.stage == "step"]
    if late:
        raise PipelineError(
            f"{', '.join(late)} {'rewrites' if len(late) == 1 else 'rewrite'} the optimizer's update, which a drop-in "
            "model does not hold: use optimize_step"
        )
    result = object.__new__(_optimized_class(type(model)))  # type: ignore[arg-type]
    result.__dict__.update(model.__dict__)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        result.__dict__[hooks] = copy.copy(model.__dict__[hooks])
    result.__dict__["_graphopt_class"] = type(model)
    result.__dict__["_graphopt_options"] = _Options(pipeline, dynamic_shapes, backend, verify)
    result.__dict__["_graphopt_entries"] = Entries()
    result.__dict__["_graphopt_held"] = HeldStore(result.get_parameter)
    result.__dict__["_graphopt_agreement"] = Agreement()
    result.__dict__["_graphopt_watch"] = StepWatch()
    if example_inputs is not None:
        if not isinstance(example_inputs, (tuple, list)):
            raise CaptureError(f"example_inputs is a tuple of positional inputs, got {type(example_inputs).__name__}")
        tensors, structure = flatten((tuple(example_inputs), {}), paths=False)
        key = signature(result, structure, tensors, sizes=dynamic_shapes is None)
        result._graphopt_entries.get(key, tensors, lambda: result._graphopt_capture(tuple(example_inputs), {}))
    return result  # type: ignore[return-value]
