"""The tensors behind inputs that are pass state: one for each name, shared by everything that runs for one owner."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.ops.communication.collectives import WAIT
from graphopt.ir.state import PassState
from graphopt.runtime.state.sharded_parameter import take_waiting, waiting_shard

__all__ = ["StateStore"]

logger = logging.getLogger("graphopt")


class StateStore:
    """What the passes of one step or one model own across runs.

    A tensor comes into being when the first program that holds it is compiled. What is loaded before waits until then.

    Args:
        parameter: the parameter of a name, for tensors that start as copies of one.
    """

    def __init__(self, parameter: Callable[[str], torch.Tensor]) -> None:
        self._parameter = parameter
        self._specs: dict[str, PassState] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        self._loaded_local: tuple[str, ...] = ()
        self._elsewhere: dict[str, StateStore] = {}
        self._followed: dict[str, tuple[int, int]] = {}
        self._told = False

    def __getitem__(self, target: str) -> torch.Tensor:
        return self._tensors[target]

    def __contains__(self, target: str) -> bool:
        return target in self._tensors

    def peek(self, target: str) -> torch.Tensor | None:
        """The tensor of a name, or what was loaded for it; None before there is either."""
        found = self._tensors.get(target)
        return found if found is not None else self._loaded.get(target)

    def require(self, wanted: Mapping[str, PassState]) -> None:
        """Make every tensor that a program holds and that does not exist yet.

        Raises:
            GraphoptError: where one exists, or was loaded, with another shape or dtype, or on another device.
        """
        for target, spec in wanted.items():
            known = self._specs.get(target)
            if known is None:
                self._tensors[target] = self._create(target, spec)
                self._specs[target] = spec
            elif (known.shape, known.dtype, known.device) != (spec.shape, spec.dtype, spec.device):
                raise GraphoptError(
                    f"{target!r} is kept as {known.dtype} of shape {known.shape} on {known.device}, and a program "
                    f"wants {spec.dtype} of shape {spec.shape} on {spec.device}: make a new optimized model or step "
                    "after moving the model or changing its shapes"
                )

    def _create(self, target: str, spec: PassState) -> torch.Tensor:
        elsewhere = self._elsewhere.get(target)
        if elsewhere is not None:
            elsewhere.require({target: spec})
            return elsewhere[target]
        loaded = self._loaded.pop(target, None)
        if loaded is None:
            source = self._parameter(spec.source) if spec.source else None
            return _waited(target, source, spec) if waiting_shard(source) is not None else spec.create(source)
        _check(target, loaded, spec)
        return loaded.to(spec.device)

    def refresh(self) -> None:
        """Copy parameters that were changed or replaced since ``settle`` to the tensors that follow them.

        To be called before a run: ``load_state_dict`` and every other write from outside would else leave the copies
        as they were.
        """
        for target, source in self._sources(follows=True):
            if self._followed.get(target) != _state_of(source):
                self._tensors[target].copy_(source.detach())
        self._tell_of_changes()

    def settle(self) -> None:
        """Take the parameters as they are for what the tensors are of; to be called after a run."""
        for follows in (True, False):
            for target, source in self._sources(follows=follows):
                self._followed[target] = _state_of(source)

    def _sources(self, *, follows: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for target, spec in self._specs.items():
            if spec.source and spec.shard is None and spec.follows is follows:
                yield target, self._parameter(spec.source)

    def _tell_of_changes(self) -> None:
        """Warn, once, of parameters that were changed from outside, beside which a tensor stays what it was."""
        for target, source in () if self._told else self._sources(follows=False):
            if self._followed.get(target, _state_of(source)) != _state_of(source):
                self._told = True
                logger.warning(
                    "%r was changed outside of the step, and %r, which began as a copy of it, is what it was: where it "
                    "was loaded, load the step's state too (step.load_state_dict), or make a new step",
                    self._specs[target].source,
                    target,
                )
                return

    def share(self, target: str, other: StateStore) -> None:
        """Take the tensor of a name from another store.

        Raises:
            GraphoptError: where this store has one of its own already.
        """
        if target in self._tensors:
            raise GraphoptError(f"{target!r} exists already: share it before the first call of the models")
        self._elsewhere[target] = other

    # --- saving ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors that belong into checkpoints, those loaded and not yet used among them."""
        self.await_exchanges()
        saved = {target: self._tensors[target] for target, spec in self._specs.items() if spec.saved}
        return {target: tensor.detach().clone() for target, tensor in {**self._loaded, **saved}.items()}

    def local(self) -> list[str]:
        """The names of those in ``state_dict`` that differ from rank to rank."""
        waiting = [target for target in self._loaded_local if target in self._loaded]
        return waiting + [target for target, spec in self._specs.items() if spec.saved and spec.local]

    def load(self, state: Mapping[str, torch.Tensor], local: Sequence[str] = ()) -> None:
        """Continue from ``state_dict``; tensors that exist keep their place in memory.

        Before the first program is compiled the state is kept, and checked when it is.

        Args:
            state: by name.
            local: the names of those that differ from rank to rank.

        Raises:
            GraphoptError: for names, shapes or dtypes that do not fit; nothing is changed then.
        """
        wrong = [name for name, tensor in state.items() if not isinstance(tensor, torch.Tensor)]
        if wrong:
            raise GraphoptError(
                f"the state of passes consists of tensors, and {wrong[0]!r} is a {type(state[wrong[0]]).__name__}"
            )
        if not self._specs:
            self._loaded = {name: tensor.detach().clone() for name, tensor in state.items()}
            self._loaded_local = tuple(local)
            return
        known = {target for target, spec in self._specs.items() if spec.saved}
        _refuse_names(set(state) - known, known - set(state), known)
        for name, tensor in state.items():
            _check(name, tensor, self._specs[name])
        self.await_exchanges()
        for name, tensor in state.items():
            self._tensors[name].copy_(tensor)
        self._followed.clear()

    def await_exchanges(self) -> None:
        """Wait for exchanges that a run has started and that a later one would wait for."""
        for tensor in self._tensors.values():
            WAIT(tensor)

    def replace(self, target: str, tensor: torch.Tensor) -> None:
        """Keep another tensor of equal values under a name: one that lies elsewhere."""
        self._tensors[target] = tensor

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that exist."""
        yield from self._tensors.values()

    def put(self, target: str, value: torch.Tensor) -> None:
        """Set one tensor, or what it will start from."""
        if target in self._tensors:
            self._tensors[target].copy_(value)
        else:
            self._loaded[target] = value.detach().clone()

    def check_loaded(self) -> None:
        """Raise where something loaded before the first capture belongs to no tensor of the captured programs."""
        if self._loaded:
            names, self._loaded = set(self._loaded), {}
            _refuse_names(names, (), [target for target, spec in self._specs.items() if spec.saved])


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one after every write, and for every other tensor."""
    return tensor.data_ptr(), tensor._version


