"""Names of tensors: where they come from, and how a user's name or glob finds them."""

from __future__ import annotations

import keyword
import logging
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

import torch

from graphopt import _torch
from graphopt.errors import GraphoptError, check_type
from graphopt.ir.words.near_names import near_names

__all__ = ["NAMES_KEY", "add_name", "identifier", "match_names", "name", "names_in_part", "one_line"]

logger = logging.getLogger(__name__)

NAMES_KEY = "graphopt_names"
"""Where a node under construction keeps the names given to it (``node.meta``)."""

T = TypeVar("T")


def name(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Give ``tensor`` a name that passes can refer to, and return it unchanged.

    Use it inside a model: ``x = graphopt.name(self.layer2(x), "res3a")``. Outside of a capture it does nothing.

    Args:
        tensor: any tensor, of any shape.
        name: what to call it; unique within a program (a second tensor of that name is called ``name@1``).

    Raises:
        GraphoptError: where ``name`` is empty or holds one of the glob characters ``*`` and ``?``.

    Example:
        >>> class Named(nn.Module):
        ...     def forward(self, x):
        ...         return graphopt.name(x.exp(), "hidden") + 1
        >>> "hidden" in graphopt.capture(Named(), (x.requires_grad_(),)).names()
        True
    """
    check_type("graphopt.name's first argument", tensor, torch.Tensor, "a tensor", 'name(tensor, "res2a")')
    check_type("a name of a tensor", name, str, "text", 'name(tensor, "res2a")')
    if not name or "*" in name or "?" in name:
        raise GraphoptError(f"{name!r} cannot name a tensor: use a non-empty text without the glob characters * and ?")
    add_name(tensor, name)
    return tensor


def add_name(tensor: torch.Tensor, name: str) -> None:
    """Attach ``name`` to the node being traced for ``tensor``, where there is one."""
    node = _torch.traced_node(tensor)
    if node is not None:
        node.meta[NAMES_KEY] = (*node.meta.get(NAMES_KEY, ()), name)


def one_line(text: str) -> str:
    r"""Text for a comment or a heading: what would end a line, steer a terminal or cannot be written is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def identifier(text: str) -> str:
    """A Python identifier made of a tensor's name: ``layers.0.weight`` becomes ``layers_0_weight``."""
    word = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    return word if word.isidentifier() and not keyword.iskeyword(word) else f"t_{word}".rstrip("_")


@lru_cache(maxsize=256)
def _glob(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*|\*|\?)", pattern)
    wild = {"**": ".*", "*": "[^.:~]*", "?": "[^.:~]"}
    return re.compile("".join(wild.get(piece) or re.escape(piece) for piece in pieces), re.DOTALL)


def match_names(patterns: Iterable[str], table: Mapping[str, T], what: str = "tensor") -> dict[str, T]:
    """The entries of ``table`` that the patterns name, in the table's order.

    A pattern is a name, or a glob over names: ``*`` stands for any text without ``.``, ``:`` and ``~``, ``?`` for one
    such character, ``**`` for any text at all (``layers.*.attn``, ``layers.*::mm``, ``encoder.**``). Names of backward
    end in ``~``: ``layers.*.weight~`` are gradients.

    Raises:
        GraphoptError: naming every pattern that matches nothing, with the nearest names.
    """
    found: set[str] = set()
    problems: list[str] = []
    for pattern in patterns:
        check_type(f"a name of a {what}", pattern, str, "text")
        if pattern in table:
            found.add(pattern)
            continue
        matches = [key for key in table if _glob(pattern).fullmatch(key)] if set(pattern) & set("*?") else []
        if matches:
            found.update(matches)
        else:
            hint = near_names(pattern, table, lambda guess: _names_something(guess, table))
            problems.append(f"{pattern!r} names no {what}; {hint}".rstrip("; "))
    if problems:
        hint = f"{len(table)} names exist; list them with `graphopt tensors TARGET` or program.tensors"
        raise GraphoptError("\n".join([*problems, hint]))
    return {key: value for key, value in table.items() if key in found}


def names_in_part(patterns: Iterable[str], table: Mapping[str, T], title: str) -> dict[str, T]:
    """The entries that patterns name in one part of a model; what a pattern misses here may be in another part.

    Args:
        patterns: as for ``match_names``; one that matches nothing is told in a warning.
        table: of the part.
        title: of the model, for people.
    """
    found: set[str] = set()
    for pattern in patterns:
        try:
            found.update(match_names([pattern], table))
        except GraphoptError as error:
            logger.warning("in this part of %s %s", title, str(error).splitlines()[0])
    return {key: value for key, value in table.items() if key in found}


def _names_something(pattern: str, table: Iterable[str]) -> bool:
    """Whether a name or glob stands for a name in the table."""
    if set(pattern) & set("*?"):
        return any(_glob(pattern).fullmatch(name) for name in table)
    return pattern in table
