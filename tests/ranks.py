"""Several processes that run one script together: for what takes a process group."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROLOGUE = """
import datetime, json, os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
)

def say(value):
    print(json.dumps(value), flush=True)

"""


def run_ranks(script: str, world: int, store: Path, *, codes: Sequence[int] | None = None) -> list[list[Any]]:
    """Run a script in ``world`` processes of one gloo group; what each of them gave to ``say``.

    Args:
        script: Python source; has ``rank``, ``world``, ``torch``, ``dist`` and ``say(value)``.
        world: how many processes.
        store: a file that does not exist yet.
        codes: the exit statuses that are expected, by rank; all zero by default.
    """
    command = [sys.executable, "-c", PROLOGUE + script]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(store)],
            cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    texts = [process.communicate(timeout=240) for process in processes]
    found = [process.returncode for process in processes]
    assert found == list(codes or [0] * world), "\n".join(error[-3000:] for _, error in texts)
    return [[json.loads(line) for line in text.splitlines()] for text, _ in texts]
