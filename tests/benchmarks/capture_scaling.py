"""How capture, one pass and compilation scale with depth: GPTs of 6 to 48 layers and tiny width."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt
from graphopt.passes import Recompute

models = example_models()

CHECKPOINTS = "blocks.*"


def measure(layers: int) -> dict[str, Any]:
    """Seconds to make a GPT of so many layers ready to run, with recomputation at every block."""
    config = models.GPTConfig(vocab=64, context=16, d=16, layers=layers, heads=2)
    model = models.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(config.vocab, (2, 1, config.context))
    gc.collect()
    started = time.perf_counter()
    program = graphopt.capture(model, tuple(batch), loss=models.next_token_loss)
    captured = time.perf_counter() - started
    nodes = len(program.nodes)
    gc.collect()
    started = time.perf_counter()
    graphopt.optimize(model, [Recompute(CHECKPOINTS)], example_inputs=(batch[0],))
    drop_in = time.perf_counter() - started
    gc.collect()
    started = time.perf_counter()
    step = graphopt.optimize_step(
        model, optimizer, [Recompute(CHECKPOINTS)], loss=models.next_token_loss, example_inputs=tuple(batch)
    )
    whole = time.perf_counter() - started
    return {
        "layers": layers,
        "joint_nodes": nodes,
        "capture_seconds": captured,
        "pass_seconds": sum(record.seconds for record in step.records),
        "drop_in_seconds": drop_in,
        "whole_step_seconds": whole,
        "drop_in_ms_per_node": drop_in / nodes * 1e3,
        "whole_step_ms_per_node": whole / nodes * 1e3,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, nargs="+", help="depths (default: 6 12 24 48; 1 2 with --quick)")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    depths = given.layers or ([1, 2] if given.quick else [6, 12, 24, 48])
    measure(1)  # what torch imports and compiles once is not counted
    results = [measure(layers) for layers in depths]
    rows = [
        (
            str(row["layers"]),
            f"{row['joint_nodes']:,}",
            f"{row['capture_seconds']:.2f} s",
            f"{row['pass_seconds']:.2f} s",
            f"{row['drop_in_seconds']:.2f} s",
            f"{row['drop_in_ms_per_node']:.2f}",
            f"{row['whole_step_seconds']:.2f} s",
            f"{row['whole_step_ms_per_node']:.2f}",
        )
        for row in results
    ]
    headings = ("layers", "nodes", "capture", "pass", "optimize", "ms/node", "optimize_step", "ms/node")
    table = make_table("Capture + Recompute + verification + code, seconds in all and per joint node", headings, rows)
    show({"results": results}, [table], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
