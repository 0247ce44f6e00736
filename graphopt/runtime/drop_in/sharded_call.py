"""Calls of a model that others have sharded: programs in training, in all other calls what it was made to be.

FSDP2 hooks the forward of the model too. Around a call that runs a program, in which gathers are ops, these two hooks
do nothing; in eval mode and without gradients they act as always, and a call that goes to eager mode at last runs them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.call.sharded_form import FullySharded, is_fully_sharded, shard_hooks
from graphopt.capture.call.tensor_parallel_form import TensorParallel, has_distributed_tensors
from graphopt.capture.effects.side_effects import CAPTURE_LOCK, refuse_parameter_hooks
from graphopt.errors import CaptureError, PipelineError
from graphopt.ir.program import Program
from graphopt.rewriting.distributed.sharding.accumulated_gradients import tangents_of_sums
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.shards import WholeParameter, whole_parameters
from graphopt.runtime.drop_in.wrapped import refuse_beside_sharding
from graphopt.runtime.state.state_store import StateStore

__all__ = ["FullyShardedCalls", "ShardedCalls", "ShardedSteps", "is_sharded"]

logger = logging.getLogger("graphopt")

Form = FullySharded | TensorParallel

_NOT_ON_PARTS = {
    "clip-gradients": "takes the norm of all gradients, and of those each rank has a part, some of them the same on "
    "several ranks: keep your loop with graphopt.optimize, and clip_grad_norm_ of torch",
    "mixed-precision": "puts casts into a program of forward, in which a call of such a model is one op: give torch's "
    "autocast around the call, or mp_policy to fully_shard",
}
"""By the name of a pass why it does not go together with tensor parallelism, and what to do."""


def is_sharded(model: object) -> bool:
    """Whether this rank has parts of a model's parameters, by ``fully_shard`` or as other distributed tensors."""
    return is_fully_sharded(model) or has_distributed_tensors(model)


def current_form(model: nn.Module, known: Form | None, pipeline: Pipeline) -> Form:
    """How a program sees a model; the same as before as long as nothing of it is another.

    Raises:
        CaptureError: where parameters are distributed otherwise than before.
        PipelineError: for a pass that cannot act on a model with tensor parallelism.
    """
    if known is not None and known.is_current:
        return known
    form: Form
    if is_fully_sharded(model):
        form = FullySharded(model)
        if isinstance(known, FullySharded):
            form.take_over(known)
    else:
        form = TensorParallel(model)
        if isinstance(known, TensorParallel):
            form.take_over(known)
    if form.is_tensor_parallel:
        _refuse_beside_parts(pipeline, type(model).__name__)
    return form


_BY_ELEMENTS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Optimizers of ``torch.optim`` whose update of a shard is the shard of the update."""


def _refuse_beside_parts(pipeline: Pipeline, title: str) -> None:
    for current in pipeline.passes:
        if current.name in _NOT_ON_PARTS:
            raise PipelineError(
                f"{title} has distributed tensors, beside which {current.name} is refused: it "
                f"{_NOT_ON_PARTS[current.name]}"
            )


class _Around:
    """A hook of FSDP2's on the model, which leaves calls that run a program alone."""

    def __init__(self, own: Callable[..., Any], optimized: type) -> None:
        self.own, self._optimized = own, optimized

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if isinstance(module, self._optimized) and module.training and torch.is_grad_enabled():
            return None
        return self.own(module, *args)


class _WholeGradients:
    """Sums of whole gradients, which FSDP2 and the programs of a model have in common; called before a backward.

    Args:
        form: of the model, as it is for the program of that backward.
        sums: the parameters, each with the tensor that the program adds up in, and the tangents it has gradients of.
    """

    def __init__(
        self, form: FullySharded, sums: Sequence[tuple[_torch.ShardedParameter, torch.Tensor, frozenset[str]]]
    ) -> None:
        self._form, self._sums = form, sums
        self._accumulations = form.accumulations
        self._told = False

    def __call__(self, missing: frozenset[str]) -> None:
        """Go on with the sums that wait, where the calls before ended, in a program or in FSDP2's own backward.

        Args:
            missing: the tangents that do not come.
        """
        if not self._told and self._form.reduces != [each.reduces for each in self._accumulations]:
            self._told = True
            logger.warning(
                "%s: set_requires_gradient_sync was called between forward and backward; a program has in backward "
                "what held at the call of forward",
                self._form.title,
            )
        reduced = self._form.reduced_by(self._accumulations)
        for parameter, total, tangents in self._sums:
            waits = parameter.whole_gradient
            if waits is None:
                total.zero_()
            elif waits is not total:
                total.copy_(waits)
            if parameter in reduced:
                parameter.put_whole_gradient(None)
            elif waits is not None or tangents - missing:
                parameter.put_whole_gradient(total)


