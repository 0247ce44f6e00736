"""From a call to a program that runs: what `optimize` and `optimize_step` share.

A call's signature decides which capture serves it. One that is new is captured, rewritten by the passes and checked;
then passes prepare the model, ranks agree on what they are going to exchange, and what passes keep gets its memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.capture.call.call_checks import check_dynamic_shapes
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.capture.dynamo.graph_part import GraphPart
from graphopt.capture.effects.checks import refuse_wrapped
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.capture.guards.fingerprint import has_hooks
from graphopt.errors import CaptureError, GraphoptError, choice, shown
from graphopt.ir.context import Context, GraphPartContext, PlannedSizes, PlanStore, StepContext
from graphopt.ir.node import Stage
from graphopt.ir.program import Program
from graphopt.rewriting.memory.fit.budget import budget_error
from graphopt.rewriting.pipeline import Passes, Pipeline
from graphopt.rewriting.progress import working
from graphopt.rewriting.training_pass import TrainingPass
from graphopt.runtime.calls.captures import Captures
from graphopt.runtime.calls.observers import tell_observers
from graphopt.runtime.calls.serving import Capture, Maker, Serving
from graphopt.runtime.calls.size_rules import Target
from graphopt.runtime.compile.backend import Backend, check_backend
from graphopt.runtime.programs.check_numerics import check_numerics
from graphopt.runtime.programs.host_reservation import reserve_host
from graphopt.runtime.programs.rewrite import Checks, Rewritten, Verify, capturing, rewrite
from graphopt.runtime.ranks.agreement import Agreement, Round
from graphopt.runtime.ranks.exchange_plan import ExchangePlan
from graphopt.runtime.ranks.watch import StepWatch
from graphopt.runtime.state.state_store import StateStore
from graphopt.runtime.stored.program_cache import ProgramCache

__all__ = ["Capture", "Maker", "Options", "Runner"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How a model or a step is captured, rewritten and compiled: what ``optimize`` and ``optimize_step`` are given."""

    pipeline: Pipeline
    dynamic_shapes: Any
    backend: Backend
    verify: Verify

    @classmethod
    def checked(
        cls,
        model: nn.Module,
        passes: Passes | Pipeline,
        dynamic_shapes: Any,
        backend: Backend,
        verify: Verify,
        fully_sharded: bool = False,
        distributed: bool = False,
    ) -> Options:
        """The options, where they fit together; the last two as ``refuse_wrapped`` takes them.

        Raises:
            ArgumentError: for sizes or a check of another form.
            CaptureError: for a model that is wrapped.
            GraphoptError: for a backend that there is not.
            PipelineError: where the passes do not fit together.
        """
        refuse_wrapped(model, fully_sharded=fully_sharded, distributed=distributed)
        check_backend(backend)
        if not (isinstance(dynamic_shapes, str) and dynamic_shapes == "auto"):
            check_dynamic_shapes(dynamic_shapes)
        if verify not in (True, False):
            verify = cast(Verify, choice("verify", verify, ("structure", "numerics"), {"off": "", "none": ""}) or False)
        return cls(passes if isinstance(passes, Pipeline) else Pipeline(passes), dynamic_shapes, backend, verify)


C = TypeVar("C", bound=Capture)


