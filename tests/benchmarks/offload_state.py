"""A GPT's whole step with what ``OffloadState`` leaves in memory: bytes, seconds, and a limit that it keeps to.

Each way is a process of its own. *Resident* is what model, optimizer and batch take between steps, and *peak* what a
step takes at most; *predicted* and *measured* are what a step allocates beside what is resident. *Anonymous* is what
the system counts as the process's own memory between steps, above what it took before the model was made. Seconds are
the median of some steps. With ``--limit`` the steps run in a memory cgroup that kills what takes more.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import parser
from memory_limit import limited
from torch import nn

import graphopt

WAYS = {
    "no passes": "",
    "states on disk": "offload-state",
    "states on disk, finished steps kept": "offload-state{folder=FOLDER}",
    "states and parameters on disk": "offload-state{what=optimizer,parameters}",
    "states and parameters on disk, half of that": "offload-state{what=optimizer,parameters},fit-memory{budget=50%}",
    "fit-memory at 500 MB": "fit-memory{budget=500MB allow=recompute,state}",
    "fit-memory at 300 MB": "fit-memory{budget=300MB allow=recompute,state}",
}


COLUMNS = ("resident", "peak", "predicted", "measured", "anonymous")


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [batch, tokens, width] to the same."""
        rows, tokens, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, tokens, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Next-token loss of a GPT without a bias in its head."""

    def __init__(self, width: int, layers: int, words: int, tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Shape [rows, tokens] to a scalar."""
        x = self.words(batch) + self.places.weight[: batch.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def anonymous_bytes() -> int:
    """The process's own memory, without files that are mapped, and without what malloc keeps of what was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def run(passes: str, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train for some steps, and say what that took."""
    before = anonymous_bytes()
    torch.manual_seed(0)
    model = GPT(width, layers, 2048, 128)
    batches = [torch.randint(0, 2048, (8, 128)) for _ in range(steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = graphopt.optimize_step(model, optimizer, passes)
    losses = [step(batches[0]).item(), step(batches[1]).item()]
    memory = step.program.memory()
    seconds = []
    for batch in batches[2:-1]:
        begun = time.perf_counter()
        losses.append(step(batch).item())
        seconds.append(time.perf_counter() - begun)
    measured = graphopt.measure_peak(lambda: step(batches[-1])).allocated_peak_bytes
    states = sum(v.numel() * 4 for kept in optimizer.state.values() for k, v in kept.items() if k != "step")
    return {
        "losses": losses,
        "states": states,
        "parameters": sum(p.numel() * 4 for p in model.parameters()),
        "resident": memory.resident_bytes,
        "peak": memory.peak_bytes,
        "predicted": memory.allocated_peak_bytes,
        "measured": measured,
        "anonymous": anonymous_bytes() - before,
        "seconds": statistics.median(seconds),
    }


def in_process(passes: str, arguments: Sequence[str], limit: int) -> dict[str, Any] | str:
    """What a process of its own says of a way; or that it was killed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--way", passes.replace("FOLDER", folder), *arguments]
        # what is freed goes back to the system, so that memory is what is in use
        environment = {**os.environ, "GRAPHOPT_CACHE": folder, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(limited(command, limit), capture_output=True, text=True, env=environment)
    if done.returncode:
        return "killed" if done.returncode < 0 else done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--way", help="run one way in this process, given as the text of its passes")
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--limit", type=int, default=0, help="bytes of a memory cgroup that the steps run in")
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    if given.quick:
        given.width, given.layers, given.steps = 64, 2, 5
    if given.way is not None:
        print(json.dumps(run(given.way, given.width, given.layers, given.steps)))
        return 0
    arguments = [f"--width={given.width}", f"--layers={given.layers}", f"--steps={given.steps}"]
    arguments.append(f"--threads={given.threads}")
    found = {"no passes, no limit": in_process("", arguments, 0)} if given.limit else {}
    found |= {name: in_process(passes, arguments, given.limit) for name, passes in WAYS.items()}
    if given.json:
        print(json.dumps(found))
        return 0
    first = next(item for item in found.values() if isinstance(item, dict))
    print(f"parameters {first['parameters']:,} bytes, AdamW's states {first['states']:,}")
    print(f"{'':46}{''.join(f'{key:>14}' for key in COLUMNS)}{'seconds':>9}  same bits")
    for name, item in found.items():
        if isinstance(item, str):
            print(f"{name:46}{item}")
        else:
            numbers = "".join(f"{item[key]:14,}" for key in COLUMNS)
            print(f"{name:46}{numbers}{item['seconds']:9.3f}  {item['losses'] == first['losses']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
