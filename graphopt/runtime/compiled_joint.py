"""A joint program compiled into a function that autograd differentiates."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.call.flatten import Structure
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.capture.joint.differentiation import JointCapture
from graphopt.errors import CaptureError
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.node import InputSpec
from graphopt.ir.program import Program
from graphopt.rewriting.precision.scaling import CheckedGradients, checked_gradients
from graphopt.runtime.compile.backend import Boxed, compile_module
from graphopt.runtime.compile.partition import bind_state, partition
from graphopt.runtime.compile.pruned_backward import run_pruned
from graphopt.runtime.programs.binding import stays, tensor_getter
from graphopt.runtime.programs.missing_gradients import MissingGradients
from graphopt.runtime.ranks.exchange_plan import ExchangePlan, exchange_plan
from graphopt.runtime.runner import Capture, Runner

__all__ = ["CompiledJoint", "compile_joint"]

_TWICE = (
    "{0} is differentiated a second time (create_graph=True, as for gradient penalties or Hessians), and its program "
    "has one backward only: for that, call the model that was given to graphopt.optimize; the two share all "
    "parameters. Or put the loss with the penalty into graphopt.optimize_step, which captures torch.autograd.grad in it"
)
_BATCHED = (
    "{0} is differentiated for several gradients at once (is_grads_batched=True, vectorize=True), which its backward "
    "cannot be: take one gradient after the other, or call the model that was given to graphopt.optimize; the two "
    "share all parameters"
)


_NONE_ADDED = (
    "of the gradients that this backward of {0} computes, none has been added to any .grad, since it is one node of "
    "autograd; in eager mode those of its last layers would have been"
)


@dataclass
class CompiledJoint(Capture):
    """One capture, compiled into a differentiable function of parameters, buffers and inputs.

    Attributes:
        outputs: the structure of what the model returns.
        forward: the half that runs at the call.
        backward: the half that autograd runs.
        function: takes parameters, buffers and constants, then the tensors of a call.
        inputs: gives the first of these, one by one.
        stay: which of these are one object until an assignment to the model.
        tangents: which outputs a gradient has to reach.
        checked: what the program checks for infinities, where it does.
        exchanges: what the program exchanges with other ranks.
        explained: whether a second derivative gives graphopt's error.
    """

    outputs: Structure
    forward: fx.GraphModule
    backward: fx.GraphModule
    function: Callable[..., Any]
    inputs: list[Callable[[], torch.Tensor]]
    stay: list[bool]
    tangents: MissingGradients
    checked: CheckedGradients | None
    exchanges: ExchangePlan
    explained: bool = False
    _resident: list[Callable[[], Any]] = field(default_factory=list[Any])
    _version: int | None = None

    def gather(self, tensors: list[torch.Tensor], version: int | None = None) -> list[torch.Tensor]:
        """The arguments of the function for the tensors of a call.

        Args:
            tensors: of the call.
            version: where it is that of the call before, parameters and buffers are the same objects as they were
                then, and are not looked up again; None looks up everything.
        """
        if version is None or version != self._version:
            found = [get() for get in self.inputs]
            self._remember(found, version)
        else:
            found = list(map(operator.call, self._resident))
        return found + tensors

    def _remember(self, found: list[torch.Tensor], version: int | None) -> None:
        """Keep what stays as long as the version does, by references that keep nothing alive."""
        self._version = version
        self._resident = [
            weakref.ref(tensor) if known else get
            for get, tensor, known in zip(self.inputs, found, self.stay, strict=True)
        ]

    def call(self, arguments: list[torch.Tensor]) -> Any:
        """What the model returns."""
        apart = self.tangents.apart(arguments) if self.tangents.unused else arguments
        if not self.tangents.needed:
            with plain_precision():
                return self.outputs.restore(self._run(apart, arguments))
        reached, given = self.tangents.before(apart)
        with plain_precision():
            flat = self._run(given, arguments)
        return self.outputs.restore(self.tangents.after(reached, flat, given, arguments))

    def _run(self, arguments: list[torch.Tensor], original: list[torch.Tensor]) -> Any:
        results = self.function(*arguments)
        if not self.explained:
            self.explained = True
            _torch.explain_second_derivatives(results, _TWICE.format(self.rewritten.program.title))
        resident = len(self.inputs)
        _torch.connect_second_derivatives(results, original[:resident], original[resident:])
        return results


@no_collection()
def compile_joint(
    runner: Runner[CompiledJoint],
    session: CaptureSession,
    capture: Capture,
    before_backward: Callable[[frozenset[str]], None] | None = None,
) -> CompiledJoint:
    """Compile what passes made of a capture of a model that is not a whole step.

    Args:
        runner: whose options and pass state count.
        session: the capture, lowered to its joint program.
        capture: the same with its passes.
        before_backward: called whenever backward is about to run, with the names of the tangents that do not come.
    """
    program, joint = capture.rewritten.program, session.joint
    assert joint is not None
    tangents = MissingGradients(program, [spec.target for spec in joint.inputs], joint.trace.gradient_routes())
    forward, backward, function = _compile(runner, program, joint, tangents, before_backward)
    return CompiledJoint(
        capture.rewritten,
        capture.rules,
        session.results(lambda: program),
        forward,
        backward,
        function,
        [_getter(session.model, program, spec) for spec in joint.inputs],
        [stays(spec, session.model) for spec in joint.inputs],
        tangents,
        checked_gradients(program),
        exchange_plan(program),
    )


def _compile(
    runner: Runner[CompiledJoint],
    program: Program,
    joint: JointCapture,
    missing: MissingGradients,
    before_backward: Callable[[frozenset[str]], None] | None,
) -> tuple[fx.GraphModule, fx.GraphModule, Callable[..., Any]]:
    """The two halves of a joint program, and the function that autograd differentiates by them."""
    backend = runner.options.backend
    live = {target: runner.store[target] for target in program.pass_state}
    layout = joint.trace.backward_layout()
    forward, backward, any_strides = partition(program, layout, live, any_strides=backend == "eager")
    # forward begins with what is resident, so that it may take what the whole program takes at its peak
    room = program.memory().allocated_peak_bytes if backend == "inductor" else 0

    def compiler(part: Literal["forward", "backward"], module: fx.GraphModule, inputs: Any) -> Boxed:
        bind_state(module, program, live)

        def compiled(half: fx.GraphModule) -> Boxed:
            run = compile_module(half, list(inputs), backend, room=room if part == "forward" else 0)
            return runner.watch.guard(run, half, program, part)

        if part == "forward":
            return compiled(module)
        if missing.needed:
            run = run_pruned(module, missing.names, missing.missing, compiled, takes_none=backend == "eager")
        else:
            run = compiled(module)
        return _before_backward(run, before_backward, program.title, len(tangents), missing)

    tangents = [node.name for node, _ in program.inputs_of("tangent")]
    function = joint.trace.compile(
        lambda: (forward, backward),
        functools.partial(compiler, "forward"),
        functools.partial(compiler, "backward"),
        tangents_as_they_are=any_strides,
        changes_halves=backend != "eager",
    )
    return forward, backward, function


def _before_backward(
    run: Boxed, tell: Callable[[frozenset[str]], None] | None, title: str, tangents: int, missing: MissingGradients
) -> Boxed:
    """Backward, whose last arguments are gradients, with what is told before it; each of these has to be one tensor."""

    def call(args: list[Any]) -> Any:
        if tell is not None:
            tell(missing.missing(ask_again=True) if missing.needed else frozenset())
        if any(map(_torch.is_batched, args[len(args) - tangents :])):
            raise CaptureError(_BATCHED.format(title))
        try:
            return run(args)
        except BaseException as error:
            error.add_note(_NONE_ADDED.format(title))
            raise

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _getter(model: nn.Module, program: Program, spec: InputSpec) -> Callable[[], torch.Tensor]:
    """Fetches a parameter, buffer or constant."""
    if spec.role != "constant":
        return tensor_getter(model, spec.target)
    name = next(node.name for node, known in program.inputs_of("constant") if known.target == spec.target)
    constant = program.constants[name]
    return lambda: constant
