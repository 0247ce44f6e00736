"""The examples of sharded Llamas at a tiny size: two processes, and one that goes on from what they saved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import EXAMPLES
from tests.support.ranks import free_address

SIZES = ["--batch", "2", "--context", "16", "--layers", "1", "--features", "160"]


def run(ranks: int, *arguments: str, example: str = "sharded_llama.py") -> str:
    """What the first of so many processes prints."""
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    address, port = free_address().split(":")
    common = {**known, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": address, "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / example), *SIZES, *arguments],
            env={**common, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    texts = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(error[-3000:] for _, error in texts)
    assert not any(printed for printed, _ in texts[1:])
    return texts[0][0]


@pytest.mark.sweep
def test_two_processes_train_and_one_goes_on(tmp_path: Path) -> None:
    first = run(
        2, "--folder", str(tmp_path / "run"), "--steps", "2", "--budget", "100%", "--page", str(tmp_path / "page.html")
    )
    assert re.search(r"shard-parameters: [1-9]\d* parameters sharded, [1-9]\d* gathers", first)
    assert "what each of 2 ranks holds, and when it waits" in (tmp_path / "page.html").read_text(encoding="ascii")
    kept, whole = map(float, re.findall(r"keeps ([\d.]+) MB of ([\d.]+) MB", first)[0])
    assert whole / 2 <= kept < 0.6 * whole
    assert "equal with the model that is put together" in first
    second = run(1, "--folder", str(tmp_path / "run"), "--steps", "4", "--budget", "100%")
    assert "Went on behind step 2, with 1 processes." in second
    assert "step    4: loss" in second
    assert "equal with the model that is put together" in second


@pytest.mark.sweep
def test_a_model_after_fully_shard_trains_alike_within_a_budget() -> None:
    *ways, verdict = run(
        2, "--steps", "4", "--budget", "80%", "--layers", "2", "--context", "128", example="fsdp2.py"
    ).splitlines()
    assert verdict == "Losses and parameters are equal in all ways, to the last bit"
    sizes = {line[:22].strip(): float(line[22:].split(" MB")[0]) for line in ways}
    assert list(sizes) == ["FSDP2", "FSDP2, checkpointing", "optimize", "FitMemory('80%')"]
    # a gather is under way beside the computation, which FSDP2 does on devices with streams only
    assert sizes["FitMemory('80%')"] < sizes["FSDP2"]
    assert sizes["FitMemory('80%')"] < sizes["optimize"] <= 1.05 * sizes["FSDP2"]
