"""Questions that models of ``transformers`` ask of the values of masks and positions: answered as in eager mode.

Where a mask hides nothing, and positions count up, these models leave the mask to the attention kernel. They do not
look while they are traced: they build the mask, repeat keys and values for it, and round otherwise than in eager mode.
Here they are told: of what the model made itself, the answer; of what the call gives, the answer for this call, which
is noted, since a program is only for calls with the same one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from graphopt import _torch
from graphopt.capture.call.without_memory import has_memory

__all__ = ["PROPERTIES", "Question", "Questions", "answer", "known_kind"]

logger = logging.getLogger(__name__)

_MODULE = "transformers.masking_utils"


def _hides_nothing(mask: torch.Tensor) -> torch.Tensor:
    return mask.all()


def _all_ones(mask: torch.Tensor) -> torch.Tensor:
    return (mask == 1).all()


def _count_up(positions: torch.Tensor) -> torch.Tensor:
    return (positions.diff(dim=-1) == 1).all()


PROPERTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hides nothing": _hides_nothing,
    "is all ones": _all_ones,
    "counts up": _count_up,
}
"""What models ask of a tensor, by name."""


@dataclass(frozen=True)
class Question:
    """Something that a model has asked of a tensor of the call.

    Attributes:
        place: of the tensor among those of the call.
        asked: a key of ``PROPERTIES``.
    """

    place: int
    asked: str


def answer(questions: Iterable[Question], tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """What a call's tensors answer."""
    with torch.no_grad():
        return tuple(bool(PROPERTIES[question.asked](tensors[question.place])) for question in questions)


def known_kind(tensor: torch.Tensor) -> str:
    """What a tensor of a call looks like, as far as models ask; empty for values of any other kind."""
    if tensor.dim() < 2 or tensor.is_floating_point() or tensor.is_complex() or _is_without_data(tensor):
        return ""
    if ((tensor == 0) | (tensor == 1)).all():
        return "a mask that hides nothing" if tensor.all() else "a mask"
    return "positions that count up" if _count_up(tensor) else ""


