"""One capture, from a model to any stage of its program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.call.call_checks import (
    argument_names,
    check_call,
    check_dynamic_shapes,
    check_loss,
    check_optimizer,
)
from graphopt.capture.call.flatten import Results, Structure, flatten, loss_in
from graphopt.capture.call.source_lines import user_frame
from graphopt.capture.call.tensor_classes import refuse_classes, result_classes
from graphopt.capture.call.tensor_parallel_form import DistributedResults, distributed_call
from graphopt.capture.call.varying_axes import VaryingAxes
from graphopt.capture.call.without_memory import without_memory
from graphopt.capture.devices.for_device import stand_in
from graphopt.capture.dynamo.graph_part import GraphPart, cut_of, title_of
from graphopt.capture.effects.checks import (
    refuse_compressed_arguments,
    refuse_cumulative_averages,
    refuse_distributed_arguments,
    refuse_missing_data,
    refuse_wrapped,
)
from graphopt.capture.effects.eager_trial import EagerCall, FailsInEagerError, autocast_devices
from graphopt.capture.effects.external_effects import Effect, effects_noted
from graphopt.capture.effects.side_effects import (
    capturing,
    modules_now,
    refuse_backward_hooks,
    refuse_parameter_hooks,
)
from graphopt.capture.effects.tensor_effects import NumbersRead, refuse_outside
from graphopt.capture.forward.export import ForwardCapture, capture_forward
from graphopt.capture.forward.traced_call import TracedCall
from graphopt.capture.forward.transformers_masks import Question
from graphopt.capture.joint.differentiation import JointCapture, capture_joint
from graphopt.capture.joint.split_uses import split_uses
from graphopt.capture.joint.stamped_joint import stamp_joint
from graphopt.capture.step.append_update import append_update
from graphopt.capture.step.traced_update import trace_optimizer
from graphopt.errors import CaptureError, GraphBreakError, quoted
from graphopt.ir.graphs.autocast import mark_around, plain_precision, under_autocast
from graphopt.ir.graphs.graph_copies import is_unchanged
from graphopt.ir.host import shortage_named
from graphopt.ir.ops.communication.groups import find_group
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.sharding.accumulated_gradients import accumulate_whole_gradients
from graphopt.rewriting.distributed.sharding.whole_updates import divide_whole_updates
from graphopt.rewriting.memory.recompute.gathered_parameters import (
    free_whole_parameters,
    gather_by_own_op,
    reduce_in_place,
)
from graphopt.rewriting.precision.written_casts import write_casts
from graphopt.rewriting.shards import Shards, whole_parameter

__all__ = ["CaptureSession", "Loss", "call_loss", "loss_call"]

Loss = Callable[..., Any]
T = TypeVar("T")


def _call_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _own_loss(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    result = model(*args, **kwargs)
    found = None if type(result) in (tuple, list) else loss_in(result)
    if found is None:
        raise CaptureError(
            f"{type(model).__name__} returns {type(result).__name__}, neither a loss nor an object with a .loss: give "
            "loss=lambda model, *batch: ... that returns a scalar (models from transformers return a loss when they "
            "get labels=)"
        )
    return found


def call_loss(model: nn.Module, loss: Loss | bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The loss of a batch, with what else the loss function returns, as it gives them without a program.

    Args:
        model: as the loss function is called with.
        loss: as for ``CaptureSession``.
        args: positional parts of the batch.
        kwargs: those given by keyword.
    """
    return loss_call(loss)(model, *args, **kwargs)


def loss_call(loss: Loss | bool) -> Loss:
    """The function of the model and a batch that gives the loss.

    Args:
        loss: as for ``CaptureSession``.
    """
    return _own_loss if isinstance(loss, bool) else loss


