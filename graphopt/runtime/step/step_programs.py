"""The programs behind a whole step: captured for each signature, one for each thing that a call may have to do."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.call.call_checks import argument_names
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.capture.step.optimizer_tracer import state_target
from graphopt.capture.step.traced_update import has_state, settings, settings_key
from graphopt.errors import GraphoptError
from graphopt.ir.node import value_of
from graphopt.ir.ops import schema
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.ops.transfers import residents
from graphopt.ir.ops.updates.opaque_update import Evaluate
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_bytes
from graphopt.rewriting.distributed.sharding.named_shards import accept_named_shards, name_shards
from graphopt.rewriting.memory.fit.budget import BudgetError, budget_error
from graphopt.rewriting.precision.scaling import checked_gradients
from graphopt.rewriting.progress import working
from graphopt.rewriting.shards import shard_state
from graphopt.runtime.calls.observers import tell_later_program, tell_seconds
from graphopt.runtime.calls.size_rules import Target
from graphopt.runtime.compile.backend import compile_program
from graphopt.runtime.programs.accumulate import accumulating
from graphopt.runtime.programs.binding import Binding
from graphopt.runtime.programs.rewrite import Rewritten
from graphopt.runtime.ranks.exchange_plan import exchange_plan
from graphopt.runtime.runner import Options, Runner
from graphopt.runtime.state.state_versions import HeldParameters, optimizer_version
from graphopt.runtime.step.closures import asks_again, evaluate
from graphopt.runtime.step.kept_state import KeptState, resident_inputs
from graphopt.runtime.step.live_settings import follow_settings, with_numbers_read
from graphopt.runtime.step.step_progress import StepProgress
from graphopt.runtime.step.step_variants import (
    CapturedStep,
    CompiledStep,
    Kind,
    Variant,
    refused_budget,
    stored_name,
)

__all__ = ["StepPrograms"]

logger = logging.getLogger("graphopt")

_UNNOTICED = 4096
"""Bytes beside a predicted peak that nobody is told of."""


class StepPrograms:
    """Captures a step, and makes and compiles the program that a call needs.

    Args:
        model: updated in place.
        optimizer: over its parameters.
        loss: as ``optimize_step`` takes it.
        options: as the user gave them.

    Attributes:
        runner: the captures, by signature.
        progress: how far training is, which decides what a call has to do.
        kept: where model, optimizer and passes keep their tensors.
        weighed: whether gradients of ranks weigh differently in the next call.
        joins: whether they may do so in later ones.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any] | None,
        options: Options,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._options = options
        numbers: dict[str, float] = {}
        self.runner: Runner[CapturedStep] = Runner(options, "step", model.get_parameter, numbers, self._is_there)
        self.runner.serving.names = argument_names(model, loss)
        self.progress = StepProgress(options.pipeline, self.runner.store, self._rates, numbers)
        self.weighed = self.joins = False
        self._held = HeldParameters(model, optimizer)
        self._looked_at: Hashable = None
        self.kept = KeptState(model, optimizer, self.runner.store, self.progress, options.pipeline)
        self._trains_apart = options.pipeline.trains_apart

    def _is_there(self, role: str, target: str) -> bool:
        if role == "gradient":
            return target in self.progress.gradients
        return has_state(self._optimizer, self._model, target)

    def find(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, to_run: bool = False
    ) -> tuple[CapturedStep, list[torch.Tensor]]:
        """The capture that serves a call, and the tensors of the call.

        Args:
            args: positional parts of the batch.
            kwargs: those given by keyword.
            to_run: whether the call is run, and not only prepared for.
        """
        with _torch.without_dispatch_modes() if _torch.callers_modes()[1] else nullcontext():
            return self.runner.find(self._model, args, kwargs, _Maker(self, args, kwargs, to_run))

    def find_example(self, example_inputs: Any) -> CapturedStep:
        """The capture for ``example_inputs=``."""
        return self.runner.find_example(self._model, example_inputs, lambda args: _Maker(self, args, {}))

    def version(self) -> Hashable:
        """Another one after every assignment to the model's tensors or the optimizer's state; None where unknown."""
        state = optimizer_version(self._optimizer)
        return None if state is None else (self.runner.changes, state)

    def variant(self, captured: CapturedStep, version: Hashable = None) -> CompiledStep:
        """The compiled program that the next call needs, made at its first use.

        Args:
            captured: what serves the call.
            version: where it is that of the call before, the optimizer has the state that it had then; None looks.
        """
        if version is None or version != self._looked_at:
            self._held.check()
            self._looked_at = version
        seen = settings_key(self._optimizer)
        if seen != captured.seen:
            with self.runner.agreement.making("other settings"):
                follow_settings(captured, self._optimizer)
            captured.seen = seen
        if version is None or captured.looked_at != version:
            captured.missing, captured.beside = self._state(captured.rewritten)
            captured.looked_at = version
        coming = self._coming(captured.beside)
        if captured.ahead != coming:
            self._plan_ahead(captured.rewritten)
            captured.ahead = coming
        compiled = self._compiled(captured, self._due(captured))
        self.kept.settle(compiled.program, compiled.elsewhere, version)
        return compiled

    def evaluation(self, captured: CapturedStep, batch: list[torch.Tensor]) -> Evaluate:
        """What computes the loss and the gradients of a batch once more, without an update."""
        return functools.partial(evaluate, self._compiled(captured, Variant("evaluation", 1, frozenset(), ())), batch)

    @property
    def latest(self) -> CapturedStep:
        """The capture that served the latest call.

        Raises:
            GraphoptError: before the first one.
        """
        latest = self.runner.captures.latest
        if latest is None:
            raise GraphoptError(
                "nothing is captured yet: call the step once, or step.prepare(*batch), or give example_inputs="
            )
        return latest

    def session(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any) -> CaptureSession:
        """What traces a batch, with these sizes that vary."""
        session = CaptureSession(
            self._model,
            args,
            kwargs,
            loss=self._loss or True,
            optimizer=self._optimizer,
            dynamic_shapes=dynamic_shapes,
        )
        session.keep, session.by_values = self.runner.is_first, True
        return session

    def capture(self, session: CaptureSession, target: Target | None) -> CapturedStep:
        """What passes make of a session, ready to run; ``target`` for one that is planned once more."""
        runner, update = self.runner, Variant("update", self.progress.divisor, frozenset(), ())
        try:
            capture = runner.rewrite(session, target=target, divisor=update.every)
        except GraphoptError as error:
            lacks = budget_error(error)
            if lacks is None or update.every == 1:
                raise
            raise refused_budget(self.progress.every, [(update, lacks)]) from lacks
        started = time.perf_counter()
        self._plan_ahead(capture.rewritten)
        capture.rewritten.ahead = time.perf_counter() - started
        capture.rewritten.seconds += capture.rewritten.ahead
        rewritten, shards = capture.rewritten, capture.rewritten.shards
        if shards is not None:
            group = find_group(runner.options.pipeline.shard_group or "")
            name_shards(self._optimizer, group.rank, group.size)
        accept_named_shards(self._optimizer)
        if shards is not None:
            shard_state(self._optimizer, {name: self._model.get_parameter(name) for name in shards}, shards)
        resumed = self.progress.clock.steps  # a resumed run goes on with what each rank has loaded
        if not runner.captures.all() and not resumed:
            runner.prepare(rewritten, self._model)
        runner.store.require(rewritten.pass_state)
        runner.store.check_loaded()
        first = runner.announce(capture)
        outputs = session.results(lambda: rewritten.program)
        results = None if outputs.is_alone and not outputs.classes else outputs
        if not outputs.is_alone and target is None:
            _tell_of_results(rewritten.program)
        ahead = self._coming(self._state(rewritten)[1])
        return CapturedStep(rewritten, capture.rules, settings(self._optimizer), results, ahead=ahead, first=first)

    @property
    def _limited(self) -> bool:
        """Whether passes keep programs within a number of bytes."""
        return any(current.has_limit for current in self._options.pipeline.passes)

    def _coming(self, beside: frozenset[str]) -> Hashable:
        """What decides which programs the calls up to the next update need, where these are made ahead; else None."""
        progress = self.progress
        if not self._limited or (progress.every == 1 and not self.joins):
            return None
        return progress.divisor, progress.every > 2, self.joins, self._forms(), beside

    def _plan_ahead(self, rewritten: Rewritten) -> None:
        """Make the programs of all calls up to an update, where passes keep them within a number of bytes.

        The one that takes most is planned first, and the others as it is.

        Raises:
            BudgetError: where one of them cannot be, before anything has run.
        """
        if self._coming(frozenset()) is None:
            return
        refused: list[tuple[Variant, BudgetError]] = []
        with self.runner.watch.capturing(), self.runner.agreement.making("the programs up to an update"):
            for wanted in self._variants_ahead(rewritten):
                try:
                    self._program(rewritten, wanted)
                except GraphoptError as error:
                    lacks = budget_error(error)
                    if lacks is None:
                        raise
                    refused.append((wanted, lacks))
        if refused:
            raise refused_budget(self.progress.every, refused) from max(
                (lacks for _, lacks in refused), key=lambda lacks: lacks.smallest_bytes
            )

    def _variants_ahead(self, rewritten: Rewritten) -> list[Variant]:
        """The programs of all calls up to an update, the one that takes most of memory first."""
        progress = self.progress
        kinds: list[Kind] = ["update"]
        missing, beside = self._state(rewritten)
        if missing:
            kinds.append("first update")
        waiting = frozenset[str]()
        if progress.every > 1:
            waiting = frozenset({*rewritten.session.trained(rewritten.stages["joint"]), *progress.gradients})
            if progress.every > 2 or progress.divisor == 0:
                kinds.append("middle")
            kinds.append("begin")
        return [
            Variant(
                kind,
                progress.divisor,
                frozenset() if kind == "begin" else waiting,
                self._forms() if kind in ("update", "first update") else (),
                weighed,
                frozenset() if kind == "update" else missing,
                beside,
            )
            for weighed in ((False, True) if self.joins else (False,))
            for kind in kinds
        ]

    def _compiled(self, captured: CapturedStep, key: Variant) -> CompiledStep:
        if key not in captured.variants:
            title, started, first = captured.rewritten.session.title, time.perf_counter(), not captured.variants
            message = f"making another program of {title}: {key}"
            with self.runner.agreement.making(str(key)), nullcontext() if first else working(message):
                captured.variants[key] = self._compile_variant(captured, key)
            seconds = time.perf_counter() - started
            if first:
                self._tell_seconds(captured, seconds)
            else:
                tell_later_program(title, str(key), seconds)
        return captured.variants[key]

    def _tell_seconds(self, captured: CapturedStep, seconds: float) -> None:
        """Say what a capture took, and its first program, so many seconds more."""
        rewritten = captured.rewritten
        if self._options.backend != "eager":
            rewritten.compiling = seconds
        else:
            rewritten.seconds += seconds
            rewritten.ahead += seconds
        tell_seconds(rewritten, first=captured.first)

    @no_collection()
    def _compile_variant(self, captured: CapturedStep, wanted: Variant) -> CompiledStep:
        program = with_numbers_read(captured, self._program(captured.rewritten, wanted), self._optimizer)
        elsewhere = resident_inputs(program)
        if wanted.kind in ("begin", "middle"):
            elsewhere += [
                item
                for item in resident_inputs(captured.rewritten.program)
                if item[0].role in _KEPT and item not in elsewhere and item[0].target not in wanted.missing
            ]
        alike = (found for key, found in captured.variants.items() if self._runs_alike(key, wanted))
        found = next(alike, None)
        if found is not None:
            return replace(found, program=program, elsewhere=elsewhere)
        self.runner.make_ready(program)
        module, run = compile_program(program, self._options.backend)
        run = self.runner.watch.guard(run, module, program, "step")
        binding = Binding(program, self._model, self._optimizer, self.progress.gradients, self.runner.store)
        batch = tuple(spec.target for _, spec in program.inputs_of("input"))
        return CompiledStep(
            program,
            module,
            run,
            binding,
            checked_gradients(program),
            batch,
            asks_again(program),
            elsewhere,
            exchange_plan(program, f"{program.title}: {wanted}", wanted.every),
            wanted.kind in ("begin", "middle", "evaluation") or self._trains_apart,
        )

    def _runs_alike(self, one: Variant, other: Variant) -> bool:
        """Whether two variants differ in what is in memory beside them alone, which a plan depends on."""
        missing = one.missing if one.updates else other.missing
        beside = one.beside if self._limited else other.beside
        return one._replace(missing=missing, beside=beside) == other

    def _due(self, captured: CapturedStep) -> Variant:
        """Which program the next call runs."""
        batches, divisor, waiting = self.progress.batches, self.progress.divisor, frozenset(self.progress.gradients)
        if batches < self.progress.every - 1:
            before: Kind = "begin" if batches == 0 else "middle"
            return Variant(before, divisor, waiting, (), self.weighed, captured.missing, captured.beside)
        kind: Kind = "first update" if captured.missing else "update"
        return Variant(kind, divisor, waiting, self._forms(), self.weighed, captured.missing, captured.beside)

    def _forms(self) -> tuple[tuple[str, str], ...]:
        """Which of their programs passes want for the next update, where they have several."""
        forms = {current.name: current.form(self.progress.clock) for current in self._options.pipeline.training}
        return tuple((name, form) for name, form in forms.items() if form)

    def _program(self, rewritten: Rewritten, wanted: Variant) -> Program:
        """The program of a variant, which may be kept beyond the process."""
        made = wanted if self._limited else wanted._replace(beside=frozenset())
        if self._is_shown(rewritten, made):
            program = rewritten.program
        else:
            name = stored_name(made, self._optimizer, self._model)
            program = rewritten.variant(name, functools.partial(self._make, rewritten, made))
        there = self._persistent(rewritten, wanted)
        there = {key: value for key, value in there.items() if key[1] not in wanted.missing}
        same = there.keys() == program.context.step.persistent.keys()
        return program if same else replace(program, context=program.context.with_persistent(there))

    def _is_shown(self, rewritten: Rewritten, wanted: Variant) -> bool:
        """Whether a variant is the program of the stage step."""
        if wanted._replace(waiting=frozenset()) != Variant("update", rewritten.divisor, frozenset(), ()):
            return False
        return wanted.waiting == {spec.target for _, spec in rewritten.program.inputs_of("gradient")}

    def _persistent(self, rewritten: Rewritten, wanted: Variant) -> dict[tuple[str, str], Any]:
        """What is in memory while a variant runs without being its input (``StepContext.persistent``)."""
        found: dict[tuple[str, str], Any] = {}
        if wanted.kind in ("begin", "middle"):
            kept = rewritten.program.inputs_of(*_KEPT)
            found = {(s.role, s.target): value_of(node) for node, s in kept if not schema.resides_elsewhere(node)}
        for target in wanted.beside:
            name, _, key = target.rpartition("/")
            found["state", target] = self._optimizer.state[self._model.get_parameter(name)][key]
        return found

    def _make(self, rewritten: Rewritten, wanted: Variant) -> Program:
        joint = rewritten.stages["joint"]
        if wanted.every != 1 or wanted.weighed or wanted.kind == "evaluation":
            last = wanted.kind != "middle"
            joint = accumulating(joint, wanted.every, wanted.waiting, last=last, weighed=wanted.weighed)
        joint = replace(joint, context=joint.context.with_persistent(self._persistent(rewritten, wanted)))
        if wanted.updates:
            return rewritten.lower_joint(joint, first=wanted.kind == "first update", forms=dict(wanted.forms))
        rewritten.finish(joint)
        return joint

    def _state(self, rewritten: Rewritten) -> tuple[frozenset[str], frozenset[str]]:
        """What the optimizer lacks of the state, ``parameter/key``, that a program reads, and what it has beside that.

        The latter is the state in memory of parameters that the program does not train.
        """
        state, missing = self._optimizer.state, set[str]()
        trained: set[torch.Tensor] = set()
        for target in rewritten.state:
            name, _, key = target.rpartition("/")
            parameter = self._model.get_parameter(name)
            trained.add(parameter)
            if key not in state.get(parameter, {}):
                missing.add(target)
        others = ((name, parameter) for name, parameter in self._model.named_parameters() if parameter not in trained)
        beside = (
            state_target(name, key)
            for name, parameter in others
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and not residents().tier_of(value)
        )
        return frozenset(missing), frozenset(beside)

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)