def _is_without_data(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or _torch.has_no_data(tensor) or not has_memory(tensor)


@dataclass
class Questions:
    """Answers a model while its Python runs under export.

    Args:
        example: the tensors of the call; none where the program is to serve all values.

    Attributes:
        answers: to what was asked of the call's tensors so far.
    """

    example: Sequence[torch.Tensor]
    answers: dict[Question, bool] = field(default_factory=dict)
    _told: bool = False

    @contextlib.contextmanager
    def answered(self, traced: Sequence[torch.Tensor]) -> Iterator[None]:
        """Answer what is asked meanwhile.

        Args:
            traced: what stands for the tensors of the call.
        """
        module = sys.modules.get(_MODULE)
        original = {} if module is None else vars(module)
        inputs = {_torch.traced_node(tensor): place for place, tensor in enumerate(traced)}

        def holds(tensor: torch.Tensor, asked: str) -> bool:
            return self._holds(tensor, asked, inputs)

        with contextlib.ExitStack() as stack:
            for name, replace in _ANSWERED.items():
                if name in original:
                    other = _not_exporting(replace(original[name], holds))
                    stack.enter_context(_replaced(name, original[name], other))
            yield

    def _holds(self, tensor: torch.Tensor, asked: str, inputs: dict[fx.Node | None, int]) -> bool:
        """Whether a traced tensor is known to be as it is asked."""
        known = _torch.known_value(tensor)
        if known is not None:
            with _torch.outside_of_tracing():
                return bool(PROPERTIES[asked](known))
        source = _source(_torch.traced_node(tensor), asked)
        if source is None:
            return False
        place = inputs.get(source)
        if place is None:
            return _is_by_construction(source, asked)
        if not self.example or _is_without_data(self.example[place]) or self._kept_for_ranks():
            return False
        question = Question(place, asked)
        if question not in self.answers:
            with _torch.outside_of_tracing():
                (self.answers[question],) = answer([question], self.example)
        return self.answers[question]

    def _kept_for_ranks(self) -> bool:
        """Whether the answer may be another one on another rank, which then would run, and capture, by itself."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several and not self._told:
            self._told = True
            logger.warning(
                "the model looks whether a mask hides nothing, or positions count up: where ranks train together the "
                "program keeps the mask, which rounds otherwise than without (leave the argument out where it says "
                "nothing)"
            )
        return several


_aten = torch.ops.aten
_SAME = (_aten.alias, _aten.detach, _aten.clone, _aten.contiguous, _aten.view, _aten.reshape, _aten.slice)
"""Ops that copy values, where the shape stays the same."""

_CASTS = (_aten.to, _aten._to_copy)


def _source(node: fx.Node | None, asked: str) -> fx.Node | None:
    """The value which one is a copy of, as far as the question goes; None where something has been written."""
    while node is not None and isinstance(node.target, _torch.OpOverload) and not _torch.is_written(node):
        before = node.args[0] if node.args else None
        if not isinstance(before, fx.Node) or not isinstance(before.meta["val"], torch.Tensor):
            return node
        value, value_before = node.meta["val"], before.meta["val"]
        shape, shape_before = value.shape, value_before.shape
        op = node.target.overloadpacket
        same = (
            (op in _SAME and shape == shape_before)
            or (op in _CASTS and value.dtype is value_before.dtype)
            or (op in _CASTS and value.dtype is torch.bool and asked == "hides nothing")
            or (op in (_aten.unsqueeze, _aten.expand) and shape[-1:] == shape_before[-1:])
            or (op is _aten.add and asked == "counts up" and isinstance(node.args[1], int))
        )
        if not same:
            return node
        node = before
    return None if node is None or _torch.is_written(node) else node


def _is_by_construction(node: fx.Node, asked: str) -> bool:
    """Whether a value is as it is asked whatever its size."""
    if asked == "counts up":
        return node.target in (_aten.arange.default, _aten.arange.start)
    return node.target in (_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default)


def _not_exporting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that sees that it is not exported, as others may have to, where masks would be built regardless."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _torch.as_in_eager(compiling=True):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _replaced(name: str, original: object, other: object) -> Iterator[None]:
    """Put another function in the place of one, wherever models have imported it."""
    places = [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is original]
    for module in places:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module in places:
            setattr(module, name, original)


_Holds = Callable[[torch.Tensor, str], bool]


def _packed_sequences(original: Callable[..., Any], holds: _Holds) -> Callable[..., Any]:
    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        """The number of each position's sequence within its row; None where every row is one sequence."""
        return None if holds(position_ids, "counts up") else original(position_ids)

    return find_packed_sequence_indices


def _causal_mask(original: Callable[..., Any], holds: _Holds) -> Callable[..., Any]:
    def ignore(padding_mask: torch.Tensor | None, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Any:
        """Whether the kernel makes the mask, which it does alike for none and for one that hides nothing."""
        if padding_mask is not None and padding_mask.shape[-1] == kv_length == q_length:
            padding_mask = None if holds(padding_mask, "hides nothing") else padding_mask
        return original(padding_mask, q_length, kv_length, *args, **kwargs)

    return ignore


def _bidirectional_mask(original: Callable[..., Any], holds: _Holds) -> Callable[..., Any]:
    def ignore(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """Whether there is nothing to be hidden."""
        if padding_mask is not None and holds(padding_mask, "hides nothing"):
            padding_mask = None
        return original(padding_mask, *args, **kwargs)

    return ignore


def _recurrent_mask(original: Callable[..., Any], holds: _Holds) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        """The mask of recurrent layers; None where it hides nothing."""
        found = original(*args, **kwargs)
        return None if found is not None and holds(found, "is all ones") else found

    return create


_ANSWERED: dict[str, Callable[[Callable[..., Any], _Holds], Callable[..., Any]]] = {
    "find_packed_sequence_indices": _packed_sequences,
    "_ignore_causal_mask_sdpa": _causal_mask,
    "_ignore_bidirectional_mask_sdpa": _bidirectional_mask,
    "create_recurrent_attention_mask": _recurrent_mask,
}
