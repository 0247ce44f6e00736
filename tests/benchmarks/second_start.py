"""The first step of a whole step in a first process, and in a second one that reads what the first captured."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import example_models, make_table, parser, show

import graphopt

models = example_models()


def train(layers: int, passes: str) -> dict[str, Any]:
    """Three steps of a GPT: the seconds of the first two, and everything that is left behind as a digest."""
    torch.manual_seed(0)
    config = models.GPTConfig(vocab=64, context=16, d=64, layers=layers, heads=2)
    model = models.GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randint(config.vocab, (2, 1, config.context))
    step = graphopt.optimize_step(model, optimizer, passes, loss=models.next_token_loss)
    left, seconds = hashlib.sha256(), []
    for _ in range(3):
        started = time.perf_counter()
        loss = step(*batch)
        seconds.append(time.perf_counter() - started)
        left.update(loss.numpy().tobytes())
    for parameter in model.parameters():
        left.update(parameter.detach().numpy().tobytes())
    left.update(torch.get_rng_state().numpy().tobytes())
    return {
        "first_step_seconds": seconds[0],
        "second_step_seconds": seconds[1],
        "loaded": step.snapshots[-1][0].endswith("loaded from the cache"),
        "left": left.hexdigest(),
    }


def in_a_process(folder: str, layers: int, passes: str, threads: int) -> dict[str, Any]:
    """The same in a process of its own that keeps captures in ``folder``."""
    settings = {**os.environ, "GRAPHOPT_CACHE": folder, "GRAPHOPT_CACHE_PROGRAMS": "1", "GRAPHOPT_LOG": "off"}
    options = ["--layers", str(layers), "--passes", passes, "--threads", str(threads), "--alone"]
    done = subprocess.run([sys.executable, __file__, *options], env=settings, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--layers", type=int, help="depth (default: 48; 2 with --quick)")
    options.add_argument("--passes", default="", help="as text")
    options.add_argument("--alone", action="store_true", help="one process, as JSON")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    layers = given.layers or (2 if given.quick else 48)
    if given.alone:
        print(json.dumps(train(layers, given.passes)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        first, second = (in_a_process(folder, layers, given.passes, given.threads) for _ in range(2))
    same = first["left"] == second["left"] and second["loaded"] and not first["loaded"]
    rows = [
        (name, f"{row['first_step_seconds']:.2f} s", f"{row['second_step_seconds']:.2f} s", str(row["loaded"]))
        for name, row in (("first", first), ("second", second))
    ]
    title = f"GPT with {layers} layers, passes {given.passes or 'none'}; equal to the last bit: {same}"
    table = make_table(title, ("process", "first step", "second step", "read"), rows)
    show({"layers": layers, "passes": given.passes, "first": first, "second": second, "equal": same}, [table],
         as_json=given.json)  # fmt: skip
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