def _first_five(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Runner(Generic[C]):
    """The captures of one model or step, by call signature, and what their programs share.

    Args:
        options: as the user gave them.
        until: the stage of the programs that run: joint or step.
        parameter: the parameter of a name, for pass state that starts as a copy of one.
        numbers: of a step's clock (``StepContext.numbers``).
        there: whether the optimizer's state, or a gradient so far, is in memory (``StepContext.there``).

    Attributes:
        serving: finds what serves a call.
        store: the tensors that passes keep across runs.
        watch: of the ranks that programs exchange with.
        agreement: of these ranks on what they exchange.
        cache: of captures, beyond this process.
    """

    def __init__(
        self,
        options: Options,
        until: Stage,
        parameter: Callable[[str], torch.Tensor],
        numbers: dict[str, float] | None = None,
        there: Callable[[str, str], bool] | None = None,
    ) -> None:
        self.options = options
        self.serving: Serving[C] = Serving(
            options.dynamic_shapes, options.pipeline.passes, examples_stay=options.verify == "numerics"
        )
        self.store = StateStore(parameter)
        self.watch = StepWatch()
        self._until: Stage = until
        self.agreement = Agreement(options.pipeline.groups)
        self._told: set[str] = set()
        self.cache = ProgramCache(options, until)
        self._there = there
        self._context = Context(
            compiled=options.backend != "eager",
            step=StepContext(numbers={} if numbers is None else numbers, there=self._is_there),
        )

    def find(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], maker: Maker[C]
    ) -> tuple[C, list[torch.Tensor]]:
        """The capture that serves a call, made by ``maker`` where there is none, and the tensors of the call.

        To be called, and the program's inputs to be gathered, while the caller owns ``CAPTURE_LOCK``: while another
        thread captures, the model's parameters are stand-ins without data.
        """
        return self.serving.find(model, args, kwargs, maker)

    def _is_there(self, role: str, target: str) -> bool:
        if role == "pass_state":
            return target in self.store
        return self._there is not None and self._there(role, target)

    @property
    def captures(self) -> Captures[C]:
        """The captures by signature."""
        return self.serving.captures

    @property
    def changes(self) -> int:
        """How often the model was found changed (``ModelFingerprint.changes``)."""
        return self.serving.changes

    @property
    def is_first(self) -> bool:
        """Whether nothing is captured yet, so that what forward sets now is what its first call sets."""
        return not self.captures.all()

    def _untold(self, names: Sequence[str]) -> list[str]:
        """Those that no warning has named so far, which count as named from then on."""
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        return new

    def _tell_assignments(self, session: CaptureSession) -> None:
        names = self._untold(session.assigned)
        if names:
            logger.warning(
                "%sforward of %s sets %s: a program computes tensors only, and does not set them at later calls",
                "the loss or " if callable(session.loss) else "",
                type(session.model).__name__,
                _first_five(names),
            )

    def _tell_effects(self, session: CaptureSession) -> None:
        names = self._untold([effect.words for effect in session.effects])
        if names:
            logger.warning(
                "%sforward of %s %s: a program has what there was at its capture, and does nothing of this later",
                "the loss or " if callable(session.loss) else "",
                type(session.model).__name__,
                _first_five(names),
            )

    def _tell_left_out(self, session: CaptureSession) -> None:
        names = self._untold(session.left_out)
        if names:
            logger.warning(
                "%s: %s of its result is None, since a program returns no cache of keys and values, which is for "
                "generating text; with config.use_cache = False there is none in eager mode either",
                type(session.model).__name__,
                ", ".join(names),
            )

    def _tell_outside(self, session: CaptureSession) -> None:
        lines = self._untold(session.outside)
        if lines:
            logger.warning(
                "%s computes with tensors that require gradients, and are neither its parameters nor the optimizer's: "
                "a whole step computes no gradients for them (%s)",
                type(session.model).__name__,
                "; ".join(lines[:3]) + (f", and {len(lines) - 3} more lines" if len(lines) > 3 else ""),
            )

    def tell_hooks(self, title: str, parameters: Mapping[str, Any], *, some_missing: bool) -> None:
        """Warn, once for each, where hooks of parameters are not called as in eager mode.

        Args:
            title: of what has one node of autograd for its backward.
            parameters: of it, by name.
            some_missing: whether a loss may leave some of their gradients out.
        """
        hooked = [f"{name}'s hooks" for name, parameter in parameters.items() if has_hooks(parameter)]
        told = self._untold(hooked) if len(hooked) > 1 or some_missing else []
        if told:
            logger.warning(
                "%s: %s run behind its whole backward, those of different parameters in another order than in eager "
                "mode%s",
                title,
                _first_five(told),
                ", and on None where the loss needs no gradient of a parameter" if some_missing else "",
            )

    def find_example(self, model: nn.Module, inputs: Any, maker: Callable[[tuple[Any, ...]], Maker[C]]) -> C:
        """The capture for ``example_inputs=``, the positional arguments of a call.

        Raises:
            CaptureError: where these are no tuple.
        """
        if isinstance(inputs, torch.Tensor):
            inputs = (inputs,)
        if not isinstance(inputs, (tuple, list)):
            raise CaptureError(
                f"example_inputs is a tuple with the positional arguments of a call, got {shown(inputs)}"
            )
        with CAPTURE_LOCK, self.agreement.reporting():
            return self.find(model, tuple(inputs), {}, maker(tuple(inputs)))[0]

    def rewrite(
        self,
        session: CaptureSession,
        *,
        room: int | None = None,
        plans: PlanStore | None = None,
        target: Target | None = None,
        divisor: int = 1,
    ) -> Capture:
        """Run the passes over a capture.

        Args:
            session: the capture.
            target: the sizes that it is planned for once more, where they vary.
            room: the bytes that its program may take where it is one part of a model (``Context.room``).
            plans: what passes have planned for the session before, where it is rewritten again (``Context.plans``).
            divisor: of the program of a step that accumulates (``Rewritten``).

        Raises:
            RankError: where passes talk to other ranks, and that fails.
            VerifyError: for ``verify="numerics"``, where results differ.
        """
        options = self.options
        part = GraphPartContext(room) if room is not None or isinstance(session.model, GraphPart) else None
        context = replace(self._context, part=part, plans=plans or PlanStore())
        lookup = self.cache.look_up(session, context, target)
        if lookup is not None and lookup.found is not None:
            return Capture(lookup.found, lookup.rules)
        listening = contextlib.nullcontext() if lookup is None else lookup.listening()
        started = time.perf_counter()
        with working(capturing(session)), self.watch.capturing(), self.agreement.making("a capture"), listening:
            session.forward(options.pipeline.autocast)
            wanted = self.serving.targets(session, target) if room is None else [None]
            rewritten = self._rewrite_for(session, wanted, context, divisor)
            self._tell_assignments(session)
            self._tell_effects(session)
            self._tell_left_out(session)
            self._tell_outside(session)
        if options.verify == "numerics":
            with working(f"comparing {session.title} with what it computes without passes"):
                check_numerics(rewritten)
        rewritten.seconds = time.perf_counter() - started
        rules = self.serving.rules(session)
        if lookup is not None:
            lookup.keep(rewritten, rules)
        return Capture(rewritten, rules)

    @no_collection()
    def _rewrite_for(
        self, session: CaptureSession, wanted: Sequence[Target | None], context: Context, divisor: int
    ) -> Rewritten:
        """Run the passes for the first of some sizes for which there is a plan."""
        options = self.options
        for target in wanted:
            if target is not None:
                context = replace(context, sizes=PlannedSizes(target.sizes, target.largest), plans=target.plans)
            try:
                return rewrite(
                    session,
                    options.pipeline,
                    until=self._until,
                    checks=Checks(options.verify, functools.partial(self.serving.check, session)),
                    context=context,
                    divisor=divisor,
                    log=context.room is None and target is None,
                )
            except GraphoptError as error:
                if target is wanted[-1] or not budget_error(error):
                    raise
        raise AssertionError("there is always something wanted")

    def prepare(self, rewritten: Rewritten, model: nn.Module) -> None:
        """Let passes prepare the model, before the first program of all runs."""
        training = self.options.pipeline.training
        if training:
            with self.watch.meeting(rewritten.program), self.agreement.making("the first step"):
                self.agreement.require_together("the first step of this rank")
                for current in training:
                    current.prepare(model)

    def make_ready(self, program: Program) -> None:
        """What has to be so before a program runs: its passes accept what is there, pass state exists, host memory too.

        Raises:
            GraphoptError: where one of these fails, with what is missing.
        """
        for current in self.options.pipeline.passes:
            if isinstance(current, TrainingPass):
                current.check(program, self.store.peek)
        self.store.require(program.pass_state)
        reserve_host(program)

    def wait(self, begun: Round, program: Program) -> None:
        """Before a program runs: wait until all ranks have said that they run the same.

        Args:
            begun: what ``agreement.begin`` gave.
            program: that is going to run.

        Raises:
            RankError: where they do not, or one of them is at fault.
        """
        if begun:
            with self.watch.meeting(program):
                begun.wait()

    def compare_new(self, program: Program, plan: ExchangePlan) -> None:
        """Behind a capture that no call asked for: compare what its program exchanges, if that is new.

        Raises:
            RankError: as ``wait`` raises it.
        """
        if plan.lines:
            with self.watch.meeting(program):
                self.agreement.compare_new(plan)

    def announce(self, capture: Capture) -> bool:
        """Tell observers of a capture that is about to train; gives whether it is the first one."""
        first = not self.captures.all()
        tell_observers(capture.rewritten, first)
        return first
