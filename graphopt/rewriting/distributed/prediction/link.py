"""The network as a model sees it: bandwidth and latency of each rank's links, and both as text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from graphopt.errors import GraphoptError, did_you_mean

__all__ = ["Algorithm", "HostLink", "Link", "Reach", "format_bandwidth", "parse_bandwidth", "parse_latency"]

Algorithm = Literal["ring", "tree"]
"""How a collective goes about it; the bytes are the same, the number of rounds is not.

``ring``: every rank passes pieces on to its neighbour, in N - 1 rounds for each half of an all-reduce and for an
all-gather; what gloo does, and NCCL with large messages. ``tree``: partners at doubling distances, in ceil(log2 N)
rounds each.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
"""

Reach = Literal["all", "host", "hosts"]
"""Which ranks take part in a collective: all, those of one host, or one of each host."""

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_NUMBER = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*"
_BANDWIDTH = re.compile(_NUMBER + r"([kKmMgGtT]?i?)(bits?/s|bits?|bps|b/s|B/s|Bps)\s*")
_LATENCIES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_BANDWIDTH_FORMS = "write 10Mbit, 1Gbit or 100Gbps (bits per second), or 25GB/s (bytes per second)"
_LATENCY_FORMS = "write 50us, 1ms or 0.1s"


@dataclass(frozen=True, slots=True)
class HostLink:
    """What joins the ranks of one host, such as NVLink.

    Attributes:
        ranks: of a host, 2 or more.
        bandwidth: bytes per second of one rank, in each direction at once.
        latency: seconds of a round.

    Raises:
        GraphoptError: for a number of ranks below 2, a bandwidth that is not positive, a latency below 0.
    """

    ranks: int
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise GraphoptError(f"a host with links of its own has 2 ranks or more, got {self.ranks}")
        _check_figures(self.bandwidth, self.latency)

    def __str__(self) -> str:
        latency = f", {self.latency * 1e6:.6g} us per round" if self.latency else ""
        return f"{format_bandwidth(self.bandwidth)} per rank between the {self.ranks} of a host{latency}"


def _check_figures(bandwidth: float, latency: float) -> None:
    if not 0 < bandwidth < math.inf:
        raise GraphoptError(f"a bandwidth is a number of bytes per second above 0, got {bandwidth!r}")
    if not 0 <= latency < math.inf:
        raise GraphoptError(f"a latency is a number of seconds of at least 0, got {latency!r}")


@dataclass(frozen=True, slots=True)
class Link:
    """What joins each rank to the others.

    Attributes:
        bandwidth: bytes per second of one rank, in each direction at once.
        latency: seconds that every round of a collective takes beyond the time of its bytes.
        algorithm: how collectives are made of rounds.
        host: what joins the ranks of a host; then the first two are those of the network between hosts. None where all
            ranks are joined alike.

    Raises:
        GraphoptError: for a bandwidth that is not positive, a latency below 0, an unknown algorithm.
    """

    bandwidth: float
    latency: float = 0.0
    algorithm: Algorithm = "ring"
    host: HostLink | None = None

    def __post_init__(self) -> None:
        _check_figures(self.bandwidth, self.latency)
        known = get_args(Algorithm)
        if self.algorithm not in known:
            hint = did_you_mean(self.algorithm, known) or f"it is {' or '.join(known)}"
            raise GraphoptError(f"there is no algorithm {self.algorithm!r} of collectives; {hint}")

    def rounds(self, ranks: int) -> int:
        """Rounds of an all-gather or a reduce-scatter among so many ranks; an all-reduce takes twice as many."""
        if ranks < 2:
            return 0
        return ranks - 1 if self.algorithm == "ring" else (ranks - 1).bit_length()

    def seconds(self, moved: float, halves: int, ranks: int, reach: Reach = "all", *, relayed: bool = False) -> float:
        """How long a collective takes by itself.

        With links of its own inside of a host, a collective of all ranks is one between those of each host and one
        between hosts, of each host's rank with its like elsewhere, and both go on at a time. Of ``N`` ranks on ``H``
        hosts, ``(H - 1) / (N - 1)`` of a rank's bytes then go over the network, which holds for rings of all ranks on
        several network cards, too.

        Args:
            moved: bytes of a rank, in the larger direction.
            halves: runs through all ranks: 2 for an all-reduce, else 1.
            ranks: of all hosts together.
            reach: which of them take part.
            relayed: whether each byte crosses every link on its way, as in a broadcast.
        """
        host = self.host
        if host is None:
            return halves * self.rounds(ranks) * self.latency + moved / self.bandwidth
        inside = min(host.ranks, ranks)
        hosts = -(-ranks // inside)
        near = halves * self.rounds(inside) * host.latency
        far = halves * self.rounds(hosts) * self.latency
        if reach == "host":
            return near + moved / host.bandwidth
        if reach == "hosts":
            return far + moved / self.bandwidth
        share = (hosts - 1) / (ranks - 1) if ranks > 1 else 0.0
        over_network = moved if relayed and hosts > 1 else moved * share
        beside = moved if relayed and inside > 1 else moved * (1 - share)
        return near + far + max(beside / host.bandwidth, over_network / self.bandwidth)

    def carried(self, ranks: int) -> float:
        """Bytes per second of a rank in a collective of all of them, its rounds aside."""
        still = None if self.host is None else replace(self.host, latency=0.0)
        return 1.0 / replace(self, latency=0.0, host=still).seconds(1.0, 1, ranks)

    def __str__(self) -> str:
        latency = f"{self.latency * 1e6:.6g} us"
        found = f"{format_bandwidth(self.bandwidth)} per rank, {latency} per round ({self.algorithm})"
        return found if self.host is None else f"{found}; {self.host}"


def parse_bandwidth(text: str) -> float:
    """Bytes per second from text: ``10Mbit``, ``1Gbit/s``, ``100Gbps``, ``400Gb/s`` (bits), ``25GB/s`` (bytes).

    A small b stands for bits and a large B for bytes; prefixes are powers of ten in either case (``1gbit``), and powers
    of two with an i (``1Gibit``).

    Raises:
        GraphoptError: for anything else, with what was probably meant.
    """
    match = _BANDWIDTH.fullmatch(text)
    if match is None:
        raise GraphoptError(f"{text!r} is not a bandwidth: {_BANDWIDTH_FORMS}{_meant_bandwidth(text)}")
    number, prefix, unit = float(match[1]), match[2].lower(), match[3]
    if prefix == "i":
        raise GraphoptError(f"{text!r} is not a bandwidth: {_BANDWIDTH_FORMS}")
    found = number * {**_PREFIXES, **_BINARY}[prefix] / (1 if unit.startswith("B") else 8)
    if not 0 < found < math.inf:
        raise GraphoptError(f"{text!r} is not a bandwidth above 0: {_BANDWIDTH_FORMS}")
    return found


def _meant_bandwidth(text: str) -> str:
    """A question that names what was probably meant; empty where the text is nothing like a bandwidth."""
    match = re.fullmatch(_NUMBER + r"([kKmMgGtT]?i?)([a-zA-Z/]*)\s*", text)
    if match is None:
        return ""
    number, prefix, unit = match[1], match[2] if match[2] != "i" else "", match[3]
    bits, byte = f"{number}{prefix}bit", f"{number}{prefix}B/s"
    if not unit or unit.lower() in ("b", "p", "ps", "/s"):
        return f"; did you mean {bits!r} or {byte!r}?"
    if unit.lower().startswith("by"):
        return f"; did you mean {byte!r}?"
    return f"; did you mean {bits!r}?" if unit.lower().startswith("bi") or did_you_mean(unit, ("bit", "bps")) else ""


def parse_latency(text: str) -> float:
    """Seconds from text: ``50us``, ``50µs``, ``1ms``, ``0.1s``, ``200ns``; ``0`` needs no unit.

    Raises:
        GraphoptError: for anything else, with what was probably meant.
    """
    match = re.fullmatch(_NUMBER + r"([a-zA-Zµμ]*)\s*", text)
    if match is not None and (match[2] in _LATENCIES or (not match[2] and not float(match[1]))):
        return float(match[1]) * _LATENCIES.get(match[2], 1.0)
    hint = ""
    if match is not None:
        near = ["us", "ms"] if not match[2] else [u for u in ("us", "ms", "ns", "s") if u[0] == match[2][0].lower()]
        hint = f"; did you mean {' or '.join(repr(match[1] + unit) for unit in near)}?" if near else ""
    raise GraphoptError(f"{text!r} is not a latency: {_LATENCY_FORMS}{hint}")


def format_bandwidth(bandwidth: float) -> str:
    """Bytes per second as people write links, in bits: ``1 Gbit/s``, ``94.6 Mbit/s``."""
    bits = bandwidth * 8
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= factor * 0.9995:
            return f"{bits / factor:.3g} {unit}" if bits < 1e15 else f"{bits / factor:.0f} {unit}"
    return f"{bits:.3g} bit/s"
