"""Captures and passes for values on CUDA devices, without one: nothing runs, and everything about the devices is so.

The guard and hooks that stand in for CUDA are built here, where there is a compiler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_without_device import COMPILER, build, run_on_cuda
from tests.support.sweeping import sweeping

MODEL = """
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
import graphopt
from graphopt.analysis.host_waits import host_waits
from graphopt.capture import CaptureSession
from graphopt.passes import *
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.precision import kernels
from graphopt.runtime.programs.rewrite import rewrite

kernels._tried = lambda node: False  # no kernel runs here
mode = FakeTensorMode(allow_non_fake_inputs=True)

class Block(nn.Module):
    def __init__(self, width, device):
        super().__init__()
        with torch.device(device):
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        x = x.to(self.up.weight.device)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)

def session(devices=("cuda:0",) * 3, rows=1024):
    with mode:
        model = nn.Sequential(*(Block(64, device) for device in devices))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.empty(rows, 64, device=devices[0])
    return CaptureSession(model, (x,), {}, loss=lambda model, x: model(x).square().mean(), optimizer=optimizer)

def rewritten(passes, **more):
    return rewrite(session(**more), Pipeline(passes), until="step")

def told(program):
    memory = program.memory()
    described = json.loads(json.dumps(program.to_json()))
    return {
        "where": memory.where, "peak": memory.peak_bytes, "resident": memory.resident_bytes,
        "others": {device: other.peak_bytes for device, other in memory.others.items()},
        "waits": [str(wait) for wait in host_waits(program)],
        "same": graphopt.Program.from_json(described).to_text() == program.to_text(),
        "text": program.to_text(),
    }
"""

PASSES = {
    "none": "[]",
    "recompute": "[Recompute('*')]",
    "fit": "[FitMemory('75%', cost='a100-80gb', allow=('recompute',))]",
    "fuse": "[FuseUpdate()]",
    "clip": "[ClipGradients(1.0)]",
    "fp16": "[MixedPrecision('fp16')]",
    "bf16": "[MixedPrecision('bf16', level='O2')]",
}

SWEPT = ("fuse", "clip", "fp16")
"""Pipelines that `make test` leaves to `make sweep`."""

if COMPILER is not None:

    @pytest.fixture(scope="module")
    def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return build(tmp_path_factory.mktemp("guard"))

    @pytest.fixture(scope="module")
    def found(library: Path, request: pytest.FixtureRequest) -> Any:
        """What is told of each pipeline; without those that are swept where nothing of them is asked."""
        names = [name for name in PASSES if name not in SWEPT or sweeping(request)]
        each = ", ".join(f"{name!r}: told(rewritten({PASSES[name]}).program)" for name in names)
        return run_on_cuda(library, f"{MODEL}\nfound = {{{each}}}")

    @pytest.mark.sweep(cases=SWEPT)
    @pytest.mark.parametrize("passes", PASSES)
    def test_a_program_is_on_its_device_and_the_host_has_what_is_small(passes: str, found: Any) -> None:
        program = found[passes]
        assert program["where"] == "cuda:0"
        assert "f32[1024, 64]@cuda:0" in program["text"]
        assert program["same"]  # a description gives the program again
        assert program["waits"] == []
        assert list(program["others"]) == ["cpu"]
        assert 0 < program["others"]["cpu"] < 1000  # rates, generator states

    def test_passes_lower_the_peak_on_the_device(found: Any) -> None:
        plain = found["none"]["peak"]
        assert found["fit"]["peak"] <= 0.75 * plain
        assert found["recompute"]["peak"] < plain
        assert found["bf16"]["peak"] < plain

    def test_generator_states_are_of_the_device_and_on_the_host(found: Any) -> None:
        states = 3 * 16  # of three dropouts, as CUDA's generator keeps them
        assert found["recompute"]["others"]["cpu"] == found["none"]["others"]["cpu"] + states

    @pytest.mark.sweep
    def test_each_device_has_a_timeline_and_the_budget(library: Path) -> None:
        code = """
two = ("cuda:0", "cuda:0", "cuda:1")
plain = rewritten([], devices=two).program
first, other = plain.memory(), plain.memory().others["cuda:1"]
fitted = rewritten([FitMemory(int(0.75 * first.peak_bytes), cost="a100-80gb")], devices=two).program.memory()
try:  # what is done before a plan is searched lowers the peak of the other device as well
    rewritten([FitMemory(int(0.9 * fitted.others["cuda:1"].peak_bytes), cost="a100-80gb")], devices=two)
    refused = ""
except graphopt.GraphoptError as error:
    refused = str(error.__cause__ or error) + str(error)
found = {
    "first": [first.where, first.peak_bytes], "other": [other.where, other.peak_bytes], "refused": refused,
    "sum": sum(t.resident_bytes for t in (first, *first.others.values())), "fitted": fitted.peak_bytes,
    "inputs": sum(s.bytes for t in (first, *first.others.values()) for s in t.storages if s.is_input),
    "text": plain.to_text(),
}
"""
        found = run_on_cuda(library, MODEL + code)
        assert found["first"][0] == "cuda:0"
        assert found["other"][0] == "cuda:1"
        assert found["other"][1] < found["first"][1]  # one block of three
        assert found["sum"] == found["inputs"]
        assert found["fitted"] <= 0.75 * found["first"][1]
        assert "plans lower the peak of cuda:0" in found["refused"]
        assert " on cuda:1" in found["refused"]
        assert "on cuda:1" in found["text"].splitlines()[2]  # the line with the peak
