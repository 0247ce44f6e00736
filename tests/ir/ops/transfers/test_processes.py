"""Transfers in processes that fork, end early, are killed, or may use little memory.

Starting a process takes seconds, so two of them do everything: each test looks at a part of what one did.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

START = """
import os, resource, signal, sys, threading
import torch
from graphopt import GraphoptError
from graphopt.ir.ops.storage import transfer
from graphopt.ir.ops import transfers
from tests.support.transferring import back, gated, held, round_trip, started

transfers.configure(disk_directory=sys.argv[1])
signal.alarm(200)  # a process that hangs is ended
"""

FORKING = """
x, y = torch.arange(1000.0), torch.arange(1000.0) + 5
handles = {tier: held(x, tier) for tier in transfers.TIERS}
with gated() as gate:
    pending = transfer.offload(y, "host")
    child = os.fork()
    gate.open()
    if child == 0:
        signal.alarm(100)
        for handle in (*handles.values(), pending):
            try:
                back(handle, x)
            except GraphoptError as error:
                assert "before this process was forked" in str(error)
            else:
                raise AssertionError("a handle of the parent was used")
        del handle, handles, pending
        assert transfers.statistics().offloads == 0
        for tier in transfers.TIERS:
            for value in range(20):
                z = torch.full((1000,), float(value))
                assert torch.equal(round_trip(z, tier), z)
        assert sum("transfers" in thread.name for thread in threading.enumerate()) == 1
        sys.exit(0)
    print("child:", os.waitpid(child, 0)[1], flush=True)
transfer.offload_wait(pending, y)
assert torch.equal(back(pending, y), y)
for tier, handle in handles.items():
    assert torch.equal(back(handle, x), x), tier
print("parent: goes on", flush=True)
"""

ENDING = """
x = torch.randn(3_000_000)
handles = [transfer.offload(x, tier) for tier in transfers.TIERS for _ in range(4)]
fetched = [started(handle, x) for handle in handles]
print("end: now", flush=True)
"""

LIMITED = """
SIZE, NUMBER = 4_000_000, 12  # 16 MB each

def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))

def keep(move):
    kept = []
    for number in range(NUMBER):
        x = torch.full((SIZE,), float(number))
        kept.append(move(x))
        del x
    return kept

round_trip(torch.ones(SIZE), "disk")
transfers.reset_statistics()
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + 100_000_000, before[1]))
for number, handle in enumerate(keep(lambda x: held(x, "disk"))):
    assert torch.equal(back(handle, torch.empty(SIZE)), torch.full((SIZE,), float(number)))
del handle
print("disk:", transfers.statistics().peak_stored_bytes, flush=True)
try:
    keep(lambda x: held(x, "host"))
except GraphoptError as error:
    print("host:", "the system refuses them" in str(error), flush=True)
transfers.trim()
try:
    keep(lambda x: x)
except RuntimeError as error:
    print("kept:", "memory" in str(error), flush=True)
resource.setrlimit(resource.RLIMIT_DATA, before)
"""

WRITING = """
x = torch.randn(4_000_000)
handle = held(x, "disk")
print("writing: now", flush=True)
while True:
    handles = [transfer.offload(x, "disk") for _ in range(3)]
    for other in handles:
        transfer.offload_wait(other, x)
"""


def start(script: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs ``script`` with its file in ``folder``."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system at once
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", START + script, str(folder)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process said that forked, and then ended in the middle of copies; what it left behind."""
    folder = tmp_path_factory.mktemp("forked")
    with start(FORKING + ENDING, folder) as process:
        said = dict(line.rstrip().split(": ") for line in process.stdout or ())
    return {**said, "code": str(process.returncode), "files": str(list(folder.iterdir()))}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a process said whose memory was limited, and that was killed while writing; what it left behind."""
    folder = tmp_path_factory.mktemp("limited")
    said: dict[str, str] = {}
    with start(LIMITED + WRITING, folder) as process:
        for line in process.stdout or ():
            key, value = line.rstrip().split(": ")
            said[key] = value
            if key == "writing":
                process.send_signal(signal.SIGKILL)
    return {**said, "code": str(process.returncode), "files": str(list(folder.iterdir()))}


@pytest.mark.sweep
def test_a_forked_child_starts_anew_and_the_parent_goes_on(forked: dict[str, str]) -> None:
    assert (forked.get("child"), forked.get("parent")) == ("0", "goes on")


def test_a_process_ends_in_the_middle_of_copies(forked: dict[str, str]) -> None:
    assert (forked.get("end"), forked["code"], forked["files"]) == ("now", "0", "[]")


@pytest.mark.sweep
def test_activations_on_disk_take_no_memory(limited: dict[str, str]) -> None:
    """A process that may have 100 MB more holds 192 MB on disk; the system refuses them as host memory, and kept."""
    assert (limited.get("disk"), limited.get("host"), limited.get("kept")) == ("192000000", "True", "True")


@pytest.mark.sweep
def test_a_killed_process_leaves_no_file(limited: dict[str, str]) -> None:
    assert (limited.get("writing"), limited["code"], limited["files"]) == ("now", str(-signal.SIGKILL), "[]")
