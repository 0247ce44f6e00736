"""Ways to exchange gradients in a smaller form: low-rank factors, and the largest entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphopt.errors import GraphoptError
from graphopt.ir.ops.communication.sparse import packed_bytes
from graphopt.rewriting.distributed.dense.buckets import Item, pack
from graphopt.rewriting.distributed.prediction import volume
from graphopt.rewriting.distributed.prediction.step_timeline import Message
from graphopt.rewriting.distributed.prediction.strategies import (
    Dense,
    Messages,
    Strategy,
    buffer_messages,
    dense_message,
    packed,
    ready_of,
)
from graphopt.rewriting.distributed.prediction.volume import Gradient
from graphopt.rewriting.distributed.prediction.workload import Workload
from graphopt.rewriting.distributed.sparse.low_rank_exchange import Factors, Settings, factors_of
from graphopt.rewriting.distributed.sparse.sparse_exchange import MESSAGE, entries
from graphopt.rewriting.distributed.sparse.sparse_update import few_enough

__all__ = ["WARM_UP", "LowRank", "Sparse"]

WARM_UP = (0.25, 0.0625, 0.015625, 0.004, 0.001)
"""The densities of the published warm-up: Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.3."""


_SORTED = 64
"""How often each byte of the entries that arrive is read or written where just they are updated; measured on a CPU."""


@dataclass(frozen=True)
class LowRank(Strategy):
    """PowerSGD: two factors of a low rank in place of each gradient that is a matrix, as torch's hook makes them.

    Each bucket sends the factors P beside backward, and the factors Q, which are computed from the sum of P, in front
    of the update. Gradients whose factors would not have fewer than half of their elements are exchanged densely, in
    buckets of their own.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019 (arXiv 1905.13727).

    Args:
        rank: of the factors.
    """

    rank: int = 1

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise GraphoptError(f"rank is a whole number of at least 1, got {self.rank}")

    @property
    def label(self) -> str:
        """See the base class."""
        return f"PowerSGD, rank {self.rank}"

    @property
    def by(self) -> str:
        """See the base class."""
        return 'CompressGradients("powersgd")'

    @property
    def effect(self) -> str:
        """See the base class."""
        return "gradients are approximated by matrices of low rank; what that leaves out is added to the next ones"

    def messages(self, workload: Workload, ranks: int) -> Messages:
        """See the base class."""
        factors = {gradient.name: self._factors(gradient) for gradient in workload.gradients}
        dense = [gradient for gradient in workload.gradients if factors[gradient.name] is None]
        if len(dense) == len(workload.gradients):
            return replace(self._plain().messages(workload, ranks), kept_dense=tuple(dense))
        beside, second, copy = buffer_messages(workload, ranks), [], workload.rates.copy
        for bucket in self.buckets(workload.gradients):
            low = [(gradient, found) for gradient in bucket if (found := factors[gradient.name]) is not None]
            if low:
                size = sum(gradient.bytes for gradient, _ in low)
                rows = sum(found.rows * found.rank * _wide(gradient) for gradient, found in low)
                columns = sum(found.columns * found.rank * _wide(gradient) for gradient, found in low)
                ready = ready_of([gradient for gradient, _ in low])
                # before: the residual is added (three passes over the elements), and P = M Q
                beside.append(Message(volume.all_reduce(rows, ranks), ready, before=4 * size * copy))
                # before: Q = transposed M times P; after: the product of both, and the new residual (three passes)
                second.append(Message(volume.all_reduce(columns, ranks), before=size * copy, after=4 * size * copy))
        beside += [dense_message(group, workload, ranks) for group in packed(dense, self.widest(workload))]
        return Messages(tuple(beside), tuple(second), kept_dense=tuple(dense))

    def _plain(self) -> Dense:
        return Dense(bucket_mb=self.bucket_mb, first_bucket_mb=self.first_bucket_mb)

    def _factors(self, gradient: Gradient) -> Factors | None:
        return factors_of(torch.empty(gradient.shape, device="meta"), Settings(self.rank))


def _wide(gradient: Gradient) -> int:
    """Bytes of an element of a gradient's factors: float32, or float64 for float64."""
    return max(gradient.dtype.itemsize, torch.float32.itemsize)


@dataclass(frozen=True)
class Sparse(Strategy):
    """All-gathers of the largest entries of what each rank has not sent yet, as ``DeepGradientCompression`` does it.

    Of each bucket of ``DataParallel``, indices and values of eligible gradients travel in messages of 16 KiB or more.
    Vectors, gradients of fewer than 16,384 elements and those that would take no fewer bytes sparsely (with float32:
    from ranks · density = 1 on) are exchanged densely, those of a bucket together.

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018 (arXiv 1712.01887).

    Args:
        density: the share of the elements that is sent, above 0 and below 1.
        wire: dtype in which values travel.
    """

    density: float = 0.001
    wire: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0 < self.density < 1:
            raise GraphoptError(
                f"a density is the share of the elements that is sent, above 0 and below 1, got {self.density!r}; "
                "to send everything, exchange densely"
            )

    @property
    def label(self) -> str:
        """See the base class."""
        return f"sparse, {self.density:.6%}".rstrip("%").rstrip("0").rstrip(".") + " %"

    @property
    def by(self) -> str:
        """See the base class."""
        if self.density == WARM_UP[-1]:
            return "DeepGradientCompression()"
        stages = [*(stage for stage in WARM_UP if stage > self.density), self.density]
        return f"DeepGradientCompression(sparsity=({', '.join(f'{1 - stage:.10g}' for stage in stages)},))"

    @property
    def effect(self) -> str:
        """See the base class."""
        return "entries that are not sent wait and are added to later gradients; begin with its warm-up"

    def messages(self, workload: Workload, ranks: int) -> Messages:
        """See the base class."""
        sparse = {g.name for g in workload.gradients if volume.pays_sparse(g, self.entry_bytes([g]), ranks)}
        dense = [gradient for gradient in workload.gradients if gradient.name not in sparse]
        found, scattered = buffer_messages(workload, ranks), 0
        for bucket in self.buckets(workload.gradients):
            for group in self._messages([gradient for gradient in bucket if gradient.name in sparse]):
                found.append(self.message(group, workload, ranks))
                scattered += sum(g.bytes for g in group) if self.scatters(group, workload, ranks) else 0
            if rest := [gradient for gradient in bucket if gradient.name not in sparse]:
                found.append(dense_message(rest, workload, ranks))
        update = 1 - scattered / workload.gradient_bytes
        return Messages(tuple(found), update=update, kept_dense=tuple(dense))

    def _messages(self, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """Gradients of a bucket, by the messages in which their entries travel."""
        items = [Item(g.name, self.entry_bytes([g]), place, g.key) for place, g in enumerate(gradients)]
        named = {gradient.name: gradient for gradient in gradients}
        return [[named[item.name] for item in message.items] for message in pack(items, MESSAGE)]

    def scatters(self, group: Sequence[Gradient], workload: Workload, ranks: int) -> bool:
        """Whether the update touches just the entries of a bucket that arrive.

        The arguments are those of ``message``.
        """
        return workload.adds and few_enough(ranks, self._counts(group), [gradient.numel for gradient in group])

    def message(self, group: Sequence[Gradient], workload: Workload, ranks: int) -> Message:
        """The all-gather of a bucket, and the work around it.

        Args:
            group: the bucket: gradients of one dtype that are exchanged sparsely.
            workload: whose rates hold.
            ranks: that take part.
        """
        rates, sent = workload.rates, self.entry_bytes(group)
        numel, size = sum(gradient.numel for gradient in group), sum(gradient.bytes for gradient in group)
        # before: gradients are read once to see that they are finite, accumulated, selected from, and packed
        # after: zeros are written, the entries of all ranks are read and added to them, the sums are scaled; or the
        # entries are sorted and added up, and parameters are updated there
        before = size * rates.copy + numel * rates.select + 2 * sent * rates.copy
        if self.scatters(group, workload, ranks):
            summed = ranks * _SORTED * sent
        else:
            summed = 3 * size + ranks * (sent + 2 * sum(self._counts(group)) * torch.float32.itemsize)
        return Message(volume.all_gather(sent, ranks), ready_of(group), before=before, after=summed * rates.copy)

    def entry_bytes(self, group: Sequence[Gradient]) -> int:
        """Bytes that one rank puts in for the gradients of one bucket: indices and values."""
        return packed_bytes(self._counts(group), self.wire)

    def _counts(self, group: Sequence[Gradient]) -> list[int]:
        return [entries(gradient.numel, 1 - self.density) for gradient in group]
