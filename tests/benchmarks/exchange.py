"""Exchange between ranks behind links of 10 Mbit/s to 1 Gbit/s, and unshaped ones: graphopt's passes and PyTorch's.

One process for each rank, with one thread; all ways train the same GPT with SGD and take turns, so that what slows the
machine down meets all alike. Times are medians of the slowest rank's, bytes are those that left a rank's interface,
headers included. As root every rank has a shaped link of its own; otherwise all share a shaped loopback. A rate of
``5.5x`` is that at which the bytes of dense exchange take 5.5 times as long as the step without exchange.

Predicted bytes and seconds are the dry run's, with the headers of TCP over Ethernet where a link passes segment by
segment (below about 260 Mbit/s; faster ones count whole packets of up to 64 KiB): 66 bytes for 1,448 of payload, and as
many for the acknowledgement of every second segment. Where the step without exchange runs too, all computation is
taken to be as fast as it is there, as ``graphopt plan --step-time`` does: the ranks share this machine's cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exchange_rank import WITHOUT, all_modes
from harness import make_table, paired_ratio, parser, show
from network import Network, NetworkError, bits_per_second, multiple_of_compute, network

RATES = ("10mbit", "100mbit", "1gbit", "unshaped")
FULL = {"vocab": 256, "context": 64, "d": 192, "layers": 4, "heads": 4}
SMALL = {"vocab": 64, "context": 16, "d": 64, "layers": 1, "heads": 2}
PORT = 29677


def run_ranks(links: Network, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Start all ranks, shape the links when the first one asks for it, and return what it found.

    Raises:
        RuntimeError: where a rank fails.
    """
    script = str(Path(__file__).with_name("exchange_rank.py"))
    known = {**options, "interface": links.interface, "shared": links.shared}
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": links.address,
        "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": links.interface,
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [*links.prefix(rank), sys.executable, script, json.dumps(known)], env={**common, "RANK": str(rank)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    result: dict[str, Any] = {}
    try:
        first = processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        for line in first.stdout:
            said = json.loads(line)
            if "shape" in said:
                print(f"{said['shape']} …", file=sys.stderr)
                links.shape(said["shape"])
                first.stdin.write("done\n")
                first.stdin.flush()
            result = said.get("result", result)
        codes = [process.wait(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes) or not result:
        raise RuntimeError(f"the ranks ended with the statuses {codes}; what they printed says why")
    return result


def table_of(found: dict[str, Any]) -> Any:
    """One rate: a row for each way; and how far dense exchange exceeds the computation, where both are known."""
    reference = next((mode["seconds"] for mode in found["modes"] if mode["mode"] == "DDP"), None)
    rows = []
    for mode in found["modes"]:
        ratio = "–" if reference is None else f"×{paired_ratio(mode['seconds'], reference):.3f}"
        said = "predicted_seconds" in mode
        rows.append(
            (
                mode["mode"], f"{statistics.median(mode['seconds']) * 1e3:.1f}", ratio,
                f"{mode['predicted_seconds'] * 1e3:.1f}" if said else "–", f"{mode['sent_bytes']:,.0f}",
                f"{mode['predicted_bytes']:,.0f}" if said else "–",
            )
        )  # fmt: skip
    measured = f"{found['bandwidth'] * 8 / 1e6:,.0f} Mbit/s measured, {found['latency'] * 1e6:.0f} µs for a round"
    alone = next((mode["seconds"] for mode in found["modes"] if mode["mode"] == WITHOUT), None)
    if alone is not None and reference is not None:
        computed = statistics.median(alone)
        waited = statistics.median(reference) - computed
        measured += f"; dense exchange adds {waited / computed:.2f} × the step without"
    headings = ("", "ms per step", "to DDP", "predicted", "bytes sent", "predicted")
    return make_table(f"{found['rate']} ({measured})", headings, rows)


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, default=2, help="processes")
    options.add_argument("--rates", default=",".join(RATES), help="of each link, with commas; 5.5x: see above")
    options.add_argument("--modes", default="", help="ways as the table calls them, with semicolons; all if empty")
    options.add_argument("--batch", type=int, default=8, help="sequences of 64 tokens in a batch of one rank")
    options.add_argument("--width", type=int, help="of the GPT (default: 192; 64 with --quick)")
    options.add_argument("--layers", type=int, help="of the GPT (default: 4; 1 with --quick)")
    options.add_argument("--rounds", type=int, help="rounds at each rate (default: 5; 1 with --quick)")
    options.add_argument("--network", choices=("auto", "namespaces", "loopback"), default="auto", help="how")
    given = options.parse_args(argv)
    rates = given.rates.split(",")
    known = [mode.name for mode in all_modes()]
    modes = [name for name in given.modes.split(";") if name]
    if unknown := [name for name in modes if name not in known]:
        options.error(f"--modes: there is no {', '.join(unknown)}; choose from {'; '.join(known)}")
    config = dict(SMALL if given.quick else FULL)
    config |= {key: value for key, value in (("d", given.width), ("layers", given.layers)) if value is not None}
    asked = {
        "config": config,
        "batch": given.batch,
        "rates": rates,
        "rounds": given.rounds or (1 if given.quick else 5),
        "modes": modes,
    }
    try:
        for rate in rates:
            if not multiple_of_compute(rate):
                bits_per_second(rate)
            elif modes and WITHOUT not in modes:
                options.error(f"--rates {rate} is a multiple of what {WITHOUT!r} takes: name it among --modes")
        with network(given.ranks, given.network) as links:
            result = run_ranks(links, given.ranks, asked)
            kind = type(links).__name__.lower()
    except NetworkError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result = {"network": kind, "ranks": given.ranks, **asked, **result}
    show(result, [table_of(found) for found in result["rates"]], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