class CaptureSession:
    """Captures one call of one model and lowers it stage by stage.

    The model's code runs once, when the first program is asked for, and once more for each other ``autocast``.

    Args:
        model: the bare module.
        args: positional example inputs.
        kwargs: keyword example inputs.
        loss: ``loss(model, *batch)`` returning a scalar, alone or with more (``loss_in``); ``True`` where the model's
            own result is or has the loss; None for a drop-in program whose outputs' tangents come from outside.
        optimizer: whose update ends the step program; needs a loss.
        dynamic_shapes: as in ``torch.export``, for the model's (or the loss's) arguments.

    Attributes:
        example: the positional and the keyword example inputs.
        loss: as given.
        keep: leave numbers and texts that forward sets in modules set, as behind a call in eager mode; not by default.
        to_run: whether the call is the user's own, to be run and not only captured: where it cannot be captured and
            raises in eager mode, ``FailsInEagerError`` says so, and in any other case what it raises is raised.
        by_values: answer what the model asks of the values of the call's masks (``questions``); the programs are then
            for calls that answer alike, which the caller sees to. By default they are for all values.
        joint: the joint program as it was lowered last.
        classes: of the tensors of the call, where some have one of their own (``Structure``).
        repeated: for a part of a model, the inputs that its program takes again (``split_uses``).

    Raises:
        ArgumentError: for a loss, an optimizer, sizes or a call of another form.
        CaptureError: for a model that is wrapped, or with hooks that a program would lose.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss: Loss | bool | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        dynamic_shapes: Any = None,
    ) -> None:
        refuse_wrapped(model)
        leaves = _torch.pytree.tree_leaves((args, kwargs))
        refuse_distributed_arguments(model, leaves)
        refuse_compressed_arguments(model, leaves)
        refuse_classes(model, None if isinstance(loss, bool) else loss, leaves)
        refuse_missing_data(model, leaves)
        check_loss(loss, model)
        check_dynamic_shapes(dynamic_shapes)
        if optimizer is not None:
            check_optimizer(optimizer, model)
            loss = True if loss is None else loss
        check_call(model, loss, args, kwargs or {})
        self.model = model
        self.optimizer = optimizer
        self.joint: JointCapture | None = None
        call = _call_model if loss is None else _own_loss if loss is True else loss
        assert callable(call)
        refuse_backward_hooks(model)
        refuse_cumulative_averages(model)
        if optimizer is not None:
            refuse_parameter_hooks(model)
        self._distributed = distributed_call(model, under_autocast(call))
        self._call = under_autocast(call) if self._distributed is None else self._distributed.traced
        if self._distributed is not None and dynamic_shapes is not None:
            raise CaptureError(
                f"the parameters of {type(model).__name__} are distributed tensors, whose parts have sizes that are "
                "numbers: each size of a batch is captured by itself; give dynamic_shapes=None"
            )
        self._names = argument_names(model, loss)
        self.example = (args, kwargs or {})
        self.classes = flatten(self.example, paths=False)[1].classes
        self.loss = loss
        self._scalar_loss = loss is not None
        self._dynamic_shapes = dynamic_shapes
        self.keep = False
        self.by_values = False
        self.to_run = False
        self.repeated: list[str] = []
        self._captures: dict[torch.dtype | None, ForwardCapture] = {}
        self._autocast: torch.dtype | None = None
        self._assigned: dict[str, None] = {}
        self._left_out: dict[str, None] = {}
        self._effects: dict[Effect, None] = {}
        self._outside: dict[str, None] = {}
        self._outputs: Structure | None = None
        self._replayed: dict[Question, bool] = {}
        self._lowered: tuple[Program, Program] | None = None
        """A forward program, and the joint one that was made of it."""

    def forward(self, autocast: torch.dtype | None = None) -> Program:
        """The forward program, to be rewritten.

        Args:
            autocast: trace the model under ``torch.autocast`` to this dtype on the devices of its tensors, which the
                program has as regions around everything. A dtype that the model's Python reads (``x.to(y.dtype)``) is
                then the one that it reads under autocast.

        Raises:
            CaptureError: where the model cannot be captured: what, where, and what to do.
        """
        if autocast not in self._captures:
            self._captures[autocast] = self._capture(autocast)
        program = self._captures[autocast].program.copy()
        program.lower = self.lower_forward
        return program

    def _capture(self, autocast: torch.dtype | None) -> ForwardCapture:
        self._autocast = autocast
        return self._eager_error_first(functools.partial(self._traced, autocast))

    def _eager_error_first(self, trace: Callable[[], T], *, backward: bool = False) -> T:
        """What a trace gives; where it fails, and the same call fails in eager mode, raise that in its place.

        Args:
            trace: of the call, or of its backward.
            backward: whether it is that of its backward.
        """
        as_before = modules_now(self.model)
        try:
            return trace()
        except CaptureError as error:
            as_before()  # the training flags too, which forward may set
            if not error.of_trace or isinstance(self.model, GraphPart) or isinstance(self._dynamic_shapes, VaryingAxes):
                raise
            if self.to_run and self.loss is None and isinstance(error, GraphBreakError) and error.of_values:
                raise  # the parts of the model, which run as in eager mode, raise what is raised there
            refused = error
        # behind the handler, so that no other error is shown above the one of the user's code
        args, kwargs = self.example
        eager = EagerCall(self._call, self.model, args, kwargs, self.loss, self._autocast)
        if not self.to_run:
            eager.try_it(backward=backward)
            raise refused
        try:
            eager.try_it(backward=backward)
        except Exception as error:
            what = f"{'the backward of' if backward else 'calling'} {self.title} raises {quoted(error)}"
            what = f"{what}\n  where: {user_frame(error.__traceback__)}"
            raise FailsInEagerError(what) from error
        raise refused

    def _traced(self, autocast: torch.dtype | None) -> ForwardCapture:
        args, kwargs = self.example
        call = self._call
        devices = self._devices() if autocast is not None else []
        if devices:
            with contextlib.ExitStack() as stack:
                for device in devices:
                    stack.enter_context(torch.autocast(device, dtype=autocast))
                call = under_autocast(call)
        loss = None if isinstance(self.loss, bool) else self.loss
        with shortage_named(self.title), capturing(self.model, loss, keep=self.keep) as assigned:
            traced = TracedCall(call, self._names, self._dynamic_shapes, self._scalar_loss, self.by_values)
            with effects_noted() as effects:
                captured = capture_forward(self.model, args, kwargs, traced)
        self._outside |= refuse_outside(captured.outside, self.title, self.optimizer)
        program = captured.program
        stand_in(program, self.tensors().values())
        mark_around(program.graph, program.attributes, len(devices))
        self._assigned |= dict.fromkeys((*assigned, *captured.changed))
        self._left_out |= dict.fromkeys(captured.left_out)
        self._effects |= effects
        if isinstance(self.model, GraphPart) and cut_of(self.model).shared:
            captured, self.repeated = split_uses(captured, self.tensors())
        return captured

    def _devices(self) -> list[str]:
        """The kinds of devices of the model's tensors and of the example inputs, for which there is autocast."""
        given = [leaf for leaf in _torch.pytree.tree_leaves(self.example) if isinstance(leaf, torch.Tensor)]
        return autocast_devices((*self.tensors().values(), *given))

    @property
    def title(self) -> str:
        """Whose program it is: the model's class, for people."""
        return title_of(self.model)

    @property
    def sizes_vary(self) -> bool:
        """Whether it is captured with sizes open."""
        return self._dynamic_shapes is not None

    @property
    def captured(self) -> ForwardCapture:
        """What is the same for every capture of this session: the structures of its inputs and outputs, the batch."""
        return next(iter(self._captures.values()), None) or self._captures.setdefault(None, self._capture(None))

    @property
    def outputs(self) -> Structure:
        """The structure of what the call returns."""
        return self.captured.outputs if self._outputs is None else self._outputs

    def results(self, program: Callable[[], Program]) -> Structure:
        """The structure of what a program of the call gives its caller.

        Args:
            program: gives the program, which is read from a file for it where it has to be.
        """
        outputs = self.outputs
        if self._distributed is not None:
            outputs = DistributedResults.of(outputs, self._distributed.results)
        classes = result_classes(program(), self.classes) if any(self.classes) else ()
        if not any(classes):
            return outputs
        return Results(outputs.spec, outputs.leaves, outputs.is_tensor, outputs.paths, classes)

    @property
    def questions(self) -> dict[Question, bool]:
        """What the model has asked of the values of the call's tensors, with the answers that its programs are for."""
        return self._replayed | {
            question: yes for captured in self._captures.values() for question, yes in captured.questions.items()
        }

    @property
    def numbers(self) -> list[NumbersRead]:
        """Tensors beside those of the call whose numbers its programs have as constants."""
        return [read for captured in self._captures.values() for read in captured.numbers]

    def release(self) -> None:
        """Let go of the memory of the call's floating-point tensors: what comes later needs their metadata only.

        Others stay, since a program may be for their values (masks, positions); and all do where some share memory,
        which is part of what the program is for.
        """
        tensors, structure = flatten(self.example, paths=False)
        alone = {id(tensor): tensor for tensor in tensors}
        places = {_torch.storage_key(tensor) for tensor in alone.values() if tensor.layout is torch.strided}
        if len(alone) < len(tensors) or len(places) < len(alone):
            return
        self.example = structure.restore(map(_without_values, tensors))
        for captured in self._captures.values():
            captured.example_tensors = list(map(_without_values, captured.example_tensors))

    def call_tensors(self) -> list[torch.Tensor]:
        """The tensors of the call, and those that the programs of a part take once more (``split_uses``)."""
        tensors, _ = flatten(self.example, paths=False)
        named = {**self.tensors(), **{f"args[{place}]": tensor for place, tensor in enumerate(tensors)}}
        return [*tensors, *(named[name].detach().requires_grad_() for name in self.repeated)]

    def replay_questions(self, questions: Mapping[Question, bool]) -> None:
        """Take what was asked in another process, where the programs come from there."""
        self._replayed = dict(questions)

    def replay(self, outputs: Structure, joint: JointCapture | None = None) -> None:
        """Take the structure of results that were captured before, and the joint program of a drop-in model."""
        self.joint, self._outputs = joint, outputs

    @property
    def assigned(self) -> tuple[str, ...]:
        """The attributes of modules that forward has set in the captures so far, as ``path.name``."""
        return tuple(self._assigned)

    @property
    def effects(self) -> tuple[Effect, ...]:
        """What the user's code did outside of its process in the captures so far: files, prints, other programs."""
        return tuple(self._effects)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The places in the result of the captures so far where None stands for a cache of keys and values."""
        return tuple(self._left_out)

    @property
    def outside(self) -> tuple[str, ...]:
        """The lines that compute with tensors which require gradients, and which nothing trains."""
        return tuple(self._outside)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers by every name they have."""
        return {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }

    def trained(self, program: Program) -> dict[str, nn.Parameter]:
        """The parameters that get a gradient in ``program``, by name, in its order."""
        known = self.tensors()
        parameters = {spec.target for _, spec in program.inputs_of("parameter")}
        return {
            spec.target: known[spec.target]  # type: ignore[misc]
            for value, spec in program.outputs_of("gradient")
            if value is not None and spec.target in parameters
        }

    def lower_forward(self, program: Program) -> Program:
        """The joint program of a (rewritten) forward program."""
        if self._lowered is not None and is_unchanged(self._lowered[0].graph, program.graph):
            known = self._lowered[1].copy()
            known.context = program.context
            return known
        forward = program.copy()
        lowered = self._new_joint(program)
        # where sizes vary, it is planned for one size after the other; what torch makes of a drop-in model's trace is
        # made once
        if self.optimizer is not None and isinstance(self._dynamic_shapes, VaryingAxes):
            self._lowered = forward, lowered.copy()
        return lowered

    def _new_joint(self, program: Program) -> Program:
        self.joint = self._eager_error_first(functools.partial(self._differentiated, program), backward=True)
        lowered = self.joint.program
        if self._distributed is not None:
            gather_by_own_op(lowered)
        accumulate_whole_gradients(lowered)
        free_whole_parameters(lowered)
        reduce_in_place(lowered)
        if self.optimizer is not None:
            lowered.lower = self.lower_joint
        return lowered

    def _differentiated(self, program: Program) -> JointCapture:
        with contextlib.ExitStack() as stack:
            stack.enter_context(shortage_named(self.title))
            stack.enter_context(plain_precision())
            stack.enter_context(capturing(self.model))
            if self._distributed is not None:  # whose Python runs once more, and is to leave nothing
                stack.callback(modules_now(self.model))
            given = write_casts(program), self.tensors(), self.captured.example_tensors
            return stamp_joint(*given) or capture_joint(*given)

    def lower_joint(self, program: Program, *, first: bool = False, shards: Shards | None = None) -> Program:
        """The step program of a (rewritten) joint program.

        Args:
            program: of stage joint, with a loss.
            first: make the one that creates the optimizer's state.
            shards: the part of each trained parameter that the update is for; None for all of it.
        """
        assert self.optimizer is not None
        with shortage_named(self.title), plain_precision():
            trained = self.trained(program)
            trace = trace_optimizer(self.optimizer, trained, first=first, mode=program.fake_mode, shards=shards)
            step = append_update(program, trace)
            groups = sorted({whole.group for shard in trained.values() if (whole := whole_parameter(shard))})
            if len(groups) > 1:
                raise CaptureError(
                    f"{type(self.optimizer).__name__} takes whole parameters, of which ranks have shards over several "
                    f"groups ({', '.join(groups)}): keep your loop with graphopt.optimize"
                )
            for group in groups:
                divide_whole_updates(step, find_group(group), "fully_shard", by_rows=True)
            return step


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return without_memory(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor
