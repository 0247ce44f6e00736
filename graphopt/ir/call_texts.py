"""Texts about a call that are made once, as long as its op, its arguments and their values are the same objects.

What a call is measured under, say, is asked for at each timeline of a program, and in each copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import fx

from graphopt import _torch

__all__ = ["call_text", "forget_texts", "pass_on_texts"]

_KNOWN = "graphopt_texts"
_TEXTS = 8
"""How many texts of a call are kept: those for sizes of the past are of no use."""


class _Known(NamedTuple):
    """Texts with what they are about, held so that nothing else can take the place of an object that is gone."""

    target: Any
    args: Any
    kwargs: Any
    values: tuple[Any, ...]
    fixed: bool
    texts: dict[tuple[Callable[[fx.Node], str], object], str]

    def is_of(self, node: fx.Node) -> bool:
        """Whether the call is as it was."""
        same = self.target is node.target and self.args is node.args and self.kwargs is node.kwargs
        return same and all(map(is_, self.values, _values(node)))


def call_text(node: fx.Node, make: Callable[[fx.Node], str]) -> str:
    """What ``make`` says of a call.

    Args:
        node: the call.
        make: a function of a module; its text depends on the op, the arguments and the sizes of their values alone.
    """
    known = node.meta.get(_KNOWN)
    if known is None or not known.is_of(node):
        values = tuple(_values(node))
        fixed = all(map(_is_fixed, values))
        known = node.meta[_KNOWN] = _Known(node.target, node.args, node.kwargs, values, fixed, {})
    key = make, None if known.fixed else _torch.taken_sizes()
    text = known.texts.get(key)
    if text is None:
        if len(known.texts) >= _TEXTS:
            known.texts.clear()
        text = known.texts[key] = make(node)
    return text


def pass_on_texts(node: fx.Node, copy: fx.Node) -> None:
    """Let a copy of a call with its metadata, which reads copies of what the call reads, have its texts."""
    known = node.meta.get(_KNOWN)
    if known is None:
        return
    if known.args is node.args and known.kwargs is node.kwargs:
        copy.meta[_KNOWN] = _Known(known.target, copy.args, copy.kwargs, known.values, known.fixed, known.texts)
    else:
        forget_texts(copy)


def forget_texts(copy: fx.Node) -> None:
    """Let another call with a call's metadata have none of its texts, which would keep the first one's graph alive."""
    copy.meta.pop(_KNOWN, None)


def _values(node: fx.Node) -> list[Any]:
    return [source.meta.get("val") for source in node.all_input_nodes]


def _is_fixed(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return all(type(size) is int for size in (*value.shape, *value.stride()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_fixed, value))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