def _waited(target: str, source: torch.Tensor | None, spec: PassState) -> torch.Tensor:
    """What the tensor of a pass starts from, of a parameter whose shard waits for it."""
    waiting = waiting_shard(source)
    assert waiting is not None
    assert source is not None
    if spec.shard is None or (waiting.group, tuple(waiting.tensor.shape)) != (spec.group, spec.shape):
        raise GraphoptError(
            f"{target!r} starts from the parameter {spec.source!r}, of which each rank of {waiting.group!r} "
            "has a shard (graphopt.materialize_shards): give shard-parameters the same group, and leave out what "
            "keeps whole copies"
        )
    take_waiting(source)
    return waiting.tensor


def _check(name: str, tensor: torch.Tensor, spec: PassState) -> None:
    if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
        raise GraphoptError(
            f"the loaded state of {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; it must be {spec.dtype} "
            f"of shape {spec.shape}: is it of another model, or of other options of a pass?"
        )


def _refuse_names(unknown: Iterable[str], missing: Iterable[str], known: Iterable[str]) -> None:
    problems = [
        f"{name!r} is kept by no pass here; {did_you_mean(name, known)}".rstrip("; ") for name in sorted(unknown)
    ]
    problems += [f"{name!r} is missing" for name in sorted(missing)]
    if problems:
        raise GraphoptError(
            "the state of passes does not fit; give the same passes, with the same options, as when it was saved:\n  "
            + "\n  ".join(problems)
        )
