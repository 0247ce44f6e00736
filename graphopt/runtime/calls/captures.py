"""Captured programs by call signature, and which of them serves a call.

Whether a captured program fits a call: everything that a capture depends on, as one key.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from graphopt.capture.call.flatten import Structure
from graphopt.capture.call.tensor_classes import has_rules
from graphopt.capture.effects.tensor_effects import attributes_set
from graphopt.capture.guards.fingerprint import by_value, global_flags
from graphopt.ir.graphs.autocast import autocast_state
from graphopt.runtime.calls.size_rules import SizeRules

__all__ = ["Captures", "HasRules", "call_parts", "part_signature", "signature"]

logger = logging.getLogger(__name__)
_MANY = 8
"""The captures at each multiple of which a user hears of them."""

_MOST = 256
"""The captures for fixed sizes that are kept: a run whose calls never repeat would fill the memory otherwise."""


class HasRules(Protocol):
    """What is kept per signature."""

    rules: SizeRules


E = TypeVar("E", bound=HasRules)


@dataclass
class Captures(Generic[E]):
    """Keeps one capture per signature, and says when captures pile up; of very many, those that were used last."""

    _found: dict[Hashable, list[E]] = field(default_factory=dict)
    latest: E | None = None
    _told: int = 0
    _lets_go: bool = False

    def find(self, key: Hashable, tensors: list[torch.Tensor]) -> E | None:
        """The capture that serves a call; None where there is none yet.

        Raises:
            GraphoptError: for sizes that are outside of what a user has declared.
        """
        for capture in self._found.get(key, ()):
            if not capture.rules or capture.rules.match(tensors) is not None:
                if len(self._found) > _MOST // 2:
                    self._found[key] = self._found.pop(key)
                self.latest = capture
                return capture
        return None

    def add(self, key: Hashable, capture: E) -> E:
        """Keep a capture for calls of a signature; one can serve several."""
        self._found.setdefault(key, []).append(capture)
        self.latest = capture
        self._let_go()
        count = len(self.all())
        if count % _MANY == 0 and count != self._told:
            self._told = count
            logger.warning(
                "captured %d programs for different calls; sizes or Python arguments that change from call to call "
                "each need one: pad the batch, pass numbers as tensors, or give dynamic_shapes=",
                count,
            )
        return capture

    def _let_go(self) -> None:
        """Forget the captures for fixed sizes that have not been used for longest, where there are too many."""
        fixed = {id(capture): key for key, found in self._found.items() for capture in found if not capture.rules}
        for identity, key in list(fixed.items())[: max(0, len(fixed) - _MOST)]:
            self._found[key] = [capture for capture in self._found[key] if id(capture) != identity]
            if not self._found[key]:
                del self._found[key]
            if not self._lets_go:
                self._lets_go = True
                logger.warning(
                    "there are more than %d programs for different calls: the one that was not used for longest is let "
                    "go, and is captured anew when it is called for",
                    _MOST,
                )

    def all(self) -> list[E]:
        """Every capture, once."""
        return list({id(capture): capture for captures in self._found.values() for capture in captures}.values())

    def clear(self) -> None:
        """Forget every entry."""
        self._found.clear()
        self.latest = None


def signature(
    model_key: Hashable, structure: Structure, tensors: list[torch.Tensor], *, sizes: bool = True
) -> Hashable:
    """Everything about a call that a capture depends on; equal signatures can share one program.

    Args:
        model_key: of the model (``ModelFingerprint``).
        structure: of the arguments, with the values of those that are not tensors.
        tensors: the tensors among the arguments.
        sizes: whether sizes count (not where they may vary).
    """
    return (
        structure.key,
        *call_parts(tensors, sizes=sizes),
        model_key,
        global_flags(),
        autocast_state(),
    )


def call_parts(tensors: list[torch.Tensor], *, sizes: bool) -> tuple[tuple[Hashable, ...], Hashable]:
    """What a capture depends on of the tensors of a call: of each its metadata, and which of them share memory."""
    return tuple(_metadata(tensor, sizes) for tensor in tensors), _sharing(tensors)


def part_signature(arguments: tuple[Any, ...]) -> tuple[Hashable, Hashable]:
    """What a part of a model depends on beside what Dynamo looks at: torch's settings, and memory that is shared."""
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    return _sharing(tensors), global_flags()


def _metadata(tensor: torch.Tensor, sizes: bool) -> Hashable:
    lazily = tensor.is_conj(), tensor.is_neg()  # views that stand for the conjugate, or the negative, of their elements
    known = tensor.dtype, tensor.device, tensor.requires_grad, type(tensor), lazily, _attributes(tensor)
    if tensor.layout is not torch.strided:
        return *known, tensor.layout, tuple(tensor.shape)
    if sizes:
        return *known, tuple(tensor.shape), tensor.stride()
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    return *known, tensor.dim(), tuple(order), tensor.is_contiguous()


def _attributes(tensor: torch.Tensor) -> Hashable:
    """What Python has set on a tensor, but for names of libraries' own."""
    own = attributes_set(tensor)
    return by_value(own) if own else ()


def _sharing(tensors: list[torch.Tensor]) -> Hashable:
    """Which arguments are the same tensor, or lie in the same memory."""
    if len(tensors) < 2:
        return ()
    memory: dict[int, int] = {}
    places = [memory.setdefault(_memory(tensor), index) for index, tensor in enumerate(tensors)]
    if len(memory) == len(tensors):
        return ()
    same: dict[int, int] = {}
    return tuple(places), tuple(same.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor lies; its own number where it takes no memory, or is made of others."""
    made = tensor.layout is not torch.strided or has_rules(type(tensor))
    place = 0 if made or not tensor.numel() else tensor.untyped_storage().data_ptr()
    return place or -id(tensor)
