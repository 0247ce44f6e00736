"""Several processes that run one script together, for what takes a process group; and an address for their store."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.forking import end, start
from tests.support.paths import ROOT

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

EPILOGUE = """
if dist.is_initialized():
    dist.barrier()  # who ends while another one connects to a group would make that one fail
"""


def run_ranks(script: str, world: int, store: Path, *, codes: Sequence[int] | None = None) -> list[list[Any]]:
    """Run a script in ``world`` processes of one gloo group; what each of them gave to ``say``.

    Args:
        script: Python source; has ``rank``, ``world``, ``torch``, ``dist`` and ``say(value)``.
        world: how many processes.
        store: a file that does not exist yet.
        codes: the exit statuses that are expected, by rank; all zero by default.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")) for rank in range(world)]
        arguments = [["-c", str(rank), str(world), str(store)] for rank in range(world)]
        whole = script if codes else script + EPILOGUE
        found = end(start(_run, [(whole, *given) for given in zip(arguments, files, strict=True)]))
        texts = [[file.read_text(encoding="utf-8") for file in pair] for pair in files]
    assert found == list(codes or [0] * world), "\n".join(error[-3000:] for _, error in texts)
    return [[json.loads(line) for line in text.splitlines()] for text, _ in texts]


def free_address() -> str:
    """An address on this machine for a store over TCP."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def _run(script: str, arguments: list[str], files: tuple[Path, Path]) -> None:
    """Be ``python -c script arguments`` from the repository's root, with standard output and error in two files."""
    for number, file in enumerate(files, start=1):
        with file.open("w", encoding="utf-8") as opened:
            os.dup2(opened.fileno(), number)
    os.chdir(ROOT)
    sys.argv = arguments
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(PROLOGUE + script, "<string>", "exec", dont_inherit=True), main.__dict__)
