"""`optimize_step`: forward, loss, backward and update as one program, called like a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture import CaptureSession
from graphopt.capture.checks import refuse_wrapped
from graphopt.capture.flatten import flatten
from graphopt.capture.step import hyperparameters
from graphopt.errors import CaptureError, GraphoptError
from graphopt.ir.autocast import plain_precision
from graphopt.ir.program import Program
from graphopt.report.console.escape import safe
from graphopt.report.console.overview import announce
from graphopt.report.notebook import Records, rewritten_html, show_page
from graphopt.rewriting.clock import Clock
from graphopt.rewriting.pipeline import Pass, Pipeline
from graphopt.rewriting.precision.scaling import CheckedGradients, checked_gradients, scaling_of
from graphopt.rewriting.shards import shard_state
from graphopt.runtime.accumulate import accumulate_gradients, scale_seed
from graphopt.runtime.binding import Binding
from graphopt.runtime.captures import Entries, SizeRule, size_rules
from graphopt.runtime.check_numerics import check_numerics
from graphopt.runtime.compile.backend import Backend, Boxed, check_backend, compile_program
from graphopt.runtime.ranks.agreement import Agreement
from graphopt.runtime.ranks.watch import StepWatch
from graphopt.runtime.reserve import reserve_host
from graphopt.runtime.rewrite import Rewritten, Verify, rewrite
from graphopt.runtime.signature import signature
from graphopt.runtime.skipped_steps import SkipWatch
from graphopt.runtime.state_dict import STATE_VERSION, check_state, place
from graphopt.runtime.state_store import HeldStore

__all__ = ["TrainStep", "optimize_step"]


class _Variant(NamedTuple):
    """Which of an entry's programs: what it does, for how many batches, what waits for it, what passes want."""

    kind: Literal["begin", "middle", "update", "first update"]
    every: int
    waiting: frozenset[str]
    forms: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return ", ".join([self.kind, *(f"{name}: {form}" for name, form in self.forms)])


@dataclass
class _Compiled:
    program: Program
    module: fx.GraphModule
    run: Boxed
    binding: Binding
    checked: CheckedGradients | None


@dataclass
class _Entry:
    """One capture: its rewritten programs and the variants compiled so far."""

    rewritten: Rewritten
    rules: list[SizeRule]
    settings: tuple[Any, ...]
    variants: dict[_Variant, _Compiled] = field(default_factory=dict)


