"""The ops of sparse gradient exchange: pack what is sent, add up what all ranks sent.

With those of ``graphopt.ir.ops.communication.residual`` and ``selection.py``, one tensor's part of a step is::

    graphopt.accumulate_(gradient, u, v, momentum, nesterov)      # u, v: flat, kept between steps by each rank
    indices, values = graphopt.select(v, k)                       # the k entries of v of largest magnitude
    graphopt.clear_at_(v, indices)                                # sent: no longer in the residual
    graphopt.clear_at_(u, indices)                                # momentum factor masking
    packed = graphopt.pack([indices, ...], [values, ...], wire)   # uint8, one for the bucket
    gathered = wait_tensor(all_gather_into_tensor(packed, ranks, group))
    mean, ... = graphopt.sum_sparse(gathered, ranks, [k, ...], [v.numel(), ...], wire, dtype, 1 / ranks)

Where values travel in fewer bits, what is rounded off stays in the residual::

    sent = graphopt.to_wire(values, torch.bfloat16)
    graphopt.keep_rest_(v, indices, sent)                         # in place of clear_at_(v, indices)
    packed = graphopt.pack([indices, ...], [sent, ...], torch.bfloat16)

Where the entries that arrive are enough, ``sum_entries`` adds them up without dense tensors.

Every result has a size that is known before the run, and on CUDA none of these ops waits for the device.

Source: Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphopt.ir.ops.define import define, described, require

__all__ = [
    "LARGEST",
    "WIRES",
    "pack",
    "packed_bytes",
    "sum_entries",
    "sum_sparse",
    "to_wire",
    "unpack",
]

WIRES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes in which values can travel."""

LARGEST = 2**31
"""A tensor of so many elements cannot be exchanged sparsely: its indices are int32."""

_INDEX_BYTES = 4

# --- packing ---------------------------------------------------------------------------------------------------------


