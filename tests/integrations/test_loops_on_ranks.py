"""Loops that others own, with two processes and optimized models: as without graphopt, to the last bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.loops_on_ranks import LOOPS
from tests.support.paths import ROOT


@pytest.mark.sweep(but=("lightning-tensor",))
@pytest.mark.parametrize("name", LOOPS)
def test_two_processes_train_as_without_graphopt(name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "tests.support.loops_on_ranks", name],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    # what two processes write to one pipe may stand in one line
    said = [json.loads(each) for each in re.findall(r'\{"losses"[^}]*\}', found.stdout)]
    assert said == [{"losses": True, "parameters": True}] * 2, found.stderr[-3000:]
