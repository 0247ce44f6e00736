"""The table of ``make gpu``, tried where there is no GPU: what is asked, what is written, and how it ends."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.paths import BENCHMARKS, ROOT


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_it_ends_with_one_line_where_there_is_no_gpu(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "none")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "no GPU" in said.err
    assert not (tmp_path / "none").exists()


def test_make_ends_at_once_where_there_is_no_gpu(tmp_path: Path) -> None:
    none = tmp_path / "nvidia-smi"
    none.write_text("#!/bin/sh\nexit 9\n")
    none.chmod(0o755)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    done = subprocess.run(
        ["make", "--no-print-directory", "gpu", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert done.stdout.strip().splitlines() == [
        "make gpu needs a machine with an NVIDIA GPU, and nvidia-smi finds none here: nothing was run"
    ]
    assert not (tmp_path / "venv").exists()


def test_a_row_that_raises_is_shown_and_the_others_go_on(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def raises() -> Any:
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    here = torch.device("cpu")
    asked = [("one", here, raises), ("two", here, lambda: ("yes", "3 bytes"))]
    monkeypatch.setattr(gpu, "questions", lambda *_: iter(asked))
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    assert [row["outcome"] for row in rows] == ["failed", "yes"]
    assert rows[0]["figure"] == "RuntimeError: CUDA error: an illegal memory access"
    text = (tmp_path / "gpu.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    assert f"torch {torch.__version__}" in text


def test_a_second_device_is_asked_for_bits(gpu: ModuleType) -> None:
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    asked = list(gpu.questions(devices, True))
    assert {str(device) for question, device, _ in asked if question.startswith("eager's bits")} == {"cuda:0", "cuda:1"}
    alone = [(device, answer) for question, device, answer in asked if not question.startswith("two ranks")]
    assert all(answer.args[0].device == device for device, answer in alone)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_two_ranks_need_two_devices(gpu: ModuleType, device: str) -> None:
    asked = [answer for question, _, answer in gpu.questions([torch.device(device)], True) if "two ranks" in question]
    assert [answer()[0] for answer in asked] == ["one device here"] * 3


def test_two_devices_give_the_figures_of_two_ranks(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"plain": 0.1, "exchanged": 0.15, "exchange": 0.08, "exposed": 0.05}
    monkeypatch.setattr(gpu, "exchange", lambda kind, quick: found)
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    asked = [answer for question, _, answer in gpu.questions(devices, True) if question.startswith("two ranks")]
    assert [answer() for answer in asked] == [
        ("figure", "100.0 ms"), ("figure", "150.0 ms"), ("figure", "50.00 of 80.00 ms"),
    ]  # fmt: skip


@pytest.mark.usefixtures("gpu")
def test_exchanges_are_exposed_where_no_other_kernel_runs() -> None:
    exposed = importlib.import_module("gpu_exchange").exposed
    spans = [(0, 10, "gemm"), (6, 16, "ncclDevKernel_AllReduce"), (12, 13, "add"), (20, 24, "ncclDevKernel_AllReduce")]
    assert exposed(spans) == (14, pytest.approx(9))
    assert exposed([(0, 10, "gemm")]) == (0, 0)


@pytest.mark.sweep
def test_two_ranks_measure_their_steps_on_a_cpu(gpu: ModuleType) -> None:
    found = gpu.exchange("cpu", True)
    assert found["plain"] > 0
    assert found["exchanged"] > 0
    assert found["exchange"] == found["exposed"] == 0


@pytest.mark.parametrize(
    ("copies", "kernels", "share"),
    [
        ([(0, 10)], [(0, 4), (2, 6)], 0.6),
        ([(0, 10), (20, 30)], [(5, 25)], 0.5),
        ([(0, 10)], [], 0.0),
        ([], [(0, 10)], 0.0),
    ],
)
def test_the_share_of_copies_beside_kernels(
    gpu: ModuleType, copies: list[tuple[int, int]], kernels: list[tuple[int, int]], share: float
) -> None:
    assert gpu.covered(copies, kernels) == share


@pytest.mark.sweep
def test_all_questions_are_answered_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    outcomes = {row["question"]: row["outcome"] for row in rows}
    assert {outcome for question, outcome in outcomes.items() if "bits" in question} == {"yes"}
    assert [question for question, outcome in outcomes.items() if outcome == "needs a GPU"] == [
        "reserves what was predicted", "offload beside kernels", "runs as a CUDA graph",
    ]  # fmt: skip
