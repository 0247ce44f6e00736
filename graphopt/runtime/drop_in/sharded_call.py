"""Calls of a model after ``fully_shard``: programs in training, FSDP2 itself in all other calls.

FSDP2 hooks the forward of the model too. Around a call that runs a program, in which gathers are ops, these two hooks
do nothing; in eval mode and without gradients they act as always, and a call that goes to eager mode at last runs them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphopt import _torch
from graphopt.capture.call.sharded_form import FullySharded, shard_hooks
from graphopt.capture.effects.side_effects import CAPTURE_LOCK, refuse_parameter_hooks
from graphopt.errors import CaptureError
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.drop_in.wrapped import refuse_beside_sharding

__all__ = ["ShardedCalls", "ShardedSteps"]


_BY_ELEMENTS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Optimizers of ``torch.optim`` whose update of a shard is the shard of the update."""


class _Around:
    """A hook of FSDP2's on the model, which leaves calls that run a program alone."""

    def __init__(self, own: Callable[..., Any], optimized: type) -> None:
        self.own, self._optimized = own, optimized

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if isinstance(module, self._optimized) and module.training and torch.is_grad_enabled():
            return None
        return self.own(module, *args)


class ShardedCalls:
    """What calls of an optimized model after ``fully_shard`` need beside its captures.

    Args:
        given: the model that ``fully_shard`` and ``optimize`` were given.
        optimized: what ``optimize`` makes of it.
        pipeline: the passes.

    Raises:
        PipelineError: for a pass that exchanges gradients, or checks them on each rank by itself.
    """

    def __init__(self, given: nn.Module, optimized: nn.Module, pipeline: Pipeline) -> None:
        refuse_beside_sharding(pipeline, type(given).__name__)
        self._given = given
        self._form: FullySharded | None = None
        if optimized is not given:
            _torch.share_state(given, optimized)
        for hooks, key in _torch.root_hooks(given):
            own = hooks[key].own if isinstance(hooks[key], _Around) else hooks[key]
            hooks[key] = _Around(own, type(optimized))

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """See ``FullySharded``; the parameters have to be there by the first call."""
        if self._form is None or not self._form.is_current:
            self._form = FullySharded(self._given)
        with self._form.as_shards():
            yield

    def connected(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``FullySharded``."""
        assert self._form is not None
        return self._form.connected(tensors)

    @property
    def users(self) -> dict[str, torch.Tensor]:
        """The user's sharded parameters by name, whose hooks count."""
        assert self._form is not None
        return {parameter.path: parameter.tensor for group in self._form.groups for parameter in group.parameters}

    def hooks_inside(self, hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
        """Those hooks of the model that are part of its program."""
        return shard_hooks(hooks)

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
    """What whole steps of a model after ``fully_shard`` need beside their programs.

    Args:
        model: that ``fully_shard`` was given.
        optimizer: over its parameters.
        pipeline: the passes.

    Raises:
        CaptureError: for an optimizer that looks at more than one element of a parameter at a time.
        PipelineError: as ``ShardedCalls`` raises it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, pipeline: Pipeline) -> None:
        refuse_beside_sharding(pipeline, type(model).__name__)
        if not any(type(optimizer).step is getattr(torch.optim, name).step for name in _BY_ELEMENTS):
            raise CaptureError(
                f"{type(optimizer).__name__} is not known to update each element by itself, and of each parameter this "
                f"rank has a shard: keep your loop with graphopt.optimize, or take one of {', '.join(_BY_ELEMENTS)}"
            )
        self._model, self._optimizer = model, optimizer
        self._form: FullySharded | None = None

    @contextmanager
    def as_shards(self) -> Iterator[None]:
        """Around a whole step, in which nothing else may look at the model; see ``FullySharded``."""
        refuse_parameter_hooks(self._model)  # on the user's tensors, which the capture does not see
        with CAPTURE_LOCK:
            if self._form is None or not self._form.is_current:
                self._form = FullySharded(self._model)
            with self._form.as_shards(self._optimizer):
                yield
