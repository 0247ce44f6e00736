"""Where a program's inputs come from at run time: the model, the optimizer, the batch, what passes keep."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx, nn

from graphopt.capture.step.update_settings import number_getter
from graphopt.errors import GraphoptError
from graphopt.ir.node import InputSpec, value_of
from graphopt.ir.program import Program
from graphopt.runtime.state.state_store import StateStore

__all__ = ["Binding", "stays", "tensor_getter"]


def tensor_getter(model: nn.Module, name: str) -> Callable[[], torch.Tensor]:
    """A function that fetches a parameter or buffer by its dotted name, also after it has been replaced."""
    path, _, attribute = name.rpartition(".")
    owner = model.get_submodule(path)
    places = vars(owner)
    kind = next((kind for kind in ("_parameters", "_buffers") if attribute in places[kind]), None)
    if kind is None:
        get = operator.attrgetter(attribute)
        return lambda: get(owner)
    return lambda: places[kind][attribute]


def stays(spec: InputSpec, model: nn.Module) -> bool:
    """Whether an input is one object until an assignment to the model or the optimizer's state."""
    if spec.role not in ("parameter", "buffer"):
        return spec.role == "state"
    path, _, attribute = spec.target.rpartition(".")
    places = vars(model.get_submodule(path))
    return attribute in places["_parameters"] or attribute in places["_buffers"]


def _of_batch() -> None:
    """What stands in the place of a tensor of the batch until it is known."""


class Binding:
    """Fetches the inputs of one program, in order; nothing is copied.

    Args:
        program: whose inputs.
        model: the source of parameters and buffers.
        optimizer: the source of state and learning rates; None for programs without an update.
        accumulators: the source of accumulated gradients, by parameter name; filled in by the caller.
        store: the source of what passes own across runs; by default tensors as they are before the first run.
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        accumulators: dict[str, torch.Tensor] | None = None,
        store: StateStore | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._accumulators = accumulators if accumulators is not None else {}
        self._model = model
        self._store = store or StateStore(model.get_parameter)
        self._store.require(program.pass_state)
        self._version: Hashable = None
        self._known: list[Callable[[], Any]] = []
        specs = list(zip(program.placeholders, program.inputs, strict=True))
        self._batch = [place for place, (_, spec) in enumerate(specs) if spec.role == "input"]
        self._stay = [place for place, (_, spec) in enumerate(specs) if stays(spec, model)]
        self._getters = [self._getter(node, spec, program) for node, spec in specs]

    def gather(self, batch: list[torch.Tensor], version: Hashable = None) -> list[Any]:
        """The inputs for one run.

        Args:
            batch: the tensors of the call, in the program's order.
            version: where it is that of the call before, parameters, buffers and optimizer state are the same objects
                as they were then, and are not looked up again; None looks up everything.
        """
        if version is None or version != self._version:
            inputs = [get() for get in self._getters]
            self._remember(inputs, version)
        else:
            inputs = [get() for get in self._known]
        for place, tensor in zip(self._batch, batch, strict=False):
            inputs[place] = tensor
        return inputs

    def _remember(self, inputs: list[Any], version: Hashable) -> None:
        """Keep what stays as long as the version does, by references that keep nothing alive."""
        self._version = version
        if version is not None:
            self._known = list(self._getters)
            for place in self._stay:
                self._known[place] = weakref.ref(inputs[place])

    def _getter(self, node: fx.Node, spec: InputSpec, program: Program) -> Callable[[], Any]:
        if spec.role in ("parameter", "buffer"):
            return tensor_getter(self._model, spec.target)
        if spec.role == "constant":
            constant = program.constants[node.name]
            return lambda: constant
        if spec.role == "input":
            return _of_batch
        if spec.role == "gradient":
            return lambda: self._accumulators[spec.target]
        if spec.role == "pass_state":
            return lambda: self._store[spec.target]
        if spec.role == "state":
            return self._state_getter(spec.target, tuple(value_of(node).shape))
        if spec.role == "hyperparameter":
            return self._number_getter(spec.target, isinstance(value_of(node), torch.Tensor))
        raise GraphoptError(f"the input {spec.target!r} plays the role {spec.role!r}, which nothing supplies")

    def _state_getter(self, target: str, shape: tuple[Any, ...]) -> Callable[[], torch.Tensor]:
        """Fetches a piece of state; one that was replaced is checked, since fused kernels do not."""
        assert self._optimizer is not None
        name, key = target.rsplit("/", 1)
        optimizer, parameter = self._optimizer, tensor_getter(self._model, name)
        known: Callable[[], torch.Tensor | None] = lambda: None  # noqa: E731

        def state() -> torch.Tensor:
            nonlocal known
            found: torch.Tensor = optimizer.state[parameter()][key]
            if found is not known():
                if tuple(found.shape) != shape:
                    raise GraphoptError(
                        f"the optimizer's state {target} has the shape {list(found.shape)}, and the program updates "
                        f"{list(shape)}: load what this optimizer saved with the same passes (shard-optimizer keeps "
                        "shards; a whole state has to be loaded before the first step, which cuts it)"
                    )
                known = weakref.ref(found)
            return found

        return state

    def _number_getter(self, target: str, as_tensor: bool) -> Callable[[], Any]:
        """Fetches a learning rate, as a tensor for fused kernels, or another number of the optimizer's groups."""
        assert self._optimizer is not None
        optimizer = self._optimizer
        if not target.startswith("lr["):
            return number_getter(optimizer, target)
        group = int(target[len("lr[") : -1])
        kept: tuple[float, torch.Tensor] | None = None

        def rate() -> Any:
            nonlocal kept
            value = optimizer.param_groups[group]["lr"]
            if isinstance(value, torch.Tensor) or not as_tensor:
                return value
            if kept is None or kept[0] != value:
                kept = value, torch.tensor(value, dtype=torch.float64)
            return kept[1]

        return rate
