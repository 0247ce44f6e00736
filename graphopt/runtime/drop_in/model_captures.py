"""The captures behind an optimized model: each compiled into a function that autograd differentiates."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.capture.call.call_checks import argument_names
from graphopt.capture.call.sharded_form import is_fully_sharded
from graphopt.capture.call.tensor_parallel_form import has_distributed_tensors
from graphopt.capture.effects.eager_trial import EagerCall, FailsInEagerError
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.errors import GraphBreakError, GraphoptError
from graphopt.ir.host import is_memory_shortage
from graphopt.ir.words.written_units import counted
from graphopt.rewriting.precision.scaling import CheckedGradients
from graphopt.runtime.calls.observers import tell_seconds
from graphopt.runtime.calls.size_rules import Target
from graphopt.runtime.compiled_joint import CompiledJoint, compile_joint
from graphopt.runtime.drop_in.set_forward import what_runs
from graphopt.runtime.drop_in.sharded_call import FullyShardedCalls, ShardedCalls
from graphopt.runtime.graph_breaks.parts import Parts
from graphopt.runtime.runner import Options, Runner

__all__ = ["DropIn"]

logger = logging.getLogger("graphopt")


class _ReplacedError(Exception):
    """A call in which other tensors stand in the place of parameters."""


class DropIn:
    """What an optimized model owns beside the parts of the model that it was made from.

    Args:
        original: the class of that model.
        options: as the user gave them.
        parameter: the parameter of a name.
        plain: gives the model as an object of its original class.

    Attributes:
        scaler: the scaler that the model shares its loss scale with, once there is one.
        parts: those of a model that cannot be captured whole, once that is known.
        sharded: what a model after ``fully_shard`` needs beside.
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
        self.runner: Runner[CompiledJoint] = Runner(options, "joint", parameter)
        self.scaler: Any = None
        self.parts: Parts | None = None
        self.sharded: ShardedCalls | None = None
        self._plain = plain
        self._told: set[str] = set()

    @property
    def latest(self) -> CompiledJoint:
        """The capture that served the latest call.

        Raises:
            GraphoptError: before the first one.
        """
        if self.parts is not None:
            raise GraphoptError(
                f"{self.original.__name__} runs in parts, since it cannot be captured whole: .programs has those of "
                "its parts"
            )
        latest = self.runner.captures.latest
        if latest is None:
            raise GraphoptError(
                "nothing is captured yet: call the model once in training mode, or give example_inputs="
            )
        return latest

    @property
    def used(self) -> bool:
        """Whether a program has been captured, whole or in parts."""
        return self.parts is not None or self.runner.captures.latest is not None

    def describe(self) -> str:
        """One line: that the model is optimized, with which passes, and what has been captured."""
        count = 0 if self.parts else len(self.runner.captures.all())
        captured = f"{counted(count, 'programs')} captured" if count else "nothing captured yet"
        if self.parts is not None:
            captured = f"{counted(self.parts.captured, 'parts')} captured, since it cannot be captured whole"
        return f"optimized by graphopt: {str(self.options.pipeline) or 'no passes'}; {captured}"

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the program for a call of the model."""
        given = what_runs(model)
        if self.parts is not None and self.parts.given is not given:
            self.parts = None
        if self.parts is None:
            try:
                with CAPTURE_LOCK, self._as_shards(), self.runner.agreement.reporting():
                    local = (args, kwargs) if self.sharded is None else self.sharded.local_inputs(args, kwargs)
                    found, tensors = self.runner.find(model, *local, _Maker(self, model, *local, True))
                    begun = self.runner.agreement.begin(found.exchanges)
                    arguments = found.gather(tensors, self.runner.serving.changes)
                if self.sharded is not None:
                    arguments = self.sharded.connected(arguments)
                self.runner.wait(begun, found.rewritten.program)
                return self._run(found, arguments, self._eager(given, model, args, kwargs))
            except _ReplacedError:
                why = "its parameters are other tensors in this call (torch.func.functional_call)"
                return self.run_as_it_is(given, model, args, kwargs, why)
            except FailsInEagerError as error:
                fails: str | None = _first_line(error)
            except GraphBreakError as error:
                if self.sharded is not None:
                    raise
                self.parts, fails = Parts(self.original, given, self.runner, error), None
            if fails is not None:  # behind the handler, so that no other error is shown above that of the user's code
                return self._tell_of(fails, self._eager(given, model, args, kwargs).run())
        assert self.parts is not None
        return self.parts.call(model, args, kwargs)

    def _eager(
        self, given: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> EagerCall:
        """A call of the model as eager mode has it."""
        if self.sharded is not None:
            given = functools.partial(_unpacked, functools.partial(self.eager, given))
        return EagerCall(given, model, args, kwargs, autocast=self.options.pipeline.autocast)

    def _run(self, found: CompiledJoint, arguments: list[torch.Tensor], eager: EagerCall) -> Any:
        """Run a program; where that fails, and the call fails in eager mode, raise what is raised there."""
        try:
            return found.call(arguments)
        except GraphoptError:
            raise
        except Exception as error:
            if is_memory_shortage(error):
                raise
            failed = error
        eager.try_it()
        raise failed

    def run_as_it_is(
        self, given: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], why: str
    ) -> Any:
        """Run ``given`` for a call in eager mode; the first one for a reason is told, where it raises nothing."""
        return self._tell_of(why, self.eager(given, model, args, kwargs))

    def eager(
        self, given: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run ``given`` for a training call in eager mode."""
        if self.sharded is not None:
            return self.sharded.eager(given, model, args, kwargs)
        return given(model, *args, **kwargs)

    def look_for_shards(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """See whether the optimized model was sharded since the call before."""
        if self.sharded is not None:
            return
        if is_fully_sharded(model):
            self.sharded = FullyShardedCalls(model, model, self.options.pipeline)
            self.sharded.end_forward(args)
        elif not self.used and has_distributed_tensors(model):
            self.sharded = ShardedCalls(model, self.options.pipeline)

    def hooks_inside(self, hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
        """Those hooks of the model itself that are part of its program; all others act around it."""
        return OrderedDict() if self.sharded is None else self.sharded.hooks_inside(hooks)

    def _as_shards(self) -> contextlib.AbstractContextManager[None]:
        """While a call is looked at and captured: a model after ``fully_shard`` as its program sees it."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.as_shards()

    def _tell_of(self, why: str, result: Any) -> Any:
        """What a call in eager mode has given, told where it is the first one for a reason."""
        if why not in self._told:
            self._told.add(why)
            logger.warning(
                "%s runs in eager mode where %s: no pass acts there, and its bytes are not counted",
                self.original.__name__,
                why,
            )
        return result

    def prepare(self, model: nn.Module, example_inputs: Any) -> None:
        """Capture for positional example inputs."""
        try:
            with CAPTURE_LOCK, self._as_shards():
                found = self.runner.find_example(model, example_inputs, lambda args: _Maker(self, model, args, {}))
            self.runner.compare_new(found.rewritten.program, found.exchanges)
        except GraphBreakError as error:
            if self.sharded is not None:
                raise
            self.parts = Parts(self.original, what_runs(model), self.runner, error)
            self.parts.tell_beforehand()

    def checked(self) -> list[tuple[CheckedGradients, torch.Tensor]]:
        """What the programs check for infinities, with the tensors in which they note it."""
        found = [capture.checked for capture in self.runner.serving.everything() if capture.checked is not None]
        return [(checked, self.runner.store[checked.target]) for checked in found]

    @property
    def plain(self) -> nn.Module:
        """The model as an object of its original class."""
        return self._plain()


def _unpacked(run: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run(model, args, kwargs)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


@dataclass(frozen=True)
class _Maker:
    """Captures a call of an optimized model; ``to_run`` where it is run, and not only prepared for."""

    owner: DropIn
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    to_run: bool = False

    @property
    def runs(self) -> Callable[..., Any]:
        """See ``Maker``."""
        return what_runs(self.model)

    def session(self, dynamic_shapes: Any) -> CaptureSession:
        """See ``Maker``."""
        if any(
            not isinstance(p, nn.Parameter)
            for m in self.model.modules()
            for p in m._parameters.values()
            if p is not None
        ):
            raise _ReplacedError
        plain, runner = self.owner.plain, self.owner.runner
        runner.serving.names = argument_names(plain, None)
        session = CaptureSession(plain, self.args, self.kwargs, dynamic_shapes=dynamic_shapes)
        session.keep, session.by_values = runner.is_first, True
        session.to_run = self.to_run
        return session

    def compile(self, session: CaptureSession, target: Target | None) -> CompiledJoint:
        """See ``Maker``."""
        runner, plain = self.owner.runner, session.model
        capture = runner.rewrite(session, target=target)
        if target is None:
            vars(self.model).update({name: vars(plain)[name] for name in session.assigned if name in vars(plain)})
        program = capture.rewritten.program
        if runner.is_first:
            runner.prepare(capture.rewritten, plain)
        runner.make_ready(program)
        started = time.perf_counter()
        sharded, begins = self.owner.sharded, None
        if sharded is not None:
            begins = sharded.before_backward(program, session.tensors(), runner.store)
        compiled = compile_joint(runner, session, capture, before_backward=begins)
        parameters: dict[str, Any] = dict(plain.named_parameters())
        if sharded is not None:
            parameters |= sharded.users
        runner.tell_hooks(type(plain).__name__, parameters, some_missing=compiled.tangents.needed)
        capture.rewritten.compiling = time.perf_counter() - started if self.owner.options.backend != "eager" else 0.0
        tell_seconds(capture.rewritten, first=runner.announce(capture))
        return compiled
