"""Dense or sparse exchange of one gradient, by the time that each takes: the same choice on every rank."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from graphopt.analysis.costs.cost import profile_of_cost
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.ops.communication.groups import Group, require_together, talking
from graphopt.ir.ops.values import storage_bytes
from graphopt.ir.program import Program
from graphopt.ir.words.written_units import format_seconds
from graphopt.rewriting.distributed.prediction.compressed import Sparse
from graphopt.rewriting.distributed.prediction.link import Link, format_bandwidth, parse_bandwidth
from graphopt.rewriting.distributed.prediction.measured_link import largest_of_all, link_between
from graphopt.rewriting.distributed.prediction.step_timeline import Message
from graphopt.rewriting.distributed.prediction.strategies import dense_message
from graphopt.rewriting.distributed.prediction.volume import Gradient
from graphopt.rewriting.distributed.prediction.workload import Rates, Workload, rates_of

__all__ = ["MEASURED", "Speeds", "check_bandwidth", "speeds_of"]

MEASURED = "measured"
"""In place of a bandwidth: the ranks measure it together."""

_BANDWIDTH, _COPY, _SELECT = "exchange/bandwidth", "exchange/seconds to copy", "exchange/seconds to select"
"""The figures of ``Speeds`` among the numbers of a step."""

_agreed_rates: WeakKeyDictionary[Any, Rates] = WeakKeyDictionary()
"""What the ranks of a group have agreed on in this process, by the group's handle, as for ``agreed_link``."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What dense and sparse exchange are compared by; equal on all ranks of a group.

    Attributes:
        bandwidth: bytes per second of one rank's link, in each direction at once.
        rates: of the work around exchanges, on the slowest rank.
        measured: whether the ranks have measured the bandwidth.
        adds: whether the update only adds gradients to parameters (``sparse/sparse_update.py``).
    """

    bandwidth: float
    rates: Rates
    measured: bool = False
    adds: bool = False

    def seconds(self, gradient: torch.Tensor, sparsity: float, wire: torch.dtype, ranks: int) -> tuple[float, float]:
        """Seconds of the dense and of the sparse exchange of one gradient, each by itself, without latency.

        Both are those of the dry run (``graphopt.rewriting.distributed.prediction.predict``): the work in front, the
        bytes that a rank receives over the bandwidth, and the work behind. For dense exchange the work is copying into
        the bucket; for sparse exchange it is accumulating, selecting, clearing and packing, and adding up what comes.

        Args:
            gradient: only its shape and dtype are read.
            sparsity: share of the elements that are not sent, above 0 and below 1.
            wire: dtype in which the others travel.
            ranks: that take part.
        """
        way = Sparse(1 - sparsity, wire)
        only = Gradient("", tuple(gradient.shape), gradient.dtype, gradient.device, 0, 0.0, storage_bytes(gradient))
        step = Workload("", "step", 0.0, 0.0, 0.0, (only,), (), self.rates, adds=self.adds)
        messages = dense_message([only], step, ranks), way.message([only], step, ranks)
        dense, sparse = (_alone(message, Link(self.bandwidth), ranks) for message in messages)
        return dense, sparse

    def why_dense(self, gradient: torch.Tensor, sparsity: float, wire: torch.dtype, ranks: int) -> str:
        """Why a gradient is exchanged densely, with both times; "" where sparse exchange takes less time.

        The arguments are those of ``seconds``.
        """
        dense, sparse = self.seconds(gradient, sparsity, wire, ranks)
        if sparse < dense:
            return ""
        return f"dense exchange is no slower at {self._times(dense, sparse)}"

    def why_sparse(self, gradient: torch.Tensor, sparsity: float, wire: torch.dtype, ranks: int) -> str:
        """Why a gradient is exchanged sparsely, with both times, where ``why_dense`` is empty.

        The arguments are those of ``seconds``.
        """
        dense, sparse = self.seconds(gradient, sparsity, wire, ranks)
        return f"sparse exchange is faster at {self._times(sparse, dense)}"

    def _times(self, ours: float, theirs: float) -> str:
        return f"{format_bandwidth(self.bandwidth)}: {format_seconds(ours)} against {format_seconds(theirs)}"

    def __str__(self) -> str:
        how = "measured by the ranks" if self.measured else "as given"
        return (
            f"{format_bandwidth(self.bandwidth)} per rank, {how}; selecting takes {self.rates.select * 1e9:.3g} ns an "
            f"element, copying {self.rates.copy * 1e9:.3g} ns a byte"
        )


def _alone(message: Message, link: Link, ranks: int) -> float:
    return message.before + message.volume.seconds(link, ranks) + message.after


def check_bandwidth(option: str | float) -> float | None:
    """Bytes per second from an option: text (``parse_bandwidth``) or a number; None for ``"measured"``.

    Raises:
        GraphoptError: for anything else, with what was probably meant.
    """
    if option == MEASURED:
        return None
    if isinstance(option, str):
        try:
            return parse_bandwidth(option)
        except GraphoptError as error:
            near = not any(letter.isdigit() for letter in option) and did_you_mean(option, [MEASURED])
            raise GraphoptError(f"{error}; {near or f'{MEASURED!r} lets the ranks measure it'}") from None
    if isinstance(option, bool) or not 0 < option < math.inf:
        raise GraphoptError(f"a bandwidth is a number of bytes per second above 0, got {option!r}")
    return float(option)


def speeds_of(program: Program, group: Group, device: torch.device, option: str | float) -> Speeds:
    """What dense and sparse exchange over a group are compared by.

    Every rank of the group has to ask for the first time together: they measure what selecting and copying cost (kept
    in the folder of figures, see ``graphopt.analysis.costs.cost``) and agree on the slowest rank's; with ``"measured"``
    they measure their links too. Later calls of this process get the same figures, and exchange nothing; so do those of
    another process with the figures of this one, so that a run which continues from a saved state chooses as before.

    Of a device that is not here, all figures are those of its profile.

    Args:
        program: whose ``numbers`` hold the figures found before; those found now are added, equal on all ranks.
        group: of two ranks or more.
        device: of the gradients.
        option: as ``check_bandwidth`` takes it.

    Raises:
        GraphoptError: where something is to be measured that cannot be: on a device that is not here, or the links of
            a group that moves nothing.
    """
    given, known = check_bandwidth(option), program.context.step.numbers
    if given is None and _BANDWIDTH not in known:
        known[_BANDWIDTH] = link_between(program, group, device).carried(group.size)
    profile = profile_of_cost("measured", program.context.device)
    if profile is not None:
        known[_COPY], known[_SELECT] = astuple(rates_of(device, profile=profile))
    elif _COPY not in known or _SELECT not in known:
        if group.handle not in _agreed_rates:
            own = rates_of(device)
            require_together(group, "what selecting and copying cost has not been compared")
            with talking():
                _agreed_rates[group.handle] = Rates(*largest_of_all([own.copy, own.select], group, device))
        known[_COPY], known[_SELECT] = astuple(_agreed_rates[group.handle])
    bandwidth = known[_BANDWIDTH] if given is None else given
    return Speeds(bandwidth, Rates(known[_COPY], known[_SELECT]), given is None)
