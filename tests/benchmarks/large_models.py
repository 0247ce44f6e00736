"""Plans for models larger than this machine: time and memory of capture, plan, text and page, without data.

Each model is a Llama by its configuration, in bfloat16 with AdamW, and is planned in a process of its own for a device
that need not be here. Time is the process's own on the clock, imports included; memory its largest resident set.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import make_table, parser, show

SMALL = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MODELS: dict[str, tuple[dict[str, int], int, str]] = {
    "7B, 8 layers": (SMALL, 8, "85%"),
    "7B": (SMALL, 32, "85%"),
    "7B, 80 layers": (SMALL, 80, "85%"),
    "70B": (LARGE, 80, "90%"),
}
"""By name: the sizes of a layer, how many layers, and the budget as a share of the peak."""


def planned(name: str, device: str, tokens: int) -> dict[str, Any]:
    """What one model takes, in this process; called first in it."""
    started = time.perf_counter()
    seconds: dict[str, float] = {}

    def timed(what: str, action: Callable[[], Any]) -> Any:
        before = time.perf_counter()
        result = action()
        seconds[what] = time.perf_counter() - before
        return result

    import graphopt
    from graphopt.cli.target.model_config import model_of_config
    from graphopt.passes import FitMemory, FuseUpdate

    sizes, layers, budget = MODELS[name]
    config = {"model_type": "llama", "num_hidden_layers": layers, "max_position_embeddings": tokens, **sizes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        parts = timed("model", lambda: model_of_config(path, batch=1, tokens=tokens))
    model, optimizer = parts["model"], parts["optimizer"]
    program = timed(
        "capture",
        lambda: graphopt.capture(model, (), parts["kwargs"], loss=True, optimizer=optimizer, device=device),
    )
    before = program.memory().peak_bytes
    records = timed("plan", lambda: graphopt.Pipeline([FuseUpdate(), FitMemory(budget)]).run(program))
    timed("text", lambda: (program.to_text(), str(records)))
    timed("page", program.to_html)
    return {
        "model": name,
        "nodes": len(program.nodes),
        "seconds": seconds,
        "total_seconds": time.perf_counter() - started,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_bytes": [before, program.memory().peak_bytes],
    }


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    before, after = found["peak_bytes"]
    return (
        found["model"],
        f"{found['nodes']:,}",
        *(f"{found['seconds'][what]:.1f} s" for what in ("capture", "plan", "text", "page")),
        f"{found['total_seconds']:.1f} s",
        f"{found['total_seconds'] / found['nodes'] * 1e3:.2f} ms",
        f"{found['resident_bytes'] / 1e9:.2f} GB",
        f"{before / 1e9:.1f} → {after / 1e9:.1f} GB",
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which of the models")
    options.add_argument("--device", default="h100-80gb", help="for which device")
    options.add_argument("--tokens", type=int, default=4096, help="of the one sequence of a batch")
    options.add_argument("--one", action="store_true", help="plan in this process, the first model only")
    given = options.parse_args(argv)
    models = ["7B, 8 layers"] if given.quick else given.models
    if given.one:
        print(json.dumps(planned(models[0], given.device, given.tokens)))
        return 0
    results = []
    for name in models:
        command = [sys.executable, __file__, "--one", "--models", name, "--device", given.device]
        command += ["--tokens", str(given.tokens)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(ran.stdout))
    head = ("", "nodes", "capture", "plan", "text", "page", "in all", "per node", "memory", "peak, planned")
    table = make_table(f"Llamas planned for {given.device} without data", head, [_row(found) for found in results])
    show({"results": results}, [table], as_json=given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
