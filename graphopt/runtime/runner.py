"""From a call to a program that runs: what `optimize` and `optimize_step` share.

A call's signature decides which capture serves it. One that is new is captured, rewritten by the passes and checked;
then passes prepare the model, ranks agree on what they are going to exchange, and what passes keep gets its memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.capture.call_checks import check_dynamic_shapes
from graphopt.capture.checks import refuse_wrapped
from graphopt.capture.fingerprint import ModelFingerprint
from graphopt.capture.flatten import flatten_call
from graphopt.capture.hidden_effects import CAPTURE_LOCK
from graphopt.errors import CaptureError, choice, shown
from graphopt.ir.context import Context
from graphopt.ir.node import Stage
from graphopt.ir.program import Program
from graphopt.rewriting.pipeline import Passes, Pipeline
from graphopt.runtime.captures import Captures, SizeRule, size_rules
from graphopt.runtime.changing_sizes import ChangingSizes
from graphopt.runtime.changing_values import ChangingValues
from graphopt.runtime.check_numerics import check_numerics
from graphopt.runtime.compile.backend import Backend, check_backend
from graphopt.runtime.observers import tell_observers
from graphopt.runtime.ranks.agreement import Agreement
from graphopt.runtime.ranks.watch import StepWatch
from graphopt.runtime.reserve import reserve_host
from graphopt.runtime.rewrite import Rewritten, Verify, rewrite
from graphopt.runtime.signature import signature
from graphopt.runtime.state_store import StateStore
from graphopt.runtime.stored.program_cache import ProgramCache

__all__ = ["Capture", "Options", "Runner"]

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
    ) -> Options:
        """The options, where they fit together.

        Raises:
            ArgumentError: for sizes or a check of another form.
            CaptureError: for a model that is wrapped.
            GraphoptError: for a backend that there is not.
            PipelineError: where the passes do not fit together.
        """
        refuse_wrapped(model)
        check_backend(backend)
        check_dynamic_shapes(dynamic_shapes)
        if verify not in (True, False):
            verify = cast(Verify, choice("verify", verify, ("structure", "numerics"), {"off": "", "none": ""}) or False)
        return cls(passes if isinstance(passes, Pipeline) else Pipeline(passes), dynamic_shapes, backend, verify)


@dataclass
class Capture:
    """One capture: what passes made of it, and which sizes it serves."""

    rewritten: Rewritten
    rules: list[SizeRule]


C = TypeVar("C", bound=Capture)


class Runner(Generic[C]):
    """The captures of one model or step, by call signature, and what their programs share.

    Args:
        options: as the user gave them.
        until: the stage of the programs that run: joint or step.
        parameter: the parameter of a name, for pass state that starts as a copy of one.
        numbers: of a step's clock (``Context.numbers``).

    Attributes:
        captures: by signature.
        store: the tensors that passes keep across runs.
        watch: of the ranks that programs exchange with.
        names: of the positional arguments of a call, as far as they have names.
        cache: of captures, beyond this process.
    """

    def __init__(
        self,
        options: Options,
        until: Stage,
        parameter: Callable[[str], torch.Tensor],
        numbers: dict[str, float] | None = None,
    ) -> None:
        self.options = options
        self.captures: Captures[C] = Captures()
        self.store = StateStore(parameter)
        self.watch = StepWatch()
        self._until: Stage = until
        self._agreement = Agreement()
        self._fingerprint = ModelFingerprint()
        self._told: set[str] = set()
        self._sizes = ChangingSizes()
        self._values = ChangingValues()
        self.names: Sequence[str] = ()
        self.cache = ProgramCache(options.pipeline, until, options.backend, options.verify, options.dynamic_shapes)
        self._context = Context(numbers={} if numbers is None else numbers, compiled=options.backend != "eager")

    def find(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], capture: Callable[[], C]
    ) -> tuple[C, list[torch.Tensor]]:
        """The capture that serves a call, made by ``capture`` where there is none, and the tensors of the call.

        To be called, and the program's inputs to be gathered, with ``CAPTURE_LOCK`` held: while another thread
        captures, the model's parameters are stand-ins without data.
        """
        tensors, structure = flatten_call(args, kwargs)
        sizes = self.options.dynamic_shapes is None
        key = signature(self._fingerprint(model), structure, tensors, sizes=sizes)
        found = self.captures.find(key, tensors)
        if found is None:
            parts, first = list(map(id, model.modules())), self.is_first
            started = time.perf_counter()
            found = self.captures.add(key, capture())
            seconds = time.perf_counter() - started
            told = [self._sizes.note(self.names, args, kwargs, seconds) if sizes else ""]
            told.append(self._values.note(self.names, args, kwargs, seconds))
            for words in filter(None, told):
                logger.warning("%s: %s", type(model).__name__, words)
            after = signature(self._fingerprint(model), structure, tensors, sizes=sizes)
            # Where forward has set something while it was captured, or made modules, the next call is another one,
            # behind the first capture; behind others what is set there (a list) is not what makes a difference.
            if after != key and not first and parts == list(map(id, model.modules())):
                self.captures.add(after, found)
        return found, tensors

    @property
    def is_first(self) -> bool:
        """Whether nothing is captured yet, so that what forward sets now is what its first call sets."""
        return not self.captures.all()

    def _tell_assignments(self, session: CaptureSession) -> None:
        names = [name for name in session.assigned if name not in self._told]
        self._told.update(names)
        if names:
            logger.warning(
                "forward of %s sets %s: a program computes tensors only, and does not set them at later calls",
                type(session.model).__name__,
                ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else ""),
            )

    def find_example(self, model: nn.Module, inputs: Any, capture: Callable[[tuple[Any, ...]], C]) -> C:
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
        with CAPTURE_LOCK:
            return self.find(model, tuple(inputs), {}, lambda: capture(tuple(inputs)))[0]

    def rewrite(self, session: CaptureSession, *, room: int | None = None) -> Capture:
        """Run the passes over a capture.

        Args:
            session: the capture.
            room: the bytes that its program may take where it is one part of a model (``Context.room``).

        Raises:
            RankError: where passes talk to other ranks, and that fails.
            VerifyError: for ``verify="numerics"``, where results differ.
        """
        options = self.options
        lookup = self.cache.look_up(session, self._context) if room is None else None
        if lookup is not None and lookup.found is not None:
            return Capture(*lookup.found)
        with self.watch.capturing(), contextlib.nullcontext() if lookup is None else lookup.listening():
            context = replace(self._context, room=room, plans={} if room is None else None)
            rewritten = rewrite(
                session, options.pipeline, until=self._until, verify=options.verify, context=context, log=room is None
            )
        self._tell_assignments(session)
        if options.verify == "numerics":
            check_numerics(rewritten)
        capture = Capture(rewritten, size_rules(session.captured.program))
        if lookup is not None:
            lookup.keep(rewritten, capture.rules)
        return capture

    def prepare(self, rewritten: Rewritten, model: nn.Module) -> None:
        """Let passes prepare the model, before the first program of all runs."""
        training = self.options.pipeline.training
        if training:
            with self.watch.meeting(rewritten.program):
                for current in training:
                    current.prepare(model)

    def make_ready(self, program: Program) -> None:
        """What has to be so before a program runs: pass state exists, host memory is there, ranks agree.

        Raises:
            GraphoptError: where one of these fails, with what is missing.
        """
        self.store.require(program.pass_state)
        reserve_host(program)
        with self.watch.meeting(program):
            self._agreement.check(program)

    def announce(self, capture: Capture) -> None:
        """Tell observers of a capture that is about to train."""
        tell_observers(capture.rewritten, not self.captures.all())
