"""The op that selects the entries of largest magnitude: ``select``.

On a CPU it works on the bits of the numbers, which without the sign order as magnitudes do, piece by piece within the
cache. It is exact for any numbers, and the memory that it takes is bounded, whatever they are:

* **blocks**, while few entries are wanted. The maxima of blocks of neighbours tell a bound that k entries or more
  reach: one that k maxima reach. A sample of the maxima says where it lies, and counting whether it is one. Then the k
  entries are among those that reach it, in blocks whose maxima do. Where the sample is wrong or many maxima are equal,
  the k blocks with the largest maxima, found in the same way, hold the k entries: an entry of any other block is no
  larger than one entry of each of them, and stands behind those that it equals. The tensor is read once, and the rest
  works on a small part of its size;
* **counting** otherwise: how often each value of the upper 16 bits occurs, and then each of the lower ones among those
  with the right upper ones, tells the k-th magnitude (radix selection). A last pass collects what reaches it. Small
  tensors ask ``torch.topk`` for the k-th magnitude.

A threshold that is estimated from a sample of the tensor itself would not save the pass: comparing with it and finding
what exceeds it takes longer than the maxima of blocks. ``tests/benchmarks/selection.py`` has the figures.

On CUDA ``torch.topk`` gives the k-th magnitude: it selects by counting there, in parallel. ``nonzero_static`` collects,
so that no result has a size for which the host would have to wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from graphopt.ir.ops.communication.sparse import LARGEST
from graphopt.ir.ops.define import define, require

__all__ = ["select"]

_PIECE = 1 << 18
"""Elements that each thread works on at a time: what a CPU's cache holds."""

_BLOCKS_FROM = 1 << 15
"""Elements from which blocks are worth their calls."""

_COUNTING_FROM = 1 << 17
"""Elements from which counting is faster than ``torch.topk``."""

_SMALLEST_BLOCK, _LARGEST_BLOCK = 8, 64
"""Powers of two; from 4 on, blocks leave fewer elements than there were."""

_LARGEST_STRIDE = 15
"""Of how many block maxima one is sampled at most; odd, since rows tend to have even numbers of blocks."""

_SAMPLED = 64
"""Of the k largest block maxima, how many are sampled at least."""

_DEVIATIONS = 4
"""By how many standard deviations a bound from a sample lies on the safe side."""

_DIGIT = 16
"""Bits of magnitudes that are counted in one pass."""

_VALUES = 1 << _DIGIT

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
    indices = _indices(exact.view(_BITS[exact.dtype]), k) if k else v.new_empty(0, dtype=torch.int32)
    return indices, torch.index_select(v, 0, indices)


