"""Transfers in processes that fork, are killed, or may use little memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

START = """
import os, resource, sys, threading
import torch
from graphopt import GraphoptError
from graphopt.ops import transfer
from graphopt.runtime import transfers
from tests.transferring import back, gated, held, round_trip, started
"""


def command(script: str, folder: Path) -> list[str]:
    code = f"{START}\ntransfers.configure(disk_directory={str(folder)!r})\n{script}"
    return [sys.executable, "-W", "ignore", "-c", code]


def run(script: str, folder: Path) -> str:
    """What a child process prints that runs ``script``; it must end well."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system at once
    done = subprocess.run(
        command(script, folder), cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_starts_anew_and_the_parent_goes_on(tmp_path: Path) -> None:
    script = """
x, y = torch.arange(1000.0), torch.arange(1000.0) + 5
handles = {tier: held(x, tier) for tier in transfers.TIERS}
with gated() as gate:
    pending = transfer.offload(y, "host")
    child = os.fork()
    gate.open()
    if child == 0:
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
    assert os.waitpid(child, 0)[1] == 0
transfer.offload_wait(pending, y)
assert torch.equal(back(pending, y), y)
for tier, handle in handles.items():
    assert torch.equal(back(handle, x), x), tier
print("done")
"""
    assert run(script, tmp_path) == "done\n"


def test_a_process_ends_in_the_middle_of_copies(tmp_path: Path) -> None:
    script = """
x = torch.randn(3_000_000)
handles = [transfer.offload(x, tier) for tier in transfers.TIERS for _ in range(4)]
fetched = [started(handle, x) for handle in handles]
print("done")
"""
    assert run(script, tmp_path) == "done\n"
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    script = """
x = torch.randn(4_000_000)
handle = held(x, "disk")
print("writing", flush=True)
while True:
    handles = [transfer.offload(x, "disk") for _ in range(3)]
    for other in handles:
        transfer.offload_wait(other, x)
"""
    root = Path(__file__).parents[1]
    with subprocess.Popen(command(script, tmp_path), cwd=root, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


LIMITED = """
def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))

def keep(move):
    kept = []
    for number in range(20):
        x = torch.full((4_000_000,), float(number))  # 16 MB
        kept.append(move(x))
        del x
    return kept

def check(handles):
    like = torch.empty(4_000_000)
    for number, handle in enumerate(handles):
        assert torch.equal(back(handle, like), torch.full_like(like, float(number)))

round_trip(torch.ones(4_000_000), "disk")
transfers.trim()
resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + 128_000_000, resource.RLIM_INFINITY))
"""


def test_activations_on_disk_take_no_memory(tmp_path: Path) -> None:
    script = LIMITED + """
check(keep(lambda x: held(x, "disk")))
print("disk:", transfers.statistics().peak_held_bytes)
try:
    keep(lambda x: held(x, "host"))
except GraphoptError as error:
    print("host:", "the system refuses them" in str(error))
transfers.trim()
try:
    keep(lambda x: x)
except RuntimeError as error:
    print("kept:", "memory" in str(error))
check(keep(lambda x: held(x, "disk")))
"""  # fmt: skip
    assert run(script, tmp_path).splitlines() == ["disk: 320000000", "host: True", "kept: True"]
