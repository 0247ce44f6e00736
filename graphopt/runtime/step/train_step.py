"""`TrainStep`: forward, loss, backward and update as one program, called like a function."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from graphopt import _torch
from graphopt.capture.call.call_checks import check_call, check_loss, check_optimizer
from graphopt.capture.call.flatten import detach_all
from graphopt.capture.effects.eager_trial import EagerCall, FailsInEagerError
from graphopt.capture.effects.side_effects import CAPTURE_LOCK
from graphopt.capture.session import call_loss, loss_call
from graphopt.errors import GraphoptError, check_type, public
from graphopt.ir.graphs.autocast import plain_precision
from graphopt.ir.host import is_memory_shortage
from graphopt.ir.node import Phase
from graphopt.ir.program import Program
from graphopt.ir.provided.methods import provided
from graphopt.rewriting.distributed.sharding.named_shards import accept_named_shards
from graphopt.rewriting.gradient_norm import GRADIENT_NORM
from graphopt.rewriting.pass_ import Records
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.precision.scaling import scaling_of
from graphopt.runtime.drop_in.sharded_call import ShardedSteps, is_sharded
from graphopt.runtime.programs.accumulate import add_gradients
from graphopt.runtime.ranks.places import reached
from graphopt.runtime.ranks.watch import meeting
from graphopt.runtime.runner import Options
from graphopt.runtime.state.dtensor_state import dtensor_state, load_dtensor_state
from graphopt.runtime.state.sharded_model_state import full_state, load_model_state
from graphopt.runtime.state.state_versions import ForeignGradients
from graphopt.runtime.step.closures import evaluations
from graphopt.runtime.step.ineffective_calls import UNCHANGED, LoopLeftovers, left_behind, refuse_modes
from graphopt.runtime.step.skipped_steps import SkipWatch
from graphopt.runtime.step.step_programs import StepPrograms
from graphopt.runtime.step.step_state import GENERATORS, generator_states, state_of_step
from graphopt.runtime.step.step_variants import CapturedStep, CompiledStep, Variant
from graphopt.runtime.step.uneven_ends import UnevenEnds, joined_group
from graphopt.runtime.stored.program_key import program_key
from graphopt.runtime.stored.save_captures import save_captures
from graphopt.runtime.stored.shipped_captures import Shipped
from graphopt.runtime.stored.stable_form import NoStableFormError

__all__ = ["TrainStep"]


@dataclass
class _Ready:
    """A call that is about to run: what serves it, the program, the tensors of the call, the program's inputs."""

    captured: CapturedStep
    compiled: CompiledStep
    batch: list[torch.Tensor]
    inputs: list[Any]


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
        loss: Callable[..., Any] | None = None,
    ) -> None:
        check_type("TrainStep's options", options, Options, "made by graphopt.optimize_step: call that")
        check_optimizer(optimizer, model)
        check_loss(loss, model)
        accept_named_shards(optimizer)
        self._model = model
        self._optimizer = optimizer
        self._pipeline = options.pipeline
        self._loss = loss
        self._leftovers = LoopLeftovers(optimizer)
        self._foreign = ForeignGradients(model)
        self._programs = StepPrograms(model, optimizer, loss, options)
        self._progress = self._programs.progress
        self._runner = self._programs.runner
        self._store = self._runner.store
        scaling = scaling_of(options.pipeline.passes)
        self._ends: UnevenEnds | None = None
        self._sharded = ShardedSteps(model, optimizer, options.pipeline) if is_sharded(model) else None
        self._skips = SkipWatch(self._store, scaling) if scaling is not None else None

    # --- running -----------------------------------------------------------------------------------------------------

    @public
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a batch; returns the loss, detached, of the shape that the loss function gives it.

        Where the loss function returns more beside the loss, it returns all of that, detached.

        Under ``torch.no_grad`` and ``torch.inference_mode`` it trains nothing: it returns the loss as the model and the
        loss function give it there. In eval mode it trains as a loop would, with dropout off and statistics frozen,
        and says so once.

        Raises:
            ArgumentError: where the batch does not fit the loss, or the model.
            CaptureError: at the first call of a signature, where it cannot be captured.
            RankError: where an exchange with other ranks fails, naming those that died or hang.
            GraphoptError: where gradients from outside are waiting in ``.grad``, and after too many steps in a row
                that loss scaling skipped.
        """
        self._foreign.refuse(self._runner.changes)
        if not torch.is_grad_enabled():
            return self._loss_alone(args, kwargs)
        refuse_modes()
        self._programs.joins = self._ends is not None
        self._programs.weighed = self._ends is not None and self._ends.announce((args, kwargs))
        self._leftovers.before(self._model)
        self._programs.kept.sharded.refuse_step()
        eager = EagerCall(
            loss_call(self._loss or True), self._model, args, kwargs, self._loss or True, self._pipeline.autocast
        )
        with self._as_shards():
            try:
                local = (args, kwargs) if self._sharded is None else self._sharded.local_inputs(args, kwargs)
                ready = self._ready(*local)
            except FailsInEagerError as error:
                fails = error
            else:
                return self._run(ready, eager)
            # behind the handler, so that no other error is shown above the one of the user's code
            eager.run()
            assert fails.__cause__ is not None
            fails.__cause__.add_note(UNCHANGED)
            raise fails.__cause__  # that of backward

    def _as_shards(self) -> contextlib.AbstractContextManager[None]:
        """Around a call of the step: a model after ``fully_shard``, and its optimizer, as the program sees them."""
        return contextlib.nullcontext() if self._sharded is None else self._sharded.as_shards()

    def _ready(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Ready:
        with CAPTURE_LOCK, self._runner.agreement.reporting(), self._programs.kept.sharded.described():
            captured, batch = self._programs.find(args, kwargs, to_run=True)
            self._foreign.refuse(self._runner.changes)
            version = self._programs.version()
            compiled = self._programs.variant(captured, version)
            begun = self._runner.agreement.begin(compiled.exchanges, silent=compiled.silent)
            ready = _Ready(captured, compiled, batch, compiled.binding.gather(batch, version))
        self._runner.wait(begun, compiled.program)
        return ready

    def _run(self, ready: _Ready, eager: EagerCall) -> Any:
        """Run a program; where its forward fails, and the call fails in eager mode, raise what is raised there."""
        try:
            return self._run_program(ready)
        except GraphoptError:
            raise
        except Exception as error:
            if is_memory_shortage(error) or reached(error, ready.compiled.module, Phase.BACKWARD):
                raise
            failed = error
        with self._programs.kept.sharded.described():  # without memory, on which nothing is tried
            eager.try_it()
        raise failed

    def _run_program(self, ready: _Ready) -> Any:
        """Run a program on its inputs, and hand out what it returns."""
        captured, compiled, batch = ready.captured, ready.compiled, ready.batch
        with self._programs.kept.whole_step(compiled.module, self._whole_state):
            if self._ends is not None:
                self._ends.put_weight(compiled.program)
            with torch.no_grad(), plain_precision(), self._closure(captured, compiled, batch):
                self._store.refresh()
                try:
                    results = compiled.run(ready.inputs)
                except BaseException as error:
                    error.add_note(left_behind(error, compiled.module))
                    raise
                self._store.settle()
            return self._accept(captured, compiled, results, batch)

    @public
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch in eval mode and without gradients, for validation; nothing is changed.

        Returns:
            what the loss function returns, detached; training flags are afterwards as they were.
        """
        flags = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            with torch.no_grad():
                return self._loss_alone(args, kwargs)
        finally:
            for module, training in flags.items():
                module.training = training

    def _loss_alone(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        check_call(self._model, self._loss or True, args, kwargs)
        with self.whole_parameters():
            return detach_all(call_loss(self._model, self._loss or True, args, kwargs))

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Parameters of which each rank keeps a shard (``ShardParameters``) are whole inside, on every rank.

        All ranks have to enter it. What is changed inside is kept. Without such parameters nothing happens.

        Example:
            >>> step = graphopt.optimize_step(model, optimizer, loss=loss)
            >>> with step.whole_parameters():
            ...     state = model.state_dict()
        """
        if self._programs.kept.sharded.divides:
            self.refuse_in_join("whole_parameters")
        with contextlib.ExitStack() as inside:
            with meeting("the gathering of whole parameters"):
                inside.enter_context(self._programs.kept.sharded.whole())
            yield

    @public
    def prepare(self, *args: Any, **kwargs: Any) -> TrainStep:
        """Capture and compile for a batch like this one without running; returns the step itself."""
        with (
            CAPTURE_LOCK,
            self._as_shards(),
            self._runner.agreement.reporting(),
            self._programs.kept.sharded.described(),
        ):
            local = (args, kwargs) if self._sharded is None else self._sharded.local_inputs(args, kwargs)
            compiled = self._programs.variant(self._programs.find(*local)[0])
        self._runner.compare_new(compiled.program, compiled.exchanges)
        return self

    def prepare_example(self, example_inputs: Any) -> None:
        """Capture and compile for a batch given as a tuple, as ``example_inputs=`` is."""
        with self._as_shards():
            compiled = self._programs.variant(self._programs.find_example(example_inputs))
        self._runner.compare_new(compiled.program, compiled.exchanges)

    @public
    def accumulate(self, batches: int, *, mean: bool = True) -> TrainStep:
        """Update at every ``batches``-th call only, with the mean of the gradients of these calls, or with their sum.

        Equal to ``(loss / batches).backward()`` on each batch, or ``loss.backward()`` for the sum, and
        ``optimizer.step()`` after the last. Each call returns its own batch's loss, undivided.

        Args:
            batches: of one update.
            mean: False for the sum; how many batches there will be may then change while some are accumulated, as
                long as more are than have been.

        Raises:
            GraphoptError: for less than one; in the middle of an accumulation, but for more batches of a sum. Where
                calls cannot be kept within a budget (``FitMemory``), the next call raises before it runs.
        """
        self._progress.accumulate(batches, mean)
        return self

    @contextlib.contextmanager
    def join(self, *, example: tuple[Any, ...] | None = None, by_rows: bool = False) -> Iterator[None]:
        """Let ranks run out of batches at different times: the mean is taken over those that still have some.

        All ranks enter it, and each leaves it behind its last batch; it then takes part in the steps of the others,
        which its gradients do not change, until the last rank has left. With one process nothing happens. Behind an
        exception of its own a rank does not wait for the others.

        Args:
            example: a batch of the shapes that others have, for a rank that may get none at all.
            by_rows: weigh each rank's gradients by the rows of its batch (the first axis of its first tensor), so that
                the mean is one over all rows; otherwise each rank that has a batch counts alike.

        Raises:
            GraphoptError: with passes that let ranks train by themselves, where a rank has had no batch and no example,
                and inside of another ``join``.

        Example:
            >>> step = graphopt.optimize_step(model, optimizer, loss=loss)
            >>> with step.join():
            ...     for batch in (x, x):
            ...         value = step(batch)
        """
        check_type("join's by_rows", by_rows, bool, "True or False")
        group = joined_group(self._pipeline)
        if self._ends is not None:
            raise GraphoptError("join inside of another join: one around all batches is enough")
        if group is None:
            yield
            return
        batch = None if example is None else (example, dict[str, Any]())
        self._ends = UnevenEnds(group, self._model, self._store, self._meeting, batch, by_rows)
        try:
            yield
            self._ends.go_on(self)
        finally:
            self._ends, self._programs.weighed, self._programs.joins = None, False, False

    def refuse_in_join(self, what: str) -> None:
        """Raise inside of ``join``, where other ranks may have ended, for what takes all of them.

        Args:
            what: is called.

        Raises:
            GraphoptError: saying so.
        """
        if self._ends is not None:
            raise GraphoptError(
                f"{what} takes all ranks, and inside of join some may have ended: call it behind the `with` block"
            )

    def _meeting(self) -> contextlib.AbstractContextManager[None]:
        """Around what ranks tell each other, so that it is known who is at fault where it fails."""
        return self._runner.watch.meeting(self.program) if self.captured else contextlib.nullcontext()

    @property
    def accumulated(self) -> int:
        """How many batches have been accumulated since the last update."""
        return self._progress.batches

    @property
    def steps(self) -> int:
        """How many updates have been made, those of the processes before that it goes on from among them."""
        return self._progress.clock.steps

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The norm of the gradients of the last update as ``ClipGradients(..., keep_norm=True)`` found it; else None.

        Of all gradients together, before they were clipped and behind everything else; a copy, without a dimension.
        """
        return self._store[GRADIENT_NORM].clone() if GRADIENT_NORM in self._store else None

    @property
    def skipped(self) -> bool:
        """Whether loss scaling skipped the last update, for gradients that are not finite; waits for the device."""
        return self._skips is not None and self._progress.clock.steps > 0 and self._skips.skipped_last()

    @public
    def synchronize(self) -> TrainStep:
        """Bring together what passes let differ between ranks for a while, such as the parameters of local SGD.

        All ranks have to call it; to be called behind the last step, and before the model is saved by one rank for all.
        Returns the step itself.
        """
        self.refuse_in_join("synchronize")
        program = self._latest().rewritten.program
        with self._runner.watch.meeting(program):
            self._store.await_exchanges()
            for current in self._pipeline.training:
                current.settle(program, self._model, self._optimizer)
        self._store.settle()
        return self

    def _closure(
        self, captured: CapturedStep, compiled: CompiledStep, batch: list[torch.Tensor]
    ) -> contextlib.AbstractContextManager[None]:
        """What an optimizer evaluates while the program runs."""
        if not compiled.evaluates:
            return contextlib.nullcontext()
        again = functools.partial(self._programs.evaluation, captured, batch)
        return evaluations(self._optimizer, compiled.program, self._pipeline, self._progress.every, again)

    def _accept(self, captured: CapturedStep, compiled: CompiledStep, results: Any, batch: list[torch.Tensor]) -> Any:
        """Hand out what a run returned: new optimizer state, accumulators, gradients of inputs, the loss and the rest.

        State that a skipped step created is dropped, so that the next one is the first again, as in eager mode.
        """
        program = compiled.program
        loss: torch.Tensor | None = None
        returned: list[torch.Tensor] = []
        skips = self._skips if compiled.checked is not None else None
        dropped = skips is not None and bool(program.outputs_of("state")) and skips.skipped_last()
        answered = dict(zip(compiled.batch, batch, strict=False))
        answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value, spec in zip(results, program.outputs, strict=True):
            if spec.role in ("loss", "output"):
                returned.append(value)
                loss = value if spec.role == "loss" else loss
            elif spec.role == "state" and not dropped:
                name, key = spec.target.rsplit("/", 1)
                self._optimizer.state[self._model.get_parameter(name)][key] = value
            elif spec.role == "gradient" and spec.target in answered:
                answers.append((answered[spec.target], value))
            elif spec.role == "gradient":
                self._progress.gradients[spec.target] = value
        add_gradients(answers)
        if self._progress.count_batch():
            _torch.mark_optimizer_called(self._optimizer)
        if skips is not None and compiled.checked is not None:
            skips.look([(compiled.checked, self._store[compiled.checked.target])])
        assert loss is not None
        self._leftovers.after(loss)
        return loss if captured.results is None else captured.results.restore(returned)

    # --- looking -----------------------------------------------------------------------------------------------------

    def _latest(self) -> CapturedStep:
        return self._programs.latest

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose update the step runs."""
        return self._optimizer

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
        rewritten = captured.rewritten
        shown = Variant("update", rewritten.divisor, frozenset(), ())
        found = (each.module for key, each in captured.variants.items() if key._replace(waiting=frozenset()) == shown)
        return next(found, None) or rewritten.program.to_graph_module()

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

    @public
    def state_dict(self) -> dict[str, Any]:
        """What the step itself owns: what passes hold, and the gradients accumulated so far of how many batches.

        Of this rank: where passes keep what differs from rank to rank (residuals), each rank saves its own, and the
        names of these tensors say whose they are. ``graphopt.checkpoint`` saves it with model and optimizer.
        """
        return self._progress.state_dict()

    def _whole_state(self) -> dict[str, Any]:
        """What ``graphopt.checkpoint.load`` reads."""
        return {"step": self.checkpoint_state(), GENERATORS: generator_states()}

    def checkpoint_state(self) -> dict[str, Any]:
        """What this rank saves of model, optimizer and the step itself; ``graphopt.checkpoint`` writes it.

        Parameters of which each rank keeps a shard are saved as that; all ranks have to call it.
        """
        sharded = self._programs.kept.sharded
        with contextlib.nullcontext() if sharded.over_all_ranks else sharded.whole():
            return state_of_step(sharded, self._optimizer, self.state_dict())

    def load_model_state(self, state: Mapping[str, Any], shards: Collection[str] = ()) -> None:
        """Take over the model's part of a checkpoint; all ranks have to call it.

        Args:
            state: tensors by the names of the model's ``state_dict``.
            shards: the names for which it has this rank's shard, flat.

        Raises:
            GraphoptError: for names and shapes that are not the model's.
        """
        sharded = self._programs.kept.sharded
        with contextlib.nullcontext() if sharded.over_all_ranks else sharded.whole():
            load_model_state(sharded, state, shards)

    @public
    def full_state_dict(self) -> dict[str, Any]:
        """Model and optimizer whole, on the host of the first rank, for export; all ranks have to call it.

        Returns:
            ``model`` and ``optimizer``, copies as ``state_dict`` of each names them, on rank 0; nothing on the others.
            No rank has more than one tensor whole on its device at a time.

        Example:
            >>> step = graphopt.optimize_step(model, optimizer, loss=loss)
            >>> sorted(step.full_state_dict())
            ['model', 'optimizer']
        """
        self.refuse_in_join("full_state_dict")
        with meeting("the gathering of the whole state"):
            return full_state(self._programs.kept.sharded, self._optimizer, self._pipeline.shard_group or "")

    @public
    def sharded_state_dict(self) -> dict[str, Any]:
        """Model, optimizer and the step itself for ``torch.distributed.checkpoint``, with shards as DTensors.

        To be called behind ``prepare`` or a first step, by all ranks. ``dcp.load`` reads into what it returns, in
        whatever number of ranks, before ``load_sharded_state_dict`` takes it over.

        Returns:
            ``model``, ``optimizer`` by the names of parameters, and ``step``. What each rank has a shard of is a
            DTensor of one dimension, the elements in the order of memory, which shares memory with the shard.

        Raises:
            GraphoptError: before the first capture, when the optimizer has no state that could be loaded into.

        Example:
            >>> step = graphopt.optimize_step(model, optimizer, loss=loss)
            >>> sorted(step.prepare(x).sharded_state_dict())
            ['model', 'optimizer', 'step']
        """
        self.refuse_in_join("sharded_state_dict")
        sharded, program = self._programs.kept.sharded, self._latest().rewritten.program
        return dtensor_state(sharded, self._optimizer, self._pipeline.shard_group, program, self.state_dict())

    @public
    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``sharded_state_dict`` was taken; all ranks have to call it.

        Args:
            state: what it returned, as it is or after ``torch.distributed.checkpoint`` loaded into it.

        Raises:
            ArgumentError: for what is no state.
            GraphoptError: for a state of another model, optimizer or passes, naming what differs.
        """
        kept = self._programs.kept
        load_dtensor_state(kept.sharded, self._optimizer, self._pipeline.shard_group, state, self.load_state_dict)
        kept.loaded()

    @public
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken; also before the first call, which then checks what passes hold.

        Raises:
            ArgumentError: for what is no state, and for entries of another type.
            GraphoptError: for a state of another version, of other passes, or of another rank where ranks differ.
        """
        self._progress.load_state_dict(state, dict(self._model.named_parameters()))
        self._programs.kept.loaded()

    @public
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was captured and planned to a file, for ``graphopt.load_step`` in another process or elsewhere.

        To be called while the model is as it is when it trains. The file holds programs as data, and no parameters;
        with ``backend="inductor"`` also what inductor has made, in torch's own format.

        Raises:
            GraphoptError: before the first capture, and where a capture holds what no file can, naming it.
        """
        self._latest()
        save_captures(
            Path(path),
            self._runner.serving.everything(),
            self._runner.cache,
            self._pipeline,
            self._runner.options.backend,
            self._runner.options.verify,
        )

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