def _indices(bits: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the k largest magnitudes, the first of equal ones: ascending, int32.

    Args:
        bits: of the numbers, as integers; their signs do not matter.
        k: at least 1.
    """
    block = _block(bits.numel(), k)
    if block:
        return _indices_by_blocks(bits, k, block)
    if bits.numel() < _COUNTING_FROM:
        return _indices_by_topk(bits, k)
    return _collect(bits, k, *_kth_magnitude(bits, k))


def _magnitudes(bits: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Piece by piece, where it begins, and its bits without the signs; each piece overwrites the one before."""
    size = _PIECE * torch.get_num_threads()
    scratch = bits.new_empty(min(size, bits.numel()))
    for start in range(0, bits.numel(), size):
        piece = bits[start : start + size]
        yield start, torch.bitwise_and(piece, torch.iinfo(bits.dtype).max, out=scratch[: piece.numel()])


def _indices_by_topk(bits: torch.Tensor, k: int) -> torch.Tensor:
    """Select in a small tensor."""
    return _largest(bits & torch.iinfo(bits.dtype).max, k).int()


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """The indices of the k largest of a few magnitudes, the first of equal ones: ascending, int64."""
    kth = torch.topk(magnitudes, k, sorted=False).values.amin()
    places = (magnitudes >= kth).nonzero().view(-1)
    if places.numel() > k:
        equal = (torch.index_select(magnitudes, 0, places) == kth).nonzero().view(-1)
        stays = torch.ones_like(places, dtype=torch.bool)
        stays[equal[k - places.numel() :]] = False
        places = places[stays]
    return places


# --- blocks ----------------------------------------------------------------------------------------------------------


def _block(count: int, k: int) -> int:
    """The size of blocks that leaves the least to do, about ``sqrt(2 * count / k)``; 0 where blocks do not help."""
    if count < _BLOCKS_FROM:
        return 0
    block = _LARGEST_BLOCK
    while block * block * k > 2 * count:
        block //= 2
    return block if block >= _SMALLEST_BLOCK else 0


def _indices_by_blocks(bits: torch.Tensor, k: int, block: int) -> torch.Tensor:
    """Select among the elements of the blocks of largest maxima, and those behind the last whole block."""
    shift = block.bit_length() - 1
    whole = bits.numel() >> shift << shift
    maxima = _block_maxima(bits[:whole], block)
    bound = _bound(maxima, k)
    if bound is not None and k <= int(torch.count_nonzero(maxima >= bound)) <= 2 * k + _SAMPLED:
        found = _indices_from(bits, k, block, (maxima >= bound).nonzero().view(-1), bound)
        if found is not None:
            return found
    blocks = _indices(maxima, k)
    inside = torch.index_select(bits[:whole].view(-1, block), 0, blocks).view(-1)
    if whole < bits.numel():
        inside = torch.cat([inside, bits[whole:]])
        blocks = torch.cat([blocks, blocks.new_full((1,), whole >> shift)])
    chosen = _indices(inside, k)
    starts = torch.index_select(blocks, 0, chosen >> shift).bitwise_left_shift_(shift)
    return starts.bitwise_or_(chosen & (block - 1))


def _bound(maxima: torch.Tensor, k: int) -> int | None:
    """A number that k of the maxima or more reach, and not many more, by what a sample says; None without a sample."""
    stride = max(1, min(_LARGEST_STRIDE, k // _SAMPLED)) | 1
    sample, wanted = maxima[::stride], k / stride
    rank = math.ceil(wanted + _DEVIATIONS * wanted**0.5) if stride > 1 else k
    if rank > sample.numel():
        return None
    return int(torch.topk(sample, rank, sorted=False).values.amin())


def _indices_from(bits: torch.Tensor, k: int, block: int, blocks: torch.Tensor, bound: int) -> torch.Tensor | None:
    """Select among what reaches a bound, which k elements or more do, all in some blocks or behind the last one.

    None where many more do, as in blocks of neighbours that are all large: that would take more memory.
    """
    shift, largest = block.bit_length() - 1, torch.iinfo(bits.dtype).max
    whole = bits.numel() >> shift << shift
    inside = torch.index_select(bits[:whole].view(-1, block), 0, blocks).view(-1).bitwise_and_(largest)
    if int(torch.count_nonzero(inside >= bound)) > 2 * k + _SAMPLED:
        return None
    places = (inside >= bound).nonzero().view(-1)
    magnitudes = torch.index_select(inside, 0, places)
    starts = torch.index_select(blocks, 0, places >> shift).bitwise_left_shift_(shift)
    places = starts.bitwise_or_(places.bitwise_and_(block - 1))
    if whole < bits.numel():
        places = torch.cat([places, torch.arange(whole, bits.numel())])
        magnitudes = torch.cat([magnitudes, bits[whole:] & largest])
    return torch.index_select(places, 0, _largest(magnitudes, k)).int()


def _block_maxima(bits: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude in each block of neighbours."""
    maxima = bits.new_empty(bits.numel() // block)
    for start, magnitudes in _magnitudes(bits):
        end = start + magnitudes.numel()
        torch.amax(magnitudes.view(-1, block), 1, out=maxima[start // block : end // block])
    return maxima


# --- counting -------------------------------------------------------------------------------------------------------


def _kth_magnitude(bits: torch.Tensor, k: int) -> tuple[int, int, int]:
    """The k-th largest magnitude, how many entries of just this magnitude are among the k, and how many there are."""
    kth, there = 0, 0
    for shift in range(8 * bits.itemsize - _DIGIT, -1, -_DIGIT):
        counts = _counts(bits, shift, kth << _DIGIT)
        from_above = counts.flip(0).cumsum(0)
        behind = int(torch.searchsorted(from_above, k))
        digit = _VALUES - 1 - behind
        there = int(counts[digit])
        k -= int(from_above[behind]) - there
        kth = (kth << _DIGIT) + digit
    return kth, k, there


def _counts(bits: torch.Tensor, shift: int, base: int) -> torch.Tensor:
    """How many magnitudes, without their ``shift`` lower bits, are ``base``, ``base + 1``, ...: ``_VALUES`` counts."""
    counts = torch.zeros(_VALUES + 2, dtype=torch.int64)
    for _, magnitudes in _magnitudes(bits):
        if shift:
            magnitudes.bitwise_right_shift_(shift)
        magnitudes.sub_(base).clamp_(-1, _VALUES).add_(1)  # the first and the last count are of what is outside
        counts += torch.bincount(magnitudes, minlength=_VALUES + 2)
    return counts[1:-1]


def _collect(bits: torch.Tensor, k: int, kth: int, wanted: int, there: int) -> torch.Tensor:
    """The indices of the magnitudes above the k-th, and of the first ``wanted`` of the ``there`` that equal it."""
    found = torch.empty(k, dtype=torch.int32)
    filled = 0
    for start, magnitudes in _magnitudes(bits):
        chosen = magnitudes >= kth
        if wanted < there:
            equal = (magnitudes == kth).nonzero().view(-1)
            chosen[equal[wanted:]] = False
            wanted, there = max(0, wanted - equal.numel()), there - equal.numel()
        places = chosen.nonzero().view(-1)
        found[filled : filled + places.numel()].copy_(places).add_(start)
        filled += places.numel()
    return found


# --- without waiting -------------------------------------------------------------------------------------------------


def _select_unread(v: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select on a device for which the host does not wait."""
    _check(v, k)
    if not k:
        return v.new_empty(0, dtype=torch.int32), v.new_empty(0)
    magnitudes = v.abs()
    kth = torch.topk(magnitudes, k, sorted=False).values.amin()
    above, equal = magnitudes > kth, magnitudes == kth
    first = torch.cumsum(equal, 0, dtype=torch.int32) <= k - above.sum()
    indices = torch.nonzero_static(above | (equal & first), size=k).view(k).int()
    return indices, torch.index_select(v, 0, indices)


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
