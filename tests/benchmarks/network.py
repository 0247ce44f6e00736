"""Ranks on one machine behind links of a chosen rate: network namespaces with shaped links, or a shaped loopback.

As root every rank gets a network namespace of its own, joined to a bridge by a pair of virtual interfaces, both ends of
which are shaped: what the rank sends and what it receives. Without root, all ranks share the loopback of one new
namespace, which is one pipe for all of them.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Kind = Literal["auto", "namespaces", "loopback"]

_INSIDE = "GRAPHOPT_BENCHMARK_LOOPBACK"


class NetworkError(Exception):
    """Links cannot be shaped on this machine; the message says why and what to do."""


def sent_bytes(interface: str) -> int:
    """Bytes that have left through an interface of this process's own network namespace, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise NetworkError(f"this process sees no interface {interface!r}")


def bits_per_second(rate: str) -> float:
    """``10mbit``, ``1gbit``: as ``tc`` writes rates; ``unshaped`` is infinite."""
    if rate == "unshaped":
        return float("inf")
    for suffix, factor in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        if rate.lower().endswith(suffix):
            with contextlib.suppress(ValueError):
                return float(rate[: -len(suffix)]) * factor
    raise NetworkError(f"{rate!r} is not a rate: write 10mbit, 100mbit, 1gbit, unshaped or 5.5x")


def multiple_of_compute(rate: str) -> float:
    """``5.5x``: 5.5, of the step's computation, which dense exchange is to take; 0 for anything else."""
    if rate.endswith("x"):
        with contextlib.suppress(ValueError):
            multiple = float(rate[:-1])
            return multiple if 0 < multiple < float("inf") else 0.0
    return 0.0


def passes_segments(rate: str) -> bool:
    """Whether packets pass a shaped link segment by segment, so that the headers of each are counted.

    The kernel hands packets of up to 64 KiB to the link and divides what is larger than a burst.
    """
    return _burst(bits_per_second(rate)) < 2**16


def _burst(bits: float) -> float:
    """Bytes that pass a link at once: two milliseconds' worth, or a packet of the loopback."""
    return max(16 * 1024, bits / 8 * 0.002)


class Network(abc.ABC):
    """Links between ranks.

    Attributes:
        interface: through which a rank sends.
        address: of the first rank.
        shared: whether all ranks send through one interface.
    """

    interface: str
    address: str
    shared: bool

    @abc.abstractmethod
    def prefix(self, rank: int) -> list[str]:
        """What stands in front of the command of a rank."""

    @abc.abstractmethod
    def shape(self, rate: str) -> None:
        """Let every link carry so many bits per second from now on (``unshaped``: whatever it can)."""


class Namespaces(Network):
    """One network namespace for each rank; needs root."""

    interface = "eth0"
    shared = False

    def __init__(self, ranks: int) -> None:
        number = os.getpid() % 65536
        self._bridge = f"gob{number:x}"
        self._names = [f"go{number:x}r{rank}" for rank in range(ranks)]
        self._subnet = f"10.{64 + number % 64}.{number // 64 % 256}"
        self.address = f"{self._subnet}.1"

    def open(self) -> None:
        """Make bridge, namespaces and links.

        Raises:
            NetworkError: where the kernel or the rights do not allow it.
        """
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")
        for rank, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", self._outer(name), "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", self._outer(name), "master", self._bridge, "up")
            _run("ip", "-n", name, "address", "add", f"{self._subnet}.{rank + 1}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """Remove everything that ``open`` made, however far it came."""
        for name in self._names:
            _try("ip", "link", "delete", self._outer(name))
            _try("ip", "netns", "delete", name)
        _try("ip", "link", "delete", self._bridge)

    def prefix(self, rank: int) -> list[str]:
        """See the base class."""
        return ["ip", "netns", "exec", self._names[rank]]

    def shape(self, rate: str) -> None:
        """See the base class."""
        for name in self._names:
            _shape(["tc", "-n", name], "eth0", rate)
            _shape(["tc"], self._outer(name), rate)

    def _outer(self, name: str) -> str:
        return f"v{name}"


class Loopback(Network):
    """The loopback of a network namespace that this process is in already; needs no root outside of it."""

    interface = "lo"
    address = "127.0.0.1"
    shared = True

    def prefix(self, rank: int) -> list[str]:
        """See the base class."""
        return []

    def shape(self, rate: str) -> None:
        """See the base class."""
        _shape(["tc"], "lo", rate)


def _shape(command: list[str], device: str, rate: str) -> None:
    _try(*command, "qdisc", "delete", "dev", device, "root")
    bits = bits_per_second(rate)
    if bits == float("inf"):
        return
    burst = str(int(_burst(bits)))
    _run(*command, "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "400ms")


@contextlib.contextmanager
def network(ranks: int, kind: Kind = "auto") -> Iterator[Network]:
    """Links between so many ranks, which are gone again at the end, also after Ctrl-C and SIGTERM.

    ``loopback`` starts this very command again inside of a new namespace, and does not return from that.

    Raises:
        NetworkError: where neither way works on this machine.
    """
    if _INSIDE in os.environ:
        _run("ip", "link", "set", "lo", "mtu", "1500", "up")
        yield Loopback()
        return
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkError(f"{' and '.join(missing)} not found: install the package iproute2")
    problem = ""
    if kind != "loopback":
        found = Namespaces(ranks)
        with _until_the_end(found):
            try:
                found.open()
                found.shape("1gbit")
            except NetworkError as error:
                if kind == "namespaces":
                    raise
                problem = str(error)
            else:
                yield found
                return
    _enter_loopback(problem)


@contextlib.contextmanager
def _until_the_end(found: Namespaces) -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        found.close()
        signal.signal(signal.SIGTERM, before)


def _enter_loopback(problem: str) -> None:
    """Start this command again where the loopback belongs to it alone.

    Raises:
        NetworkError: where that is not allowed either.
    """
    test = "ip link set lo up && tc qdisc add dev lo root tbf rate 10mbit burst 64kb latency 400ms"
    unshare = ["unshare", "--map-root-user", "--net"]
    done = None
    if shutil.which("unshare"):
        done = subprocess.run([*unshare, "sh", "-c", test], capture_output=True, text=True, check=False)
    if done is None or done.returncode:
        reason = done.stderr.strip() if done else "unshare not found (package util-linux)"
        first = f"network namespaces: {problem}\n" if problem else ""
        raise NetworkError(
            f"links cannot be shaped on this machine\n{first}a loopback of one's own: {reason}\nrun as root, or allow "
            "user namespaces (sysctl kernel.unprivileged_userns_clone=1); the kernel needs veth and sch_tbf"
        )
    os.environ[_INSIDE] = "1"
    sys.stdout.flush()
    os.execvp(unshare[0], [*unshare, sys.executable, *sys.argv])


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
