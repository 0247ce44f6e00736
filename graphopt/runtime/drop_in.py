"""The captures behind an optimized model: each compiled into a function that autograd differentiates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from graphopt.capture import CaptureSession
from graphopt.capture.flatten import Structure
from graphopt.capture.hidden_effects import CAPTURE_LOCK
from graphopt.capture.joint import JointCapture
from graphopt.errors import GraphoptError
from graphopt.ir.autocast import plain_precision
from graphopt.ir.node import InputSpec
from graphopt.ir.program import Program
from graphopt.rewriting.precision.scaling import CheckedGradients, checked_gradients
from graphopt.runtime.binding import tensor_getter
from graphopt.runtime.compile.backend import Boxed, compile_module
from graphopt.runtime.compile.partition import bind_state, partition, take_any_strides
from graphopt.runtime.missing_gradients import MissingGradients
from graphopt.runtime.runner import Capture, Options, Runner

__all__ = ["DropIn"]


@dataclass
class _Compiled(Capture):
    """One capture, compiled into a differentiable function of parameters, buffers and inputs."""

    outputs: Structure
    forward: fx.GraphModule
    backward: fx.GraphModule
    function: Callable[..., Any]
    inputs: list[Callable[[], torch.Tensor]]
    tangents: MissingGradients
    checked: CheckedGradients | None

    def gather(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments of the function for the tensors of a call."""
        return [*(get() for get in self.inputs), *tensors]

    def call(self, arguments: list[torch.Tensor]) -> Any:
        """What the model returns."""
        if not self.tangents.needed:
            with plain_precision():
                return self.outputs.restore(self.function(*arguments))
        reached, arguments = self.tangents.before(arguments)
        with plain_precision():
            flat = self.function(*arguments)
        return self.outputs.restore(self.tangents.after(reached, flat))


class DropIn:
    """What an optimized model owns beside the parts of the model that it was made from.

    Args:
        original: the class of that model.
        options: as the user gave them.
        parameter: the parameter of a name.
        plain: gives the model as an object of its original class.

    Attributes:
        scaler: the scaler that the model shares its loss scale with, once there is one.
    """

    def __init__(
        self,
        original: type[nn.Module],
        options: Options,
        parameter: Callable[[str], torch.Tensor],
        plain: Callable[[], nn.Module],
    ) -> None:
        self.original = original
        self.options = options
        self.runner: Runner[_Compiled] = Runner(options, "joint", parameter)
        self.scaler: Any = None
        self._plain = plain

    @property
    def latest(self) -> _Compiled:
        """The capture that served the latest call.

        Raises:
            GraphoptError: before the first one.
        """
        latest = self.runner.captures.latest
        if latest is None:
            raise GraphoptError(
                "nothing is captured yet: call the model once in training mode, or give example_inputs="
            )
        return latest

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the program for a call of the model."""
        with CAPTURE_LOCK:
            found, tensors = self.runner.find(model, args, kwargs, lambda: self._capture(args, kwargs))
            arguments = found.gather(tensors)
        return found.call(arguments)

    def prepare(self, model: nn.Module, example_inputs: Any) -> None:
        """Capture for positional example inputs."""
        self.runner.find_example(model, example_inputs, lambda args: self._capture(args, {}))

    def checked(self) -> list[tuple[CheckedGradients, torch.Tensor]]:
        """What the programs check for infinities, with the tensors in which they note it."""
        found = [capture.checked for capture in self.runner.captures.all() if capture.checked is not None]
        return [(checked, self.runner.store[checked.target]) for checked in found]

    def _capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Compiled:
        plain, runner = self._plain(), self.runner
        session = CaptureSession(plain, args, kwargs, dynamic_shapes=self.options.dynamic_shapes)
        capture = runner.rewrite(session)
        program, joint = capture.rewritten.program, session.joint
        assert joint is not None
        if not runner.captures.all():
            runner.prepare(program, plain)
        runner.make_ready(program)
        forward, backward, function = self._compile(program, joint)
        runner.announce(capture)
        targets = [spec.target for spec in joint.inputs]
        return _Compiled(
            capture.rewritten,
            capture.rules,
            session.forward.outputs,
            forward,
            backward,
            function,
            [_getter(plain, program, spec) for spec in joint.inputs],
            MissingGradients(program, targets),
            checked_gradients(program),
        )

    def _compile(
        self, program: Program, joint: JointCapture
    ) -> tuple[fx.GraphModule, fx.GraphModule, Callable[..., Any]]:
        """The two halves of a joint program, and the function that autograd differentiates by them."""
        backend = self.options.backend
        live = {target: self.runner.store[target] for target in program.pass_state}
        forward, backward = partition(program, joint.trace.backward_layout(), live)
        # forward begins with what is resident, so that it may take what the whole program takes at its peak
        room = program.memory().allocated_peak_bytes if backend == "inductor" else 0

        def compiler(part: Literal["forward", "backward"], module: fx.GraphModule, inputs: Any) -> Boxed:
            bind_state(module, program, live)
            run = compile_module(module, list(inputs), backend, room=room if part == "forward" else 0)
            return self.runner.watch.guard(run, module, program, part)

        function = joint.trace.compile(
            lambda: (forward, backward),
            functools.partial(compiler, "forward"),
            functools.partial(compiler, "backward"),
            tangents_as_they_are=backend == "eager" and take_any_strides(backward),
        )
        return forward, backward, function


def _getter(model: nn.Module, program: Program, spec: InputSpec) -> Callable[[], torch.Tensor]:
    """Fetches a parameter, buffer or constant."""
    if spec.role != "constant":
        return tensor_getter(model, spec.target)
    name = next(node.name for node, known in program.inputs_of("constant") if known.target == spec.target)
    constant = program.constants[name]
    return lambda: constant
