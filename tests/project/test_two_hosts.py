"""The example that starts others on two hosts: its commands are for torchrun, and it says what it needs."""

from __future__ import annotations

import os
import subprocess
import sys

from torch.distributed.run import get_args_parser

from tests.support.paths import EXAMPLES


def test_the_commands_are_for_two_hosts_and_keep_the_arguments_of_the_script() -> None:
    done = _start("--processes", "3", "--print", "train.py", "--budget", "70%")
    first, second = done.stdout.splitlines()
    for rank, line in enumerate((first, second)):
        words = line.split()
        assert words[0] == "torchrun"
        found = get_args_parser().parse_args(words[1:])
        assert (found.nnodes, found.node_rank, found.nproc_per_node) == ("2", rank, "3")
        assert (found.training_script, found.training_script_args) == ("train.py", ["--budget", "70%"])
    assert first.split()[-5:-2] == second.split()[-5:-2]


def test_it_says_what_it_needs() -> None:
    done = _start("train.py", path="")
    assert done.returncode == 1
    assert "install the package iproute2" in done.stderr


def _start(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) if path is None else {**os.environ, "PATH": path}
    command = [sys.executable, str(EXAMPLES / "two_hosts.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)
