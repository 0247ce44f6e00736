"""The op that selects the entries of largest magnitude: ``select``.

On a CPU it takes two steps, both exact for any numbers and of the same memory every time:

* **blocks**, while few are wanted: the maxima of blocks of neighbours are themselves selected from, and the entries
  wanted lie in the blocks so found. k blocks suffice: of all other blocks no maximum is larger than theirs, and where
  one is equal it stands behind. What is left is ``block / n/k`` times smaller, and the step is repeated;
* **radix selection**: magnitudes order as their bits do, so that counting the upper 16 bits, and then the lower 16 bits
  of those that share the right upper ones, gives the k-th magnitude; one more pass collects what reaches it.

The first pass over the tensor is nearly all of the work at the densities of gradient exchange. A threshold from a
sample needs the same passes, and further ones where the sample misleads.

On CUDA ``torch.topk``, which selects by radix too and is fast there, gives the k-th magnitude, and ``nonzero_static``
collects: no result has a size that the host would wait for.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphopt.ops.defining import define, require
from graphopt.ops.sparse import LARGEST

__all__ = ["select"]

_PIECE = 1 << 16
"""Elements that are worked on at a time: what a CPU's cache holds, temporaries included."""

_COUNTED = 1 << 18
"""Elements that are counted at a time."""

_DIGIT = 16
"""Bits of magnitudes that are counted in one pass."""

_SMALL = 1 << 14
"""Fewer elements than this are left to ``torch.topk``."""

_BLOCKS = (8, 64)
"""The smallest and the largest block."""

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _check(v: torch.Tensor, k: int) -> None:
    require(
        v.dim() == 1 and v.is_floating_point(),
        "select",
        f"it needs a flat floating-point tensor, not {v.dtype} of shape {list(v.shape)}",
    )
    require(
        v.numel() < LARGEST,
        "select",
        f"{v.numel()} elements are too many for int32 indices (fewer than 2**31): exchange this tensor densely",
    )
    require(0 <= k <= v.numel(), "select", f"k must lie between 0 and {v.numel()}, the elements, not be {k}")