class ShardedCalls:
    """What calls of an optimized model whose parameters are distributed tensors need beside its captures.

    Args:
        given: the model that ``optimize`` was given.
        pipeline: the passes.

    Raises:
        PipelineError: for a pass that exchanges gradients, or checks them on each rank by itself.
    """

    def __init__(self, given: nn.Module, pipeline: Pipeline) -> None:
        refuse_beside_sharding(pipeline, type(given).__name__)
        self._given, self._pipeline = given, pipeline
        self._form: Form | None = None

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """See ``FullySharded`` and ``TensorParallel``; the parameters have to be there by the first call."""
        self._form = current_form(self._given, self._form, self._pipeline)
        with self._form.as_shards():
            yield

    def local_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See ``DistributedInputs``; while ``as_shards`` lasts."""
        assert self._form is not None
        return self._form.inputs.local(args, kwargs)

    def connected(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``LocalParameters``."""
        assert self._form is not None
        return self._form.connected(tensors)

    def before_backward(
        self, program: Program, tensors: Mapping[str, torch.Tensor], store: StateStore
    ) -> Callable[[frozenset[str]], None] | None:
        """What runs before each backward of a program that adds up whole gradients; None for others.

        Args:
            program: compiled for a call of the model as it is now.
            tensors: the model's by name, while ``as_shards`` lasts.
            store: has the tensors of what the program keeps.
        """
        form = self._form
        if not isinstance(form, FullySharded) or not (sums := form.sums(program, tensors)):
            return None
        reach = tangents_of_sums(program)
        return _WholeGradients(
            form, [(parameter, store[target], reach.get(target, frozenset())) for parameter, target in sums]
        )

    @property
    def users(self) -> dict[str, torch.Tensor]:
        """The user's distributed parameters by name, whose hooks count."""
        assert self._form is not None
        return self._form.users

    def hooks_inside(self, hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
        """Those hooks of the model that are part of its program."""
        return shard_hooks(hooks)

    def end_forward(self, args: tuple[Any, ...]) -> None:
        """End what others have begun around a call that a program is going to run."""

    def eager(self, given: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call in eager mode."""
        return given(model, *args, **kwargs)


class FullyShardedCalls(ShardedCalls):
    """The same for a model after ``fully_shard``.

    Args:
        given: the model that ``fully_shard`` and ``optimize`` were given.
        optimized: what ``optimize`` makes of it.
        pipeline: the passes.

    Raises:
        PipelineError: as ``ShardedCalls`` raises it.
    """

    def __init__(self, given: nn.Module, optimized: nn.Module, pipeline: Pipeline) -> None:
        super().__init__(given, pipeline)
        if optimized is not given:
            _torch.share_state(given, optimized)
        for hooks, key in _torch.root_hooks(given):
            own = hooks[key].own if isinstance(hooks[key], _Around) else hooks[key]
            hooks[key] = _Around(own, type(optimized))

    def end_forward(self, args: tuple[Any, ...]) -> None:
        """Let FSDP2 end a forward that it has begun, which a program is going to run."""
        _, (hooks, key) = _torch.root_hooks(self._given)
        hooks[key].own(self._given, args, ())

    def eager(self, given: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call in eager mode around which FSDP2's hooks have done nothing."""
        before, behind = (hooks[key].own for hooks, key in _torch.root_hooks(self._given))
        args, kwargs = before(self._given, args, dict(kwargs))
        return behind(self._given, args, given(model, *args, **kwargs))


class ShardedSteps:
    """What whole steps of a model whose parameters are distributed tensors need beside their programs.

    Args:
        model: of which this rank has parts.
        optimizer: over its parameters.
        pipeline: the passes.

    Raises:
        CaptureError: for an optimizer that looks at more than one element of a parameter at a time, beside tensor
            parallelism.
        PipelineError: as ``ShardedCalls`` raises it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, pipeline: Pipeline) -> None:
        refuse_beside_sharding(pipeline, type(model).__name__)
        self._by_elements = any(type(optimizer).step is getattr(torch.optim, name).step for name in _BY_ELEMENTS)
        if not is_fully_sharded(model):
            self._refuse_whole(optimizer)
        self._model, self._optimizer, self._pipeline = model, optimizer, pipeline
        self._form: Form | None = None

    def local_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See ``DistributedInputs``; while ``as_shards`` lasts."""
        assert self._form is not None
        return self._form.inputs.local(args, kwargs)

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Around a whole step, in which nothing else may look at the model; see ``FullySharded``."""
        refuse_parameter_hooks(self._model)  # on the user's tensors, which the capture does not see
        with CAPTURE_LOCK:
            self._form = current_form(self._model, self._form, self._pipeline)
            if self._form.is_tensor_parallel:
                self._refuse_whole(self._optimizer)
            with self._form.as_shards(self._optimizer), whole_parameters(self._wholes(self._form)):
                yield

    def _wholes(self, form: Form) -> Mapping[int, WholeParameter]:
        """What an update has to know of shards, where it may take more than an element of a parameter at a time."""
        return form.wholes if isinstance(form, FullySharded) and not self._by_elements else {}

    def _refuse_whole(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._by_elements:
            raise CaptureError(
                f"{type(optimizer).__name__} is not known to update each element by itself, and of each parameter this "
                f"rank has a part: keep your loop with graphopt.optimize, or take one of {', '.join(_BY_ELEMENTS)}"
            )