class TrainStep:
    """A training step as one program: ``loss = step(*batch)`` runs forward, backward and the optimizer's update.

    The model's parameters and buffers and the optimizer's state are updated in place; both objects stay the source of
    truth: their ``state_dict`` works, a learning rate set on ``param_groups`` or by a scheduler acts on the next call.
    A call with another signature (shapes, dtypes, structure, training flags, frozen parameters) is captured on its own.

    Make one with ``graphopt.optimize_step``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        pipeline: Pipeline,
        *,
        loss: Callable[..., torch.Tensor] | None,
        dynamic_shapes: Any,
        backend: Backend,
        verify: Verify,
    ) -> None:
        refuse_wrapped(model)
        check_backend(backend)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise GraphoptError(
                f"optimize_step needs a torch.optim optimizer as its second argument, got {optimizer!r}"
            )
        self._model = model
        self._optimizer = optimizer
        self._pipeline = pipeline
        self._loss = loss
        self._dynamic_shapes = dynamic_shapes
        self._backend: Backend = backend
        self._verify: Verify = verify
        self._entries: Entries[_Entry] = Entries()
        self._every = 1
        self._batches = 0
        self._gradients: dict[str, torch.Tensor] = {}
        self._held = HeldStore(model.get_parameter)
        self._clock = Clock(rates=self._rates, held=self._held.__getitem__)
        self._agreement = Agreement()
        self._watch = StepWatch()
        scaling = scaling_of(pipeline.passes)
        self._skips = SkipWatch(self._held, scaling) if scaling is not None else None

    # --- running -----------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run one step on a batch; returns the loss, detached, of the shape that the loss function gives it.

        Raises:
            CaptureError: at the first call of a signature, where it cannot be captured.
            RankError: where an exchange with other ranks fails, naming those that died or hang.
            GraphoptError: where gradients from outside are waiting in ``.grad``, and after too many steps in a row
                that loss scaling skipped.
        """
        self._refuse_foreign_gradients()
        batch, structure = flatten((args, kwargs), paths=False)
        key = signature(self._model, structure, batch, sizes=self._dynamic_shapes is None)
        entry = self._entries.get(key, batch, lambda: self._capture(args, kwargs))
        compiled = self._variant(entry)
        inputs = compiled.binding.gather(batch)
        with torch.no_grad(), plain_precision():
            self._held.refresh()
            results = compiled.run(inputs)
            self._held.settle()
        return self._accept(compiled, results, batch)

    def prepare(self, *args: Any, **kwargs: Any) -> TrainStep:
        """Capture and compile for a batch like this one without running; returns the step itself."""
        batch, structure = flatten((args, kwargs), paths=False)
        key = signature(self._model, structure, batch, sizes=self._dynamic_shapes is None)
        self._variant(self._entries.get(key, batch, lambda: self._capture(args, kwargs)))
        return self

    def accumulate(self, batches: int) -> TrainStep:
        """Update at every ``batches``-th call only, with the mean of the gradients of these calls.

        Equal to ``(loss / batches).backward()`` on each batch and ``optimizer.step()`` after the last. Each call
        returns its own batch's loss, undivided.

        Raises:
            GraphoptError: for less than one, or in the middle of an accumulation.
        """
        if not isinstance(batches, int) or batches < 1:
            raise GraphoptError(f"accumulate needs a number of batches of at least 1, got {batches!r}")
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
        with self._watch.meeting(program):
            for current in self._pipeline.passes:
                current.settle(program, self._model, self._optimizer)
        return self

    def _refuse_foreign_gradients(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                raise GraphoptError(
                    f"{name}.grad is set from outside of this step, and would be ignored: the program holds its own "
                    "gradients; call optimizer.zero_grad() once before the first step"
                )

    def _accept(self, compiled: _Compiled, results: Any, batch: list[torch.Tensor]) -> torch.Tensor:
        """Hand out what a run returned: new optimizer state, accumulators, gradients of inputs, the loss.

        State that a skipped step created is dropped, so that the next one is the first again, as in eager mode.
        """
        program = compiled.program
        loss: torch.Tensor | None = None
        skips = self._skips if compiled.checked is not None else None
        dropped = skips is not None and bool(program.outputs_of("state")) and skips.skipped_last()
        answers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        tensors = {spec.target: index for index, (_, spec) in enumerate(program.inputs_of("input"))}
        for value, spec in zip(results, program.outputs, strict=True):
            if spec.role == "loss":
                loss = value
            elif spec.role == "state" and not dropped:
                name, key = spec.target.rsplit("/", 1)
                self._optimizer.state[self._model.get_parameter(name)][key] = value
            elif spec.role == "gradient" and spec.target in tensors:
                tensor = batch[tensors[spec.target]]
                known = answers.get(id(tensor))
                answers[id(tensor)] = (tensor, value if known is None else known[1] + value)
            elif spec.role == "gradient":
                self._gradients[spec.target] = value
        for tensor, value in answers.values():
            tensor.grad = value if tensor.grad is None else tensor.grad.add_(value)
        self._batches += 1
        if self._batches >= self._every:
            self._batches = 0
            self._gradients.clear()
            _torch.mark_optimizer_called(self._optimizer)
            self._advance()
        if skips is not None and compiled.checked is not None:
            skips.look([(compiled.checked, self._held[compiled.checked.target])])
        assert loss is not None
        return loss

    # --- capturing ---------------------------------------------------------------------------------------------------

    def _capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Entry:
        session = CaptureSession(
            self._model, args, kwargs, loss=self._loss or True, optimizer=self._optimizer,
            dynamic_shapes=self._dynamic_shapes,
        )  # fmt: skip
        with self._watch.capturing():
            rewritten = rewrite(
                session, self._pipeline, until="step", verify=self._verify, numbers=self._clock.numbers,
                compiled=self._backend != "eager",
            )  # fmt: skip
        if self._verify == "numerics":
            check_numerics(rewritten, self._pipeline)
        shards = rewritten.shards(self._pipeline)
        if shards is not None:
            shard_state(self._optimizer, {name: self._model.get_parameter(name) for name in shards}, shards)
        if not self._entries.all() and not self._clock.steps:  # a resumed run goes on with what each rank has loaded
            with self._watch.meeting(rewritten.program):
                for current in self._pipeline.passes:
                    current.prepare(self._model)
        self._held.require(rewritten.program.held)
        self._held.check_loaded()
        if not self._entries.all():
            announce(self._pipeline, rewritten)
        return _Entry(rewritten, size_rules(session.forward.program), hyperparameters(self._optimizer))

    def _variant(self, entry: _Entry) -> _Compiled:
        """The compiled program that this call needs, made at its first use."""
        settings = hyperparameters(self._optimizer)
        if settings != entry.settings:
            entry.variants.clear()
            entry.rewritten.retrace(self._pipeline)
            entry.settings = settings
        key = self._due(entry.rewritten.program)
        if key not in entry.variants:
            program = self._make(entry.rewritten, key)
            self._held.require(program.held)
            reserve_host(program)
            with self._watch.meeting(program):
                self._agreement.check(program)
            module, run = compile_program(program, self._backend)
            run = self._watch.guard(run, module, program, "step")
            binding = Binding(program, self._model, self._optimizer, self._gradients, self._held)
            entry.variants[key] = _Compiled(program, module, run, binding, checked_gradients(program))
        return entry.variants[key]

    def _due(self, program: Program) -> _Variant:
        """Which program the next call runs."""
        if self._batches < self._every - 1:
            return _Variant("begin" if self._batches == 0 else "middle", self._every, frozenset(self._gradients), ())
        forms = {current.name: current.form(self._clock) for current in self._pipeline.passes}
        wanted = tuple((name, form) for name, form in forms.items() if form)
        kind: Literal["update", "first update"] = "update" if self._has_state(program) else "first update"
        return _Variant(kind, self._every, frozenset(self._gradients), wanted)

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self._optimizer.param_groups)

    def _advance(self) -> None:
        self._clock.steps += 1
        for current in self._pipeline.passes:
            current.advance(self._clock)

    def _has_state(self, program: Program) -> bool:
        for _, spec in program.inputs_of("state"):
            name, key = spec.target.rsplit("/", 1)
            if key not in self._optimizer.state.get(self._model.get_parameter(name), {}):
                return False
        return True

    def _make(self, rewritten: Rewritten, wanted: _Variant) -> Program:
        first = wanted.kind == "first update"
        forms = dict(wanted.forms)
        if self._every == 1:
            plain = not first and not forms
            return rewritten.program if plain else rewritten.lower_joint(self._pipeline, first=first, forms=forms)
        program = rewritten.stages["joint"].copy()
        scale_seed(program, self._every)
        if wanted.kind != "begin":
            program = accumulate_gradients(program, self._gradients.keys(), last=wanted.kind != "middle")
        if wanted.kind in ("begin", "middle"):
            rewritten.finish(program, self._pipeline)
            return program
        return rewritten.lower_joint(self._pipeline, first=first, program=program, forms=forms)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _latest(self) -> _Entry:
        if self._entries.latest is None:
            raise GraphoptError(
                "nothing is captured yet: call the step once, or step.prepare(*batch), or give example_inputs="
            )
        return self._entries.latest

    @property
    def program(self) -> Program:
        """The rewritten step program of the latest signature."""
        return self._latest().rewritten.program

    @property
    def graph_module(self) -> fx.GraphModule:
        """The generated module of the latest signature's program; it takes a list of inputs and empties it."""
        entry = self._latest()
        found = entry.variants.get(_Variant("update", self._every, frozenset(), ()))
        return found.module if found else entry.rewritten.program.to_graph_module()

    @property
    def programs(self) -> dict[str, Program]:
        """Every program of the latest signature that has run or is going to, by what it is for.

        Passes that change in the course of training (``Pass.form``) have several, and so has accumulation.
        """
        return {str(key): compiled.program for key, compiled in self._latest().variants.items()}

    @property
    def snapshots(self) -> list[tuple[str, Program]]:
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
        from graphopt.report.page import page_of_snapshots

        page = page_of_snapshots(self.snapshots, self.records, pipeline=str(self._pipeline))
        return show_page(page, self.program.title)

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
            "local": self._held.local(),
            "steps": self._clock.steps,
            "numbers": dict(self._clock.numbers),
            "accumulate": self._every,
            "batches": self._batches,
            "gradients": {name: tensor.clone() for name, tensor in self._gradients.items()},
            "held": self._held.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; also before the first call, which then checks what passes hold.

        Raises:
            GraphoptError: for a state of another version, of other passes, or of another rank where ranks differ.
        """
        parameters = dict(self._model.named_parameters())
        check_state(state, parameters)
        self._held.load(state["held"], state["local"])
        self._clock.steps = int(state["steps"])
        self._clock.numbers.clear()  # programs share the dictionary
        self._clock.numbers.update({name: float(number) for name, number in state["numbers"].items()})
        self._every = int(state["accumulate"])
        self._batches = int(state["batches"])
        self._gradients.clear()
        self._gradients.update(
            {name: tensor.to(parameters[name].device, copy=True) for name, tensor in state["gradients"].items()}
        )

    def _repr_html_(self) -> str:
        if self._entries.latest is None:
            return f"<div>{safe(self)}: nothing is captured yet</div>"
        return rewritten_html(repr(self), self.program, self.records)

    def __repr__(self) -> str:
        return f"<TrainStep of {type(self._model).__name__}, passes {str(self._pipeline) or 'none'}>"


def optimize_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    passes: str | Iterable[Pass] = (),
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = None,
    backend: Backend = "eager",
    verify: Verify = "structure",
) -> TrainStep:
    """Make a function that runs a whole training step, captured as one program and rewritten by passes.

    Args:
        model: the bare module; updated in place.
        optimizer: a ``torch.optim`` object over its parameters; stays the source of truth.
        passes: ``Pass`` objects, or their text form; in any order.
        loss: ``loss(model, *batch)`` returning a scalar; None where the model returns the loss or an object with
            ``.loss``.
        example_inputs: a batch to capture with right away; otherwise the first call captures.
        dynamic_shapes: sizes that may vary, as for ``torch.export.export``, for the arguments of the step.
        backend: ``"eager"`` (the generated code), ``"inductor"``, or ``callable(graph_module, inputs)``.
        verify: ``"structure"`` (the invariant table after each pass), ``"numerics"`` (also compare with the unrewritten
            program on the example inputs), or False.

    Raises:
        PipelineError: where the passes do not fit together.
        CaptureError: where the model, loss or optimizer cannot be captured; the optimizer then works in drop-in mode.
    """
    step = TrainStep(
        model, optimizer, Pipeline(passes), loss=loss, dynamic_shapes=dynamic_shapes, backend=backend, verify=verify
    )
    if example_inputs is not None:
        if not isinstance(example_inputs, (tuple, list)):
            raise CaptureError(f"example_inputs is a tuple of the batch's parts, got {type(example_inputs).__name__}")
        step.prepare(*example_inputs)
    return step