_KEPT = ("state", "pass_state")
"""The inputs of an update that are in memory in the calls before as well."""


def _tell_of_results(program: Program) -> None:
    """Warn where a caller that keeps the results of a call during the next one exceeds the peak that is predicted."""
    values = {value for value, _ in program.outputs_of("output") if isinstance(value, fx.Node)}
    count = sum(storage_bytes(value_of(value)) for value in values)
    if count > max(_UNNOTICED, program.memory().peak_bytes // 1000):
        logger.warning(
            "%s: the step returns %s beside the loss, which stay in memory as long as they are kept, on top of the "
            "peak of the next call: return what is small (.argmax(), .mean()), or del them before it",
            program.title,
            format_bytes(count),
        )


@dataclass(frozen=True)
class _Maker:
    """Captures a batch; ``to_run`` where the step is run, and not only prepared."""

    programs: StepPrograms
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    to_run: bool = False

    @property
    def runs(self) -> Callable[..., Any] | None:
        """See ``Maker``."""
        return self.programs._loss

    def session(self, dynamic_shapes: Any) -> CaptureSession:
        """See ``Maker``."""
        session = self.programs.session(self.args, self.kwargs, dynamic_shapes)
        session.to_run = self.to_run
        return session

    def compile(self, session: CaptureSession, target: Target | None) -> CapturedStep:
        """See ``Maker``."""
        return self.programs.capture(session, target)