def _select(v: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select on a CPU."""
    _check(v, k)
    exact = v.contiguous() if v.dtype in _BITS else v.float()
    indices = _indices(exact, k) if k else v.new_empty(0, dtype=torch.int32)
    return indices, v[indices.long()]


def _indices(v: torch.Tensor, k: int) -> torch.Tensor:
    """The indices that ``select`` gives, int32, by the fastest way for the size."""
    if v.numel() < _SMALL:
        return _indices_by_topk(v, k)
    smallest, largest = _BLOCKS
    block = smallest
    while block < largest and 4 * block * block * k <= v.numel():
        block *= 2
    if block * block * k > v.numel():
        return _indices_by_radix(v, k)
    return _indices_by_blocks(v, k, block)


# --- blocks ----------------------------------------------------------------------------------------------------------


def _indices_by_blocks(v: torch.Tensor, k: int, block: int) -> torch.Tensor:
    """Select in the k blocks of largest maximum, and in the elements behind the last whole block."""
    whole = v.numel() // block * block
    blocks = _indices(_block_maxima(v[:whole], block), k)
    candidates = torch.cat([v[:whole].view(-1, block)[blocks.long()].view(-1), v[whole:]])
    chosen = _indices(candidates, k)
    starts = torch.cat([blocks * block, blocks.new_full((1,), whole)])
    return starts[(chosen // block).long()].add_(chosen % block)


def _block_maxima(v: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude in each block of neighbours."""
    maxima = v.new_empty(v.numel() // block)
    size = _PIECE // block
    scratch = v.new_empty(min(_PIECE, v.numel()))
    for part, out in zip(v.split(_PIECE), maxima.split(size), strict=True):
        magnitudes = torch.abs(part, out=scratch[: part.numel()])
        torch.amax(magnitudes.view(-1, block), 1, out=out)
    return maxima


# --- radix selection -------------------------------------------------------------------------------------------------


def _indices_by_radix(v: torch.Tensor, k: int) -> torch.Tensor:
    bits = v.view(_BITS[v.dtype])
    least, wanted, there = _kth_magnitude(bits, k)
    found = torch.empty(k, dtype=torch.int32)
    scratch = bits.new_empty(_PIECE)
    filled = 0
    for start, magnitudes in _magnitudes(bits, scratch):
        chosen = magnitudes >= least
        if wanted < there:
            wanted -= _drop_behind(chosen, magnitudes == least, wanted)
        places = chosen.nonzero().view(-1)
        found[filled : filled + places.numel()].copy_(places).add_(start)
        filled += places.numel()
    return found


def _drop_behind(chosen: torch.Tensor, level: torch.Tensor, wanted: int) -> int:
    """Take back what is chosen of the entries on the level of the k-th behind the first ``wanted``; how many stay."""
    places = level.nonzero().view(-1)
    chosen[places[wanted:]] = False
    return min(wanted, places.numel())


def _kth_magnitude(bits: torch.Tensor, k: int) -> tuple[int, int, int]:
    """The bits of the k-th largest magnitude, how many entries of just this magnitude are wanted, and how many are."""
    scratch = bits.new_empty(min(_COUNTED, bits.numel()))
    known, there = 0, 0
    for shift in range(8 * bits.itemsize - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(1 << _DIGIT, dtype=torch.int64)
        for _, magnitudes in _magnitudes(bits, scratch):
            upper = magnitudes.bitwise_right_shift_(shift) if shift else magnitudes
            if shift + _DIGIT < 8 * bits.itemsize:
                upper = upper[upper >> _DIGIT == known]
            counts += torch.bincount(upper & ((1 << _DIGIT) - 1), minlength=1 << _DIGIT)
        from_above = counts.flip(0).cumsum(0)
        steps = int(torch.searchsorted(from_above, k))
        digit = counts.numel() - 1 - steps
        there = int(counts[digit])
        k -= int(from_above[steps]) - there
        known = known << _DIGIT | digit
    return known, k, there


def _magnitudes(bits: torch.Tensor, scratch: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Piece by piece, where it starts and its bits without the sign, in ``scratch``."""
    positive = torch.iinfo(bits.dtype).max
    for start in range(0, bits.numel(), scratch.numel()):
        piece = bits[start : start + scratch.numel()]
        yield start, torch.bitwise_and(piece, positive, out=scratch[: piece.numel()])


# --- by topk ---------------------------------------------------------------------------------------------------------


def _indices_by_topk(v: torch.Tensor, k: int) -> torch.Tensor:
    """The indices that ``select`` gives, without waiting for the device."""
    magnitudes = v.abs()
    least = torch.topk(magnitudes, k, sorted=False).values.amin()
    above, level = magnitudes > least, magnitudes == least
    places = torch.cumsum(level, 0, dtype=torch.int32)
    chosen = above | (level & (places <= k - above.sum()))
    return torch.nonzero_static(chosen, size=k).view(k).int()


def _select_unread(v: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select on a device for which the host does not wait."""
    _check(v, k)
    indices = _indices_by_topk(v, k) if k else v.new_empty(0, dtype=torch.int32)
    return indices, v[indices.long()]


def _empty(v: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    _check(v, k)
    return v.new_empty(k, dtype=torch.int32), v.new_empty(k)


select = define("select(Tensor v, int k) -> (Tensor indices, Tensor values)", _select, _empty, _select_unread)
"""``select(Tensor v, int k) -> (Tensor indices, Tensor values)``: the k entries of largest magnitude.

Of equal magnitudes those of lowest index are taken. ``indices`` (int32) ascend; ``values`` are ``v[indices]``. Where
fewer than k entries are not 0, zeros of lowest index fill up: the indices are valid and distinct all the same. No
random number is drawn.

Args:
    v: flat, of fewer than 2**31 elements, without not-a-number.
    k: from 0 to the number of elements.

Raises:
    GraphoptError: for any other argument.
"""