def _to_wire(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    _check_wire("to_wire", wire)
    largest = torch.finfo(wire).max
    if largest >= torch.finfo(values.dtype).max:
        return values.to(wire, copy=True)
    return values.clamp(-largest, largest).to(wire)


def _empty_wire(values: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    _check_wire("to_wire", wire)
    return torch.empty_like(values, dtype=wire)


def _check_wire(op: str, wire: torch.dtype) -> None:
    require(wire in WIRES, op, f"values travel in {', '.join(map(str, WIRES))}, not in {wire}")


def _values_at(count: int, wire: torch.dtype) -> int:
    """Where the values begin, in bytes: behind the indices, at a multiple of the size of one."""
    return -(-count * _INDEX_BYTES // wire.itemsize) * wire.itemsize


def packed_bytes(counts: Sequence[int], wire: torch.dtype = torch.float32) -> int:
    """Bytes of what one rank sends for a bucket: what ``pack`` gives.

    Args:
        counts: entries of each tensor.
        wire: dtype in which values travel.
    """
    count = sum(counts)
    unit = max(_INDEX_BYTES, wire.itemsize)
    return -(-(_values_at(count, wire) + count * wire.itemsize) // unit) * unit


def _pack(indices: Sequence[torch.Tensor], values: Sequence[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
    packed = _empty_pack(indices, values, wire)
    count = sum(part.numel() for part in indices)
    start = _values_at(count, wire)
    places, numbers = packed[: count * _INDEX_BYTES], packed[start : start + count * wire.itemsize]
    packed[places.numel() : start].zero_()
    packed[start + numbers.numel() :].zero_()
    torch.cat(list(indices), out=places.view(torch.int32))
    torch.cat([part if part.dtype is wire else _to_wire(part, wire) for part in values], out=numbers.view(wire))
    return packed


def _empty_pack(indices: Sequence[torch.Tensor], values: Sequence[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
    """Check, and make room; what an example run gives too."""
    _check_wire("pack", wire)
    require(
        0 < len(indices) == len(values),
        "pack",
        f"it takes the indices and the values of one tensor or more, not {len(indices)} and {len(values)}",
    )
    for number, (places, numbers) in enumerate(zip(indices, values, strict=True)):
        require(
            places.dim() == 1 and places.dtype is torch.int32 and numbers.shape == places.shape,
            "pack",
            f"indices[{number}] must be flat and torch.int32, and values[{number}] of the same shape, not "
            f"{described(places)} and {described(numbers)}",
        )
    size = packed_bytes([part.numel() for part in indices], wire)
    return torch.empty(size, dtype=torch.uint8, device=indices[0].device)


def unpack(
    packed: torch.Tensor, counts: Sequence[int], wire: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The indices and the values of each tensor, as views of what ``pack`` gave.

    Args:
        packed: uint8, shape ``[packed_bytes(counts, wire)]``.
        counts: entries of each tensor.
        wire: dtype of the values.
    """
    indices, values = _parts(packed, sum(counts), wire)
    return indices.split_with_sizes(list(counts)), values.split_with_sizes(list(counts))


def _parts(packed: torch.Tensor, count: int, wire: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    start = _values_at(count, wire)
    return packed[: count * _INDEX_BYTES].view(torch.int32), packed[start : start + count * wire.itemsize].view(wire)


# --- adding up -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bucket:
    """What all ranks sent together: the arguments of ``sum_sparse`` by these names."""

    ranks: int
    counts: Sequence[int]
    sizes: Sequence[int]
    wire: torch.dtype


def _sum_sparse(
    gathered: torch.Tensor,
    ranks: int,
    counts: Sequence[int],
    sizes: Sequence[int],
    wire: torch.dtype,
    out: torch.dtype,
    scale: float,
) -> list[torch.Tensor]:
    _check_sum("sum_sparse", gathered, _Bucket(ranks, counts, sizes, wire), out)
    exact = torch.float64 if out is torch.float64 else torch.float32
    rows = [_scaled(row, counts, wire, exact, scale) for row in gathered.view(ranks, -1)]
    sums = []
    for number, size in enumerate(sizes):
        total = torch.zeros(size, dtype=exact, device=gathered.device)
        for indices, values in rows:
            total.index_add_(0, indices[number], values[number])
        sums.append(total.to(out))
    return sums


def _scaled(
    packed: torch.Tensor, counts: Sequence[int], wire: torch.dtype, exact: torch.dtype, scale: float
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """What one rank sent: its indices, and its values times the scale, in few calls for all tensors."""
    indices, values = _parts(packed, sum(counts), wire)
    numbers = values.to(exact)
    if scale != 1:
        numbers = numbers * scale
    return indices.split_with_sizes(list(counts)), numbers.split_with_sizes(list(counts))


def _empty_sums(
    gathered: torch.Tensor,
    ranks: int,
    counts: Sequence[int],
    sizes: Sequence[int],
    wire: torch.dtype,
    out: torch.dtype,
    scale: float,
) -> list[torch.Tensor]:
    _check_sum("sum_sparse", gathered, _Bucket(ranks, counts, sizes, wire), out)
    return [torch.empty(size, dtype=out, device=gathered.device) for size in sizes]


def _sum_entries(
    gathered: torch.Tensor,
    ranks: int,
    counts: Sequence[int],
    sizes: Sequence[int],
    wire: torch.dtype,
    out: torch.dtype,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sort of all entries brings those of one element together, whatever tensor and rank they are of."""
    _check_sum("sum_entries", gathered, _Bucket(ranks, counts, sizes, wire), out)
    count, exact = sum(counts), torch.float64 if out is torch.float64 else torch.float32
    parts = [_scaled(row, [count], wire, exact, scale) for row in gathered.view(ranks, -1)]
    indices = torch.stack([places for (places,), _ in parts]).long()
    tensors = [
        torch.full((entries,), number * LARGEST, device=gathered.device) for number, entries in enumerate(counts)
    ]
    ordered, order = torch.sort((indices + torch.cat(tensors)).view(-1))
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    element = torch.empty_like(order)
    element[order] = torch.cumsum(first, 0) - 1
    rows = element.view(ranks, count)
    totals = torch.zeros(ranks * count, dtype=exact, device=gathered.device)
    for row, (_, (numbers,)) in zip(rows, parts, strict=True):
        totals.index_add_(0, row, numbers)
    return _by_tensor(indices, counts), _by_tensor(totals[rows].to(out), counts)


def _by_tensor(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Numbers of shape ``[ranks, entries of all tensors]``, flat: of all ranks for the first tensor, then the next."""
    return torch.cat([part.reshape(-1) for part in rows.split_with_sizes(list(counts), 1)])


def _empty_entries(
    gathered: torch.Tensor,
    ranks: int,
    counts: Sequence[int],
    sizes: Sequence[int],
    wire: torch.dtype,
    out: torch.dtype,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_sum("sum_entries", gathered, _Bucket(ranks, counts, sizes, wire), out)
    size = ranks * sum(counts)
    return gathered.new_empty(size, dtype=torch.int64), gathered.new_empty(size, dtype=out)


def _check_sum(op: str, gathered: torch.Tensor, bucket: _Bucket, out: torch.dtype) -> None:
    ranks, counts, sizes, wire = bucket.ranks, bucket.counts, bucket.sizes, bucket.wire
    _check_wire(op, wire)
    require(out.is_floating_point, op, f"the sums must be real floating-point, not {out}")
    require(len(counts) == len(sizes), op, f"{len(counts)} counts are given for {len(sizes)} tensors")
    expected = ranks * packed_bytes(counts, wire)
    require(
        gathered.dtype is torch.uint8 and gathered.dim() == 1 and gathered.numel() == expected,
        op,
        f"{ranks} ranks that pack {sum(counts)} entries with values in {wire} give torch.uint8 of shape [{expected}], "
        f"not {described(gathered)}",
    )
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        require(
            count <= size < LARGEST,
            op,
            f"counts[{number}] is {count} and sizes[{number}] is {size}: a tensor has at least as many elements as "
            "entries, and fewer than 2**31, the int32 indices",
        )


to_wire = define("to_wire(Tensor values, ScalarType wire) -> Tensor", _to_wire, _empty_wire)
"""``to_wire(Tensor values, ScalarType wire) -> Tensor``: round values to the dtype in which they travel.

What is too large for it becomes its largest finite number, so that the rest stays in the residual.
"""

pack = define("pack(Tensor[] indices, Tensor[] values, ScalarType wire) -> Tensor", _pack, _empty_pack)
"""``pack(Tensor[] indices, Tensor[] values, ScalarType wire) -> Tensor``: what a rank sends for a bucket.

uint8, shape ``[packed_bytes(counts, wire)]``: the indices (int32) of all tensors, then their values as by ``to_wire``,
each part at a multiple of the size of one of its elements, gaps filled with 0.
"""

sum_sparse = define(
    "sum_sparse(Tensor gathered, int ranks, int[] counts, int[] sizes, ScalarType wire, ScalarType out, float scale) "
    "-> Tensor[]",
    _sum_sparse,
    _empty_sums,
)
"""``sum_sparse(gathered, ranks, int[] counts, int[] sizes, wire, out, float scale) -> Tensor[]``: dense sums.

One flat tensor of ``sizes[i]`` elements and dtype ``out`` for each tensor of the bucket: the entries of all ranks,
each times ``scale``, added in the order of the ranks (in float64 for ``out`` float64, else float32), then rounded to
``out``. One rank's indices are distinct, so that no two additions of a rank meet: every rank gets the same bits, on
CUDA too.

Args:
    gathered: uint8, what ``pack`` gave on each rank, rank after rank.
    ranks: their number.
    counts: entries of each tensor, the same on all ranks.
    sizes: elements of each tensor.
    wire: dtype of the values.
    out: dtype of the results.
    scale: 1 / ranks for the mean.
"""

sum_entries = define(
    "sum_entries(Tensor gathered, int ranks, int[] counts, int[] sizes, ScalarType wire, ScalarType out, float scale) "
    "-> (Tensor indices, Tensor sums)",
    _sum_entries,
    _empty_entries,
)
"""``sum_entries(gathered, ranks, int[] counts, int[] sizes, wire, out, float scale) -> (Tensor indices, Tensor sums)``.

The entries of ``sum_sparse``'s dense sums, to the last bit, without these: where ranks sent values (``indices``, int64,
counted in each tensor), and the sums there (``sums``, dtype ``out``). Both are flat and hold
``ranks * counts[i]`` entries of each tensor after the other, those of the first rank first, so that an element which
several ranks sent stands there several times, each time with its whole sum.

The arguments are those of ``sum_sparse``.
"""
