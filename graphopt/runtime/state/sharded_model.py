"""A model whose parameters are without memory between steps, since each rank keeps shards of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.groups import Group, find_group
from graphopt.ir.state import PassState
from graphopt.ir.words.written_units import counted, format_bytes
from graphopt.rewriting.distributed.rank_names import place
from graphopt.rewriting.shards import shard_of
from graphopt.runtime.state.sharded_parameter import (
    WaitingShard,
    become_plain,
    become_sharded,
    become_whole,
    hide,
    is_sharded,
    take_waiting,
    waiting_shard,
)
from graphopt.runtime.state.state_store import StateStore

__all__ = ["OwnShard", "ShardedModel"]

logger = logging.getLogger(__name__)


class ShardedModel:
    """Takes the memory of parameters away whose shards a store keeps, and gives it back for a while.

    Args:
        model: whose parameters.
        store: has the shards.
    """

    def __init__(self, model: nn.Module, store: StateStore) -> None:
        self._model = model
        self._store = store
        self._shards: dict[str, tuple[str, PassState]] = {}
        found = ((name, waiting_shard(parameter)) for name, parameter in model.named_parameters())
        self._waiting = {name: shard.group for name, shard in found if shard is not None}
        self._whole = 0

    @property
    def divides(self) -> bool:
        """Whether there are parameters of which each rank has a shard."""
        return bool(self._shards or self._waiting)

    @property
    def waits(self) -> bool:
        """Whether there are shards that no program has been asked for yet."""
        return bool(self._waiting)

    def refuse_step(self) -> None:
        """Raise where parameters are whole for a while: a step would take their memory away.

        Raises:
            GraphoptError: saying so.
        """
        if self._whole and self.divides:
            raise GraphoptError(
                "a step inside of `with step.whole_parameters():`, where parameters are whole: call it outside"
            )

    def take(self, states: Mapping[str, PassState]) -> None:
        """Let parameters be their shards from now on.

        One that has memory, since it is new to this, or was replaced, gives its shard the values that it has. One whose
        shard has been waiting, and of which the program keeps none, becomes whole; all ranks come here together.

        Args:
            states: what the passes of a program keep, by name.
        """
        self._shards |= {state.source: (target, state) for target, state in states.items() if state.shard is not None}
        self._cut()
        left = [name for name in self._waiting if name not in self._shards]
        if left:
            sizes = (parameter.numel() * parameter.element_size() for parameter in map(self._model.get_parameter, left))
            logger.warning(
                "what graphopt.materialize_shards had divided becomes whole on every rank, %s (%s first), %s in all: "
                "no pass keeps shards of them; give shard-parameters, with the same min_bytes",
                counted(len(left), "parameters"), left[0], format_bytes(sum(sizes)),
            )  # fmt: skip
        with torch.no_grad():
            for name in left:
                self._gather(name)
        self._waiting.clear()

    def _cut(self) -> None:
        """Let parameters that are whole be their shards again."""
        with torch.no_grad():
            for name in (*self._shards, *self._waiting):
                parameter = self._model.get_parameter(name)
                if is_sharded(parameter) or not parameter.untyped_storage().nbytes():
                    continue
                if name not in self._shards:
                    become_sharded(name, parameter, WaitingShard.cut(parameter, self._waiting[name]))
                    continue
                target, state = self._shards[name]
                self._store[target].copy_(state.create(parameter))
                become_sharded(name, parameter)

    @contextlib.contextmanager
    def described(self) -> Iterator[None]:
        """Let parameters be plain ones, without memory, for who looks at their shapes and dtypes only."""
        names = (*self._shards, *self._waiting) if not self._whole else ()
        empty = [(name, found) for name in names if is_sharded(found := self._model.get_parameter(name))]
        for _, parameter in empty:
            become_plain(parameter)
        try:
            yield
        finally:
            for _, parameter in empty:
                hide(parameter)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Let parameters be whole on all ranks, which have to come here together; what is changed is taken over."""
        self._whole += 1
        try:
            if self._whole == 1:
                with torch.no_grad():
                    for name in dict.fromkeys((*self._shards, *self._waiting)):
                        self._gather(name)
            yield
        finally:
            self._whole -= 1
            if not self._whole:
                self._cut()

    def _gather(self, name: str) -> None:
        parameter = self._model.get_parameter(name)
        kept = self._shards.get(name)
        waiting = take_waiting(parameter)
        if kept is not None and is_sharded(parameter):
            become_whole(parameter, self._store[kept[0]], kept[1].group)
        elif waiting is not None:
            become_whole(parameter, waiting.tensor, waiting.group)

    # --- saving ------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._model

    @property
    def over_all_ranks(self) -> bool:
        """Whether parameters are divided over all processes, in the order of their ranks."""
        groups = {state.group for _, state in self._shards.values()} | set(self._waiting.values())
        return all((find_group(group).rank, find_group(group).size) == place() for group in groups)

    def own_shards(self) -> dict[torch.Tensor, OwnShard]:
        """What this rank has of each parameter that is without memory; to be called under ``described``."""
        found: dict[torch.Tensor, OwnShard] = {}
        for name in dict.fromkeys((*self._shards, *self._waiting)) if not self._whole else ():
            parameter = self._model.get_parameter(name)
            if parameter.untyped_storage().nbytes():
                continue
            waiting = waiting_shard(parameter)
            tensor = waiting.tensor if waiting is not None else self._store[self._shards[name][0]]
            group = find_group(waiting.group if waiting is not None else self._shards[name][1].group)
            found[parameter] = OwnShard(tensor, group, *shard_of(parameter.numel(), group.rank, group.size))
        return found


@dataclass(frozen=True, slots=True)
class OwnShard:
    """What a rank has of a parameter.

    Attributes:
        padded: of shape [ceil(elements / ranks)], zeros behind the elements.
        group: over which the parameter is divided.
        first: of the elements, in the order of memory.
        length: how many elements.
    """

    padded: torch.Tensor
    group: Group
    first: int
    length: int

    @property
    def tensor(self) -> torch.Tensor:
        """The elements alone; shares memory with ``padded``."""
        return self.padded[: self.length]
