"""`optimize_step`: forward, loss, backward and update as one program, called like a function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.call_checks import argument_names, check_loss, check_optimizer
from graphopt.capture.hidden_effects import CAPTURE_LOCK
from graphopt.capture.session import call_loss
from graphopt.capture.step import settings
from graphopt.errors import GraphoptError, whole_number
from graphopt.ir.autocast import plain_precision
from graphopt.ir.methods import provided
from graphopt.ir.ops.opaque_update import Evaluate
from graphopt.ir.program import Program
from graphopt.rewriting.clock import Clock
from graphopt.rewriting.pass_ import Records
from graphopt.rewriting.pipeline import Passes, Pipeline
from graphopt.rewriting.precision.scaling import checked_gradients, scaling_of
from graphopt.rewriting.shards import shard_state
from graphopt.runtime.accumulate import accumulate_gradients, add_gradients, scale_seed
from graphopt.runtime.binding import Binding
from graphopt.runtime.closures import evaluate, evaluations
from graphopt.runtime.compile.backend import Backend, compile_program
from graphopt.runtime.leftovers import LoopLeftovers
from graphopt.runtime.module import take_over
from graphopt.runtime.rewrite import Rewritten, Verify
from graphopt.runtime.runner import Options, Runner
from graphopt.runtime.skipped_steps import SkipWatch
from graphopt.runtime.state_dict import STATE_VERSION, check_state, place
from graphopt.runtime.step_variants import CapturedStep, CompiledStep, Variant, stored_name
from graphopt.runtime.stored.program_key import program_key
from graphopt.runtime.stored.save_captures import save_captures
from graphopt.runtime.stored.shipped_captures import Shipped
from graphopt.runtime.stored.stable_form import NoStableFormError

__all__ = ["TrainStep", "optimize_step"]


class TrainStep:
    """A training step as one program: ``loss = step(*batch)`` runs forward, backward and the optimizer's update.

    The model's parameters and buffers and the optimizer's state are updated in place; both objects stay the source of
    truth: their ``state_dict`` works, a learning rate set on ``param_groups`` or by a scheduler acts on the next call.
    A call with another signature (shapes, dtypes, structure, training flags, frozen parameters) is captured on its own.

    Make one with ``graphopt.optimize_step``.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=loss)
        >>> losses = [step(x).item() for _ in range(2)]
        >>> losses[1] < losses[0]
        True
        >>> step.evaluate(x).item() < losses[1]
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: Options,
        loss: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        check_optimizer(optimizer, model)
        check_loss(loss, model)
        self._model = model
        self._optimizer = optimizer
        self._pipeline = options.pipeline
        self._options = options
        self._loss = loss
        self._leftovers = LoopLeftovers(optimizer)
        self._every = 1
        self._batches = 0
        self._gradients: dict[str, torch.Tensor] = {}
        numbers: dict[str, float] = {}
        self._runner: Runner[CapturedStep] = Runner(options, "step", model.get_parameter, numbers)
        self._runner.names = argument_names(model, loss)
        self._store = self._runner.store
        self._clock = Clock(rates=self._rates, numbers=numbers, state=self._store.__getitem__)
        scaling = scaling_of(options.pipeline.passes)
        self._skips = SkipWatch(self._store, scaling) if scaling is not None else None

    # --- running -----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one step on a batch; returns the loss, detached, of the shape that the loss function gives it.

        Under ``torch.no_grad`` and ``torch.inference_mode`` it trains nothing: it returns the loss as the model and the
        loss function give it there. In eval mode it trains as a loop would, with dropout off and statistics frozen,
        and says so once.

        Raises:
            CaptureError: at the first call of a signature, where it cannot be captured.
            RankError: where an exchange with other ranks fails, naming those that died or hang.
            GraphoptError: where gradients from outside are waiting in ``.grad``, and after too many steps in a row
                that loss scaling skipped.
        """
        self._refuse_foreign_gradients()
        if not torch.is_grad_enabled():
            return self._loss_alone(args, kwargs)
        self._leftovers.before(self._model)
        with CAPTURE_LOCK:
            captured, batch = self._runner.find(self._model, args, kwargs, lambda: self._capture(args, kwargs))
            compiled = self._variant(captured)
            inputs = compiled.binding.gather(batch)
        program, again = compiled.program, functools.partial(self._evaluation, captured, batch)
        closure = evaluations(self._optimizer, program, self._pipeline, self._every, again)
        with torch.no_grad(), plain_precision(), closure:
            self._store.refresh()
            results = compiled.run(inputs)
            self._store.settle()
        return self._accept(compiled, results, batch)

    def evaluate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The loss of a batch in eval mode and without gradients, for validation; nothing is changed.

        Returns:
            the loss, detached; training flags are afterwards as they were.
        """
        flags = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad():
                return self._loss_alone(args, kwargs)
        finally:
            for module, training in flags.items():
                module.training = training

    def _loss_alone(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        return call_loss(self._model, self._loss or True, args, kwargs).detach()

    def prepare(self, *args: Any, **kwargs: Any) -> TrainStep:
        """Capture and compile for a batch like this one without running; returns the step itself."""
        with CAPTURE_LOCK:
            captured, _ = self._runner.find(self._model, args, kwargs, lambda: self._capture(args, kwargs))
            self._variant(captured)
        return self

    def prepare_example(self, example_inputs: Any) -> None:
        """Capture and compile for a batch given as a tuple, as ``example_inputs=`` is."""
        self._variant(self._runner.find_example(self._model, example_inputs, lambda args: self._capture(args, {})))

    def accumulate(self, batches: int) -> TrainStep:
        """Update at every ``batches``-th call only, with the mean of the gradients of these calls.

        Equal to ``(loss / batches).backward()`` on each batch and ``optimizer.step()`` after the last. Each call
        returns its own batch's loss, undivided.

        Raises:
            GraphoptError: for less than one, or in the middle of an accumulation.
        """
        batches = whole_number("accumulate's argument", batches, least=1, of="batches")
        if self._batches:
            raise GraphoptError(
                f"{self._batches} of {self._every} batches are accumulated: change the number after an update"
            )
        self._every = batches
        return self

    def synchronize(self) -> TrainStep:
        """Bring together what passes let differ between ranks for a while, such as the parameters of local SGD.

        All ranks have to call it; to be called behind the last step, and before the model is saved by one rank for all.
        Returns the step itself.
        """
        program = self._latest().rewritten.program
        with self._runner.watch.meeting(program):
            for current in self._pipeline.training:
                current.settle(program, self._model, self._optimizer)
        return self

    def _refuse_foreign_gradients(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                raise GraphoptError(
                    f"{name}.grad is set from outside of this step, and would be ignored: the program holds its own "
                    "gradients; call optimizer.zero_grad() once before the first step"
                )

    def _accept(self, compiled: CompiledStep, results: Any, batch: list[torch.Tensor]) -> torch.Tensor:
        """Hand out what a run returned: new optimizer state, accumulators, gradients of inputs, the loss.

        State that a skipped step created is dropped, so that the next one is the first again, as in eager mode.
        """
        program = compiled.program
        loss: torch.Tensor | None = None
        skips = self._skips if compiled.checked is not None else None
        dropped = skips is not None and bool(program.outputs_of("state")) and skips.skipped_last()
        answered = {spec.target: tensor for (_, spec), tensor in zip(program.inputs_of("input"), batch, strict=False)}
        answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value, spec in zip(results, program.outputs, strict=True):
            if spec.role == "loss":
                loss = value
            elif spec.role == "state" and not dropped:
                name, key = spec.target.rsplit("/", 1)
                self._optimizer.state[self._model.get_parameter(name)][key] = value
            elif spec.role == "gradient" and spec.target in answered:
                answers.append((answered[spec.target], value))
            elif spec.role == "gradient":
                self._gradients[spec.target] = value
        add_gradients(answers)
        self._count_batch()
        if skips is not None and compiled.checked is not None:
            skips.look([(compiled.checked, self._store[compiled.checked.target])])
        assert loss is not None
        self._leftovers.after(loss)
        return loss

    def _count_batch(self) -> None:
        """Note that a batch is in; behind the last one of a step the update has run, and the next step begins."""
        self._batches += 1
        if self._batches >= self._every:
            self._batches = 0
            self._gradients.clear()
            _torch.mark_optimizer_called(self._optimizer)
            self._advance()

    # --- capturing ---------------------------------------------------------------------------------------------------

    def _capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CapturedStep:
        runner = self._runner
        session = CaptureSession(
            self._model,
            args,
            kwargs,
            loss=self._loss or True,
            optimizer=self._optimizer,
            dynamic_shapes=self._options.dynamic_shapes,
            keep=runner.is_first,
        )
        capture = runner.rewrite(session)
        rewritten, shards = capture.rewritten, capture.rewritten.shards
        if shards is not None:
            shard_state(self._optimizer, {name: self._model.get_parameter(name) for name in shards}, shards)
        if not runner.captures.all() and not self._clock.steps:  # a resumed run goes on with what each rank has loaded
            runner.prepare(rewritten, self._model)
        self._store.require(rewritten.pass_state)
        self._store.check_loaded()
        runner.announce(capture)
        return CapturedStep(rewritten, capture.rules, settings(self._optimizer))

    def _variant(self, captured: CapturedStep) -> CompiledStep:
        """The compiled program that this call needs, made at its first use."""
        if settings(self._optimizer) != captured.settings:
            captured.variants.clear()
            captured.rewritten.retrace()
            captured.settings = settings(self._optimizer)
        key = self._due(captured.rewritten)
        if key not in captured.variants:
            captured.variants[key] = self._compile(self._program(captured.rewritten, key))
        return captured.variants[key]

    def _evaluation(self, captured: CapturedStep, batch: list[torch.Tensor]) -> Evaluate:
        """What computes the loss and the gradients of a batch once more, without an update."""
        key = Variant("evaluation", 1, frozenset(), ())
        if key not in captured.variants:
            captured.variants[key] = self._compile(self._program(captured.rewritten, key))
        return functools.partial(evaluate, captured.variants[key], batch)

    def _compile(self, program: Program) -> CompiledStep:
        self._runner.make_ready(program)
        module, run = compile_program(program, self._options.backend)
        run = self._runner.watch.guard(run, module, program, "step")
        binding = Binding(program, self._model, self._optimizer, self._gradients, self._store)
        return CompiledStep(program, module, run, binding, checked_gradients(program))

    def _due(self, rewritten: Rewritten) -> Variant:
        """Which program the next call runs."""
        if self._batches < self._every - 1:
            return Variant("begin" if self._batches == 0 else "middle", self._every, frozenset(self._gradients), ())
        forms = {current.name: current.form(self._clock) for current in self._pipeline.training}
        wanted = tuple((name, form) for name, form in forms.items() if form)
        kind: Literal["update", "first update"] = "update" if self._has_state(rewritten.state) else "first update"
        return Variant(kind, self._every, frozenset(self._gradients), wanted)

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)

    def _advance(self) -> None:
        self._clock.steps += 1
        for current in self._pipeline.training:
            current.advance(self._clock)

    def _has_state(self, targets: Sequence[str]) -> bool:
        for target in targets:
            name, key = target.rsplit("/", 1)
            if key not in self._optimizer.state.get(self._model.get_parameter(name), {}):
                return False
        return True

    def _program(self, rewritten: Rewritten, wanted: Variant) -> Program:
        """The program of a variant, which may be kept beyond the process."""
        name = stored_name(wanted, self._optimizer, self._model)
        plain = wanted == Variant("update", 1, frozenset(), ())
        make = functools.partial(self._make, rewritten, wanted)
        return make() if plain else rewritten.variant(name, make)

    def _make(self, rewritten: Rewritten, wanted: Variant) -> Program:
        first = wanted.kind == "first update"
        forms = dict(wanted.forms)
        if self._every == 1 and wanted.kind != "evaluation":
            plain = not first and not forms
            return rewritten.program if plain else rewritten.lower_joint(first=first, forms=forms)
        program = rewritten.stages["joint"].copy()
        scale_seed(program, self._every)
        if wanted.kind in ("middle", "update", "first update"):
            program = accumulate_gradients(program, self._gradients.keys(), last=wanted.kind != "middle")
        if wanted.kind in ("begin", "middle", "evaluation"):
            rewritten.finish(program)
            return program
        return rewritten.lower_joint(first=first, program=program, forms=forms)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _latest(self) -> CapturedStep:
        latest = self._runner.captures.latest
        if latest is None:
            raise GraphoptError(
                "nothing is captured yet: call the step once, or step.prepare(*batch), or give example_inputs="
            )
        return latest

    @property
    def pipeline(self) -> Pipeline:
        """The passes."""
        return self._pipeline

    @property
    def captured(self) -> bool:
        """Whether there is a program to look at."""
        return self._runner.captures.latest is not None

    @property
    def program(self) -> Program:
        """The rewritten step program of the latest signature."""
        return self._latest().rewritten.program

    @property
    def graph_module(self) -> fx.GraphModule:
        """The generated module of the latest signature's program; it takes a list of inputs and empties it."""
        captured = self._latest()
        found = captured.variants.get(Variant("update", self._every, frozenset(), ()))
        return found.module if found else captured.rewritten.program.to_graph_module()

    @property
    def programs(self) -> dict[str, Program]:
        """Every program of the latest signature that has run or is going to, by what it is for.

        Passes that change in the course of training (``TrainingPass.form``) have several, and so has accumulation.
        """
        return {str(key): compiled.program for key, compiled in self._latest().variants.items()}

    @property
    def snapshots(self) -> Sequence[tuple[str, Program]]:
        """``(label, program)`` after capture, after each lowering and after each pass."""
        return self._latest().rewritten.snapshots

    @property
    def records(self) -> Records:
        """What each pass did."""
        return Records(self._latest().rewritten.records)

    def show(self) -> Any:
        """Open everything that passes did in the browser, or give what a notebook shows as the interactive page.

        Returns:
            the file, which is in the folder of temporary files; in a notebook the frame.
        """
        return provided(TrainStep, "show")(self)

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the step itself owns: what passes hold, and the gradients accumulated so far of how many batches.

        Of this rank: where passes keep what differs from rank to rank (residuals), each rank saves its own.
        """
        rank, ranks = place()
        return {
            "version": STATE_VERSION,
            "rank": rank,
            "ranks": ranks,
            "local": self._store.local(),
            "steps": self._clock.steps,
            "numbers": dict(self._clock.numbers),
            "accumulate": self._every,
            "batches": self._batches,
            "gradients": {name: tensor.clone() for name, tensor in self._gradients.items()},
            "held": self._store.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; also before the first call, which then checks what passes hold.

        Raises:
            GraphoptError: for a state of another version, of other passes, or of another rank where ranks differ.
        """
        parameters = dict(self._model.named_parameters())
        check_state(state, parameters)
        self._store.load(state["held"], state["local"])
        self._clock.steps = int(state["steps"])
        self._clock.numbers.clear()  # programs share the dictionary
        self._clock.numbers.update({name: float(number) for name, number in state["numbers"].items()})
        self._every = int(state["accumulate"])
        self._batches = int(state["batches"])
        self._gradients.clear()
        self._gradients.update(
            {name: tensor.to(parameters[name].device, copy=True) for name, tensor in state["gradients"].items()}
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was captured and planned to a file, for ``graphopt.load_step`` in another process or elsewhere.

        To be called while the model is as it is when it trains. The file holds programs as data, and no parameters;
        with ``backend="inductor"`` also what inductor has made, in torch's own format.

        Raises:
            GraphoptError: before the first capture, and where a capture holds what no file can, naming it.
        """
        self._latest()
        save_captures(
            Path(path), self._runner.captures.all(), self._runner.cache, self._pipeline, self._options.backend,
            self._options.verify,
        )  # fmt: skip

    def use_shipped(self, shipped: Shipped) -> None:
        """Take captures from a file; what was checked before the first call fits.

        Raises:
            GraphoptError: where the file is for another model, loss or optimizer, saying what differs.
        """
        cache = self._runner.cache
        try:
            shipped.check(program_key(cache.subject(self._model, self._loss or True, self._optimizer, None)))
        except NoStableFormError as error:
            raise GraphoptError(f"{shipped.source} cannot be used: {error}") from error
        cache.shipped = shipped

    def _repr_html_(self) -> str:
        return str(provided(TrainStep, "notebook")(self))

    def __repr__(self) -> str:
        return f"<TrainStep of {type(self._model).__name__}, passes {str(self._pipeline) or 'none'}>"


def optimize_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    passes: Passes = (),
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    backend: Backend = "eager",
    verify: Verify = "structure",
) -> TrainStep:
    """Make a function that runs a whole training step, captured as one program and rewritten by passes.

    Args:
        model: the bare module; updated in place. The passes of a result of ``optimize`` are taken over.
        optimizer: a ``torch.optim`` object over its parameters; stays the source of truth.
        passes: ``Pass`` objects or their text form, in a list in any order, or one alone; None for no passes.
        loss: ``loss(model, *batch)`` returning a scalar; None where the model returns the loss or an object with
            ``.loss``.
        example_inputs: a batch to capture with right away; otherwise the first call captures.
        dynamic_shapes: sizes that may vary, as for ``torch.export.export``, for the arguments of the step.
        backend: ``"eager"`` (the generated code), ``"inductor"``, or ``callable(graph_module, inputs)``.
        verify: ``"structure"`` (the invariant table after each pass), ``"numerics"`` (also compare with the unrewritten
            program on the example inputs), or False.

    Raises:
        ArgumentError: for a loss, an optimizer or sizes of another form.
        PipelineError: where the passes do not fit together.
        CaptureError: where the model, loss or optimizer cannot be captured; the optimizer then works in drop-in mode.

    Example:
        >>> step = graphopt.optimize_step(model, optimizer, [Recompute("blocks.*")], loss=loss)
        >>> for batch in (x, x):
        ...     value = step(batch)
        >>> value.shape, step.records[0].name
        (torch.Size([]), 'recompute')
    """
    model, taken = take_over(model, passes)
    step = TrainStep(model, optimizer, Options.checked(model, taken, dynamic_shapes, backend, verify), loss)
    if example_inputs is not None:
        step.prepare_example(example_inputs)
    return step
