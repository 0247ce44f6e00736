"""A model whose parameters are distributed tensors (``parallelize_module``), as a program sees it: ops of this rank.

What an op does on other ranks is decided where torch dispatches it on distributed tensors, below autograd: on the way
back each gradient has placements of its own, and communicates by these. So the whole call is one node of the forward
program, and its ops, collectives among them, are seen where the program is differentiated. Inside of the node this
rank's parts are made distributed tensors again, and results are taken to pieces, so that parameters and results of the
program are plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from graphopt import _torch
from graphopt.capture.call.flatten import Structure, flatten
from graphopt.capture.call.local_parameters import LocalParameters
from graphopt.errors import CaptureError

__all__ = [
    "DistributedCall",
    "DistributedInputs",
    "DistributedResults",
    "GradientSpec",
    "TensorParallel",
    "distributed_call",
    "has_distributed_tensors",
    "trace_as_one",
]


def has_distributed_tensors(model: object) -> bool:
    """Whether parameters or buffers of a model are distributed tensors."""
    return isinstance(model, nn.Module) and any(
        _torch.is_distributed(tensor) for tensor in (*model.parameters(), *model.buffers())
    )


@dataclass(frozen=True, eq=False)
class _Distributed:
    """A parameter or buffer that is a distributed tensor; see ``DistributedTensor``."""

    path: str
    places: tuple[tuple[nn.Module, str], ...]
    tensor: Any

    @property
    def local(self) -> torch.Tensor:
        local = _torch.local_part(self.tensor)
        assert local is not None
        return local

    def distributed(self, local: torch.Tensor) -> Any:
        return _torch.distributed_from(local.detach(), self.tensor._spec, _as_it_is)


def _as_it_is(placements: Sequence[Any], _size: torch.Size) -> Sequence[Any]:
    return placements


class TensorParallel:
    """A model with distributed tensors.

    Args:
        model: is not changed but while ``as_shards`` lasts.

    Attributes:
        inputs: of calls that are distributed tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors = _distributed_tensors(model)
        self._locals = LocalParameters(self._tensors)
        self.inputs = DistributedInputs(type(model).__name__)
        self._gradients: dict[str, tuple[Any, ...]] = {}
        self._updates = False

    @property
    def is_tensor_parallel(self) -> bool:
        """Always."""
        return True

    @property
    def is_current(self) -> bool:
        """Whether the model has the same distributed tensors as when this was made."""
        found = [each.tensor for each in _distributed_tensors(self._model)]
        return len(found) == len(self._tensors) and all(
            now is each.tensor for now, each in zip(found, self._tensors, strict=True)
        )

    def take_over(self, known: TensorParallel) -> None:
        """Go on with what programs are of that an earlier form of the model was for.

        Raises:
            CaptureError: where a tensor is distributed otherwise than there.
        """
        before = {each.path: each.tensor._spec for each in known._tensors}
        for each in self._tensors:
            if before.get(each.path) != each.tensor._spec:
                raise CaptureError(
                    f"{each.path!r} of {type(self._model).__name__} is distributed otherwise than when programs were "
                    "captured: optimize the model behind such a change"
                )
        self.inputs, self._gradients = known.inputs, known._gradients

    @property
    def users(self) -> dict[str, torch.Tensor]:
        """The user's distributed tensors by name."""
        return {each.path: each.tensor for each in self._tensors}

    @contextmanager
    def as_shards(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
        """While a call is looked at, captured, or its tensors are gathered, the model is as a program sees it.

        Args:
            optimizer: of a whole step, which then holds this rank's parts too, and state of these.
        """
        self._updates = optimizer is not None
        with self._locals.in_place(optimizer):
            trace_as_one(self, map(self._locals.part, self._tensors))
            yield

    def connected(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See ``LocalParameters``."""
        return self._locals.connected(tensors, self._gradients)

    def placements(self, path: str, found: Sequence[Any], size: torch.Size) -> Sequence[Any]:
        """The placements that a parameter's gradient has in a program.

        Those of eager mode, but for a sum over ranks of which a rank's part is larger than that of the parameter, and
        for an update of this rank's part, which takes that of the gradient: these are reduced in the program, as an
        optimizer of torch's would have them reduced.

        Args:
            path: of the parameter.
            found: those of eager mode.
            size: of this rank's part of the gradient.

        Raises:
            CaptureError: where they were others in another program.
        """
        tensor = next(each for each in self._tensors if each.path == path)
        if self._updates or size != tensor.local.shape:
            return tuple(tensor.tensor.placements)
        self._note(path, found)
        return found

    def _note(self, path: str, placements: Sequence[Any]) -> None:
        if self._gradients.setdefault(path, tuple(placements)) != tuple(placements):
            raise CaptureError(
                f"the gradient of {path!r} has the placements {self._gradients[path]} in one program and {placements} "
                "in another one, and a drop-in model has one: optimize a copy of the model for each kind of call"
            )

    def spec_of(self, part: torch.Tensor) -> GradientSpec | None:
        """See ``Form``."""
        found = next((each for each in self._tensors if self._locals.part(each) is part), None)
        if found is None:
            return None
        return GradientSpec(found.tensor._spec, functools.partial(self.placements, found.path))


class Form(Protocol):
    """How a program sees a model of which this rank has parts.

    Attributes:
        inputs: of calls that are distributed tensors.
    """

    inputs: DistributedInputs

    def spec_of(self, part: torch.Tensor, /) -> GradientSpec | None:
        """What is made of a part in a call that is traced as one node; None where nothing is."""
        ...


@dataclass(frozen=True)
class GradientSpec:
    """The distributed tensor that is made of a part.

    Attributes:
        spec: of the tensor.
        placements: of its gradient.
    """

    spec: Any
    placements: _torch.PlacementsOfGradient


def trace_as_one(form: Form, parts: Iterable[torch.Tensor]) -> None:
    """Let calls of a model be traced as one node, as long as it has these parts.

    Args:
        form: of the model.
        parts: some of its parameters.
    """
    for part in parts:
        _FORMS[part] = form


_FORMS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By what stands in a model for a distributed tensor, the form that has put it there."""


def _distributed_tensors(model: nn.Module) -> list[_Distributed]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if _torch.is_distributed(tensor):
                    found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
                    places.setdefault(id(tensor), []).append((module, name))
    return [_Distributed(path, tuple(places[key]), tensor) for key, (path, tensor) in found.items()]


class DistributedInputs:
    """Inputs of calls that are distributed tensors, of which programs take this rank's parts.

    Args:
        title: the model's class.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._known: dict[object, list[Any]] = {}

    def local(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call with this rank's parts of them, through which gradients go.

        Raises:
            CaptureError: where the parts are like those of an earlier call, and the placements are others.
        """
        leaves, structure = _torch.pytree.tree_flatten((args, dict(kwargs)))
        specs = [leaf._spec if _torch.is_distributed(leaf) else None for leaf in leaves]
        leaves = [_torch.local_from(leaf) if _torch.is_distributed(leaf) else leaf for leaf in leaves]
        of_tensors = [spec for spec, leaf in zip(specs, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        key = str(structure), tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
        if self._known.setdefault(key, of_tensors) != of_tensors:
            raise CaptureError(
                f"{self._title} is given tensors whose parts on this rank are like those of an earlier call, and which "
                "are distributed otherwise, or in one of the two calls alone: give one placement for each size"
            )
        args, kwargs = _torch.pytree.tree_unflatten(leaves, structure)
        return args, dict(kwargs)

    def specs_of(self, tensors: Sequence[torch.Tensor], structure: object) -> list[Any]:
        """What is made of the tensors of a call inside of its program; None where nothing is."""
        key = str(structure), tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        return self._known.get(key, [None] * len(tensors))


class DistributedCall:
    """A function of a model with distributed tensors and a batch, as a forward program has it: one node.

    Args:
        model: as it is while ``TensorParallel.as_shards`` lasts.
        call: the function.
        form: of the model.

    Attributes:
        surroundings: in which the function runs where the program is differentiated, for the tensors of the batch.
        results: the specs of those results that are distributed tensors in eager mode, by where they are in the result.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], form: Form) -> None:
        self.model = model
        self._call = call
        named = _named(model)
        self._names = list(named)
        self._specs = {name: spec for name, tensor in named.items() if (spec := form.spec_of(tensor))}
        self.surroundings: Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]] = lambda _: nullcontext()
        self._form = form
        self._inputs: Structure | None = None
        self._given: list[Any] = []
        self._outputs: Structure | None = None
        self.results: dict[str, Any] = {}

    def traced(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the function under trace, as one node."""
        tensors, self._inputs = flatten((args, kwargs))
        self._given = self._form.inputs.specs_of(tensors, self._inputs.spec)
        results = _torch.traced_as_one(self, "distributed_call", *_named(model).values(), *tensors)
        assert self._outputs is not None
        return self._outputs.restore(results)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the function on given parameters, buffers and inputs; returns the tensors of its result."""
        assert self._inputs is not None
        given = dict(zip(self._names, tensors, strict=False))
        made: dict[int, Any] = {}
        for name, tensor in given.items():
            made.setdefault(id(tensor), self._distributed(name, tensor))
        versions = [tensor._version for tensor in tensors]
        batch = [
            tensor if spec is None else _torch.distributed_from(tensor, spec, _torch.placements_of_gradient(spec))
            for tensor, spec in zip(tensors[len(given) :], self._given, strict=True)
        ]
        args, kwargs = self._inputs.restore(batch)
        put = {name: made[id(tensor)] for name, tensor in given.items()}
        with self.surroundings(tensors[len(given) :]), _in_modules(self.model, put):
            result = self._call(self.model, *args, **kwargs)
        self._refuse_writes(tensors, versions)
        flat, self._outputs = flatten(result)
        found = [_torch.local_from(each) if _torch.is_distributed(each) else each for each in flat]
        self.results = {
            path: each._spec  # type: ignore[attr-defined]
            for path, each in zip(self._outputs.paths, flat, strict=True)
            if _torch.is_distributed(each)
        }
        return tuple(found)

    def _distributed(self, name: str, tensor: torch.Tensor) -> Any:
        if name not in self._specs:
            return tensor
        found = self._specs[name]
        return _torch.distributed_from(tensor, found.spec, found.placements)

    def _refuse_writes(self, tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
        for place, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if tensor._version != version:
                name = self._names[place] if place < len(self._names) else f"input {place - len(self._names)}"
                raise CaptureError(
                    f"{type(self.model).__name__} writes to {name} in forward, and its parameters are distributed "
                    "tensors: such a call is captured as a whole, in which writes are not seen\n  what to do: return "
                    "the new value, or put the module in eval mode"
                )


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@contextmanager
def _in_modules(model: nn.Module, tensors: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile, a model has these as parameters and buffers."""
    with ExitStack() as stack:
        for path, tensor in tensors.items():
            owner, _, name = path.rpartition(".")
            module = model.get_submodule(owner)
            store: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            stack.callback(store.__setitem__, name, store[name])
            store[name] = tensor
        yield


def distributed_call(model: nn.Module, call: Callable[..., Any]) -> DistributedCall | None:
    """A function of a model that is traced as one node, where ``TensorParallel.as_shards`` lasts; None for others."""
    form = next((_FORMS[tensor] for tensor in _named(model).values() if tensor in _FORMS), None)
    return None if form is None else DistributedCall(model, call, form)


class DistributedResults(Structure):
    """The shape of a result, some of whose tensors are distributed ones in eager mode."""

    @property
    def is_alone(self) -> bool:
        """Never, as far as its caller goes: the value is not what the program returns."""
        return False

    @classmethod
    def of(cls, structure: Structure, specs: Mapping[str, Any]) -> Structure:
        """The structure of what a call returns, for that of what its program returns."""
        if not specs:
            return structure
        found = cls(structure.spec, structure.leaves, structure.is_tensor, structure.paths, structure.classes)
        object.__setattr__(found, "specs", [specs.get(path) for path in structure.paths])
        return found

    def restore(self, tensors: Any) -> Any:
        """The result with ``tensors`` put back."""
        specs: list[Any] = vars(self)["specs"]
        return super().restore(
            each if spec is None else _torch.local_result(each, spec)
            for each, spec in zip(tensors, specs, strict=False)
        )
