"""Start an example with torchrun on two hosts, which network namespaces of this machine stand in for (as root).

    python examples/two_hosts.py --rate 1gbit examples/sharded_llama.py --budget 70%
    python examples/two_hosts.py --print examples/data_parallel.py --mode sparse

Each namespace has one network interface, whose link carries so many bits per second. ``--print`` shows the commands for
two hosts of your own, and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

HOSTS = ("graphopt-a", "graphopt-b")
ADDRESSES = ("10.97.31.1", "10.97.31.2")
INTERFACE = "link0"
PORT = 29500


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="on each host (default: 2)")
    parser.add_argument(
        "--rate", default="1gbit", help="of the link, as tc writes it: 100mbit, 10gbit (default: 1gbit)"
    )
    parser.add_argument("--print", action="store_true", help="show the command for each host, and run nothing")
    parser.add_argument("script", help="that trains: examples/sharded_llama.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser.parse_args(argv)


def command(host: int, options: argparse.Namespace, first: str) -> list[str]:
    """What starts the processes of one host.

    Args:
        host: its number.
        options: of this script.
        first: the address of host 0, which all processes ask where the others are.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run"] if not options.print else ["torchrun"]
    return [
        *torchrun,
        *("--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(options.processes)),
        *("--master-addr", first, "--master-port", str(PORT)),
        options.script,
        *options.arguments,
    ]


@contextmanager
def hosts(rate: str) -> Iterator[None]:
    """Two network namespaces and the link between them, which are gone at the end."""
    with ExitStack() as undo:
        for name in HOSTS:
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "delete", name)
        ends = [part for name in HOSTS for part in ("name", INTERFACE, "netns", name)]
        run("ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for name, address in zip(HOSTS, ADDRESSES, strict=True):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"{' '.join(words)}: {done.stderr.strip()}\n"
            "what to do: run this as root, where network namespaces are allowed"
        )


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.print:
        print(*(" ".join(command(host, options, "HOST0")) for host in range(2)), sep="\n")
        return 0
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid():
        sys.exit(
            f"{' and '.join(missing)} not found: install the package iproute2"
            if missing
            else "network namespaces are made by root: run this as root, or see what to start on two hosts with --print"
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with hosts(options.rate):
        # gloo takes the interface of the host's name by default, which a namespace does not have
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        started = [
            subprocess.Popen(["ip", "netns", "exec", name, *command(host, options, ADDRESSES[0])], env=environment)
            for host, name in enumerate(HOSTS)
        ]
        try:
            return max(abs(process.wait()) for process in started)
        finally:
            for process in started:
                process.terminate()
                process.wait()


if __name__ == "__main__":
    sys.exit(main())
