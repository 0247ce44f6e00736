"""The example of data parallelism at a tiny size: every mode with two ranks, and torchrun with one of them."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.support.forking import end, start
from tests.support.paths import EXAMPLES
from tests.support.ranks import free_address
from tests.support.sweeping import sweeping

SIZES = ["--steps", "4", "--batch", "2", "--context", "16", "--layers", "1", "--features", "64", "--heads", "2"]
PASSES = {
    "dense": "DataParallel",
    "sparse": "DeepGradientCompression",
    "local": "LocalSGD",
    "adaptive": "AdaptiveLocalSGD",
    "diloco": "DiLoCo",
    "bf16": "CompressGradients",
    "powersgd": "CompressGradients",
    "sharded": "ShardOptimizer",
}
MODES = list(PASSES)
SWEPT = ("sparse", "adaptive", "powersgd", "bf16", "local", "diloco", "sharded")
"""What `make test` leaves to `make sweep`: what these modes do is tested with their passes."""


def run_rank(rank: int, modes: list[str], ports: list[str], folder: Path) -> None:
    """Be one of two ranks, for one mode after the other; what it prints goes to a file."""
    os.environ.update({**environment(), "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"})
    sys.path.insert(0, str(EXAMPLES))
    data_parallel = importlib.import_module("data_parallel")
    with (folder / f"{rank}.txt").open("w", encoding="utf-8") as opened, redirect_stdout(opened):
        for mode, port in zip(modes, ports, strict=True):
            os.environ["MASTER_PORT"] = port
            print("mode", mode)
            assert data_parallel.main(["--mode", mode, *SIZES]) == 0


def environment() -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return {**known, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}


@pytest.fixture(scope="module")
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the first of two ranks prints, by mode; without the modes that are swept where nothing of them is asked."""
    modes = [mode for mode in MODES if mode not in SWEPT or sweeping(request)]
    ports = [free_address().split(":")[1] for _ in modes]
    folder = tmp_path_factory.mktemp("printed")
    assert end(start(run_rank, [(rank, modes, ports, folder) for rank in range(2)])) == [0, 0]
    texts = [(folder / f"{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
    assert texts[1].split() == [word for mode in modes for word in ("mode", mode)]
    parts = re.split(r"^mode (\w+)\n", texts[0], flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.sweep(cases=SWEPT)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_ends_with_equal_ranks(printed: dict[str, str], mode: str) -> None:
    text = printed[mode]
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+), \d+ ms$", text, re.MULTILINE)]
    assert len(losses) == 4
    assert mode == "sparse" or losses[-1] < losses[0]  # so few steps send too little of 99.9 %
    assert re.search(r"^The [\d,]+ parameters of the 2 ranks are equal to the last bit\.$", text, re.MULTILINE)
    assert "17 gradients exchanged" in text


def test_all_modes_start_with_the_same_loss(printed: dict[str, str]) -> None:
    assert len({re.search(r"^step    1: loss ([\d.]+),", text, re.MULTILINE)[1] for text in printed.values()}) == 1  # type: ignore[index]


@pytest.mark.sweep
def test_the_sparse_mode_sends_few_entries(printed: dict[str, str]) -> None:
    assert "4 of 17 gradients are exchanged sparsely over the 2 ranks" in printed["sparse"]


@pytest.mark.sweep
def test_torchrun_runs_it() -> None:
    port = free_address().split(":")[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", port, str(EXAMPLES / "data_parallel.py")]
    done = subprocess.run(
        [*command, "--mode", "dense", *SIZES],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal to the last bit") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "start one process for each rank: torchrun"),
        (["--mode", "dence"], "invalid choice: 'dence'"),
        (["--steps", "1"], "take at least 2"),
        (["--features", "10", "--heads", "4"], "--features 10 is not a multiple of --heads 4"),
    ],
)
def test_wrong_calls_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    for name in ("data_parallel", "models", "text"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit) as error:
        importlib.import_module("data_parallel").main(arguments)
    for name in ("data_parallel", "models", "text"):
        sys.modules.pop(name, None)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
